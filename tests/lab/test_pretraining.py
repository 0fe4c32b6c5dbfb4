"""Layerwise pretraining: layers learn to reconstruct, decoders mirror encoders, the generator alone decides."""

import pytest
import torch
from torch import Tensor, nn

from shf.lab.initialisation import initialise_
from shf.lab.models import autoencoder, classifier, weight_layers
from shf.lab.pretraining import Unit, pretrain_


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bars(rows: int = 300, side: int = 6) -> Tensor:
    """Images in [0, 1] of one horizontal and one vertical bar: easily compressed."""
    g = generator(7)
    images = torch.full((rows, side, side), 0.05)
    across, down = (torch.randint(side, (rows,), generator=g) for _ in range(2))
    images[torch.arange(rows), across] = 0.95
    images[torch.arange(rows), :, down] = 0.95
    return images.flatten(1)


def reconstruction_error(model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return (model(x).sigmoid() - x).square().sum(1).mean().item()


@pytest.mark.parametrize("method", ["denoising", "rbm"])
def test_every_layer_of_an_autoencoder_learns_to_reconstruct(method: str) -> None:
    x, model = bars(), autoencoder((36, 24, 12))
    initialise_(model, "sparse", generator=generator())
    errors: dict[int, list[float]] = {}
    before = reconstruction_error(model, x)
    pretrain_(
        model,
        x,
        method=method,
        epochs=60,
        batch_size=20,
        learning_rate=0.01,
        generator=generator(),
        report=lambda layer, epoch, error: errors.setdefault(layer, []).append(error),
    )
    assert sorted(errors) == [1, 2]
    for history in errors.values():
        assert len(history) == 60
        assert history[-1] < 0.6 * history[0]
    mean_image = (x - x.mean(0)).square().sum(1).mean().item()
    assert reconstruction_error(model, x) < min(before, mean_image)


@pytest.mark.parametrize("method", ["denoising", "rbm"])
def test_decoders_are_transposed_encoders(method: str) -> None:
    model = autoencoder((36, 10, 4))
    pretrain_(model, bars(), method=method, epochs=1, generator=generator())
    layers = list(weight_layers(model))
    for encoder, decoder in zip(layers[:2], reversed(layers[2:]), strict=True):
        assert torch.equal(decoder.weight, encoder.weight.T)


@pytest.mark.parametrize("method", ["denoising", "rbm"])
def test_a_classifier_keeps_its_last_layer(method: str) -> None:
    model = classifier((36, 20, 10, 3), input_dropout=0.2, hidden_dropout=0.5)
    initialise_(model, "sparse", generator=generator(), bias=0.1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    standardised = (bars() - bars().mean(0)) / (bars().var(0) + 0.01).sqrt()
    errors: dict[int, list[float]] = {}
    pretrain_(
        model,
        standardised,
        method=method,
        epochs=10,
        generator=generator(),
        report=lambda layer, epoch, error: errors.setdefault(layer, []).append(error),
    )
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"}
    assert all(history[-1] < history[0] for history in errors.values())


def test_pretraining_helps_where_it_starts() -> None:
    """A linear readout fitted on pretrained features beats one on random features of the same size."""
    x = bars(600)
    targets = x.view(-1, 6, 6).mean(2).argmax(1)

    def readout_error(model: nn.Sequential) -> float:
        with torch.no_grad():
            features = model[1](model[0](x))
        features = torch.cat([features, torch.ones(len(x), 1)], 1).double()
        onehot = nn.functional.one_hot(targets, 6).double()
        solution = torch.linalg.lstsq(features[:300], onehot[:300]).solution
        return (features[300:] @ solution).argmax(1).ne(targets[300:]).double().mean().item()

    random, pretrained = classifier((36, 12, 6)), classifier((36, 12, 6))
    for model in (random, pretrained):
        initialise_(model, "sparse", generator=generator(3))
    pretrain_(pretrained, x, method="rbm", epochs=30, batch_size=20, learning_rate=0.01, generator=generator())
    assert readout_error(pretrained) < readout_error(random)


@pytest.mark.parametrize("method", ["denoising", "rbm"])
def test_only_the_generator_decides(method: str) -> None:
    models = [autoencoder((36, 10, 4)) for _ in range(3)]
    before = torch.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        pretrain_(model, bars(60), method=method, epochs=2, generator=generator(seed))
    assert torch.equal(before, torch.get_rng_state())
    first, second, other = (next(model.parameters()) for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


class TestUnits:
    z = torch.linspace(-2, 2, 5).repeat(20_000, 1)

    @pytest.mark.parametrize("unit", [Unit.LOGISTIC, Unit.LINEAR])
    def test_samples_have_the_unit_s_mean(self, unit: Unit) -> None:
        sampled = unit.sample(self.z, generator()).mean(0)
        torch.testing.assert_close(sampled, unit.mean(self.z[0]), atol=0.03, rtol=0)

    def test_rectified_samples_are_noisy_rectifications(self) -> None:
        sampled = Unit.RECTIFIER.sample(self.z, generator())
        assert sampled.min() == 0
        assert sampled[:, -1].mean().item() == pytest.approx(2.0, abs=0.05)
        assert sampled[:, -1].std().item() == pytest.approx(torch.sigmoid(torch.tensor(2.0)).sqrt().item(), abs=0.05)


def test_contrastive_divergence_rises_the_likelihood_of_a_tiny_machine() -> None:
    """Exact log-likelihood of a 6-4 binary machine, summed over all states, before and after training."""
    model = classifier((6, 4, 2))
    model.rectifier1 = nn.Sigmoid()
    data = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]], dtype=torch.float32).repeat(50, 1)
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 6)

    def log_likelihood(W: Tensor, b: Tensor, c: Tensor) -> float:
        def free(v: Tensor) -> Tensor:
            return v @ c + nn.functional.softplus(v @ W.T + b).sum(1)

        return (free(data) - free(states).logsumexp(0)).mean().item()

    from shf.lab import pretraining

    layer = next(iter(pretraining._layers(model, data)))
    settings = pretraining.PretrainingSettings(epochs=1, batch_size=10)
    train = pretraining._rbm(layer, settings, generator())
    W, b, c = layer.linear.weight.detach(), layer.linear.bias.detach(), layer.visible_bias.detach()
    start = log_likelihood(W, b, c)
    for epoch in range(60):
        pretraining._epoch(train, data, epoch, settings, generator(epoch))
    end = log_likelihood(W, b, c)
    assert start == pytest.approx(-6 * 0.693, abs=0.2)
    assert end > -1.5, "the best possible is -log 2 = -0.69"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "method='magic'"),
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"corruption": 1.0}, "corruption=1.0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pretrain_(autoencoder((36, 4)), bars(20), generator=generator(), **arguments)


def test_what_cannot_be_pretrained_is_refused() -> None:
    with pytest.raises(ValueError, match="no hidden layer"):
        pretrain_(classifier((36, 3)), bars(20), generator=generator())
    with pytest.raises(ValueError, match="inputs are sparse"):
        pretrain_(classifier((36, 8, 3), sparse_input=True), bars(20).to_sparse_csr(), generator=generator())


def test_divergence_is_an_error() -> None:
    with pytest.raises(ArithmeticError, match="layer 1 diverged"):
        pretrain_(
            classifier((36, 20, 3)), 100 * bars(), method="rbm", learning_rate=10.0, epochs=5, generator=generator()
        )
