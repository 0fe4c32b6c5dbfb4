"""Initialisations: what is zero, what is spread how, and that the generator alone decides."""

import math

import pytest
import torch
from torch import nn

from shf.lab.initialisation import initialise_
from shf.lab.models import autoencoder, classifier, incoming_weights, weight_layers


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sparse_input", [False, True])
def test_sparse_gives_every_unit_fifteen_incoming_weights(sparse_input: bool) -> None:
    model = classifier((100, 200, 10), sparse_input=sparse_input)
    initialise_(model, "sparse", generator=generator(), bias=0.1)
    for layer in weight_layers(model):
        weights = incoming_weights(layer)
        assert (weights != 0).sum(1).tolist() == [15] * layer.out_features
        assert torch.equal(layer.bias, torch.full_like(layer.bias, 0.1))
    drawn = incoming_weights(next(weight_layers(model)))
    drawn = drawn[drawn != 0]
    assert abs(drawn.mean().item()) < 0.06  # 3000 draws: sd 0.018
    assert drawn.std().item() == pytest.approx(1.0, abs=0.05)


def test_sparse_chooses_all_inputs_alike() -> None:
    model = classifier((30, 4000))
    initialise_(model, "sparse", generator=generator())
    chosen = (incoming_weights(next(weight_layers(model))) != 0).double().mean(0)
    assert chosen.min() > 0.45
    assert chosen.max() < 0.55


def test_a_unit_with_fewer_inputs_gets_them_all() -> None:
    model = autoencoder((20, 6))
    initialise_(model, "sparse", generator=generator())
    decoder = list(weight_layers(model))[1]
    assert (decoder.weight != 0).all()
    assert (decoder.bias == 0).all()


@pytest.mark.parametrize(("scheme", "bound"), [("normalised", math.sqrt(6 / 301)), ("torch", 0.1)])
def test_uniform_schemes_fill_their_interval(scheme: str, bound: float) -> None:
    model = classifier((100, 200))
    initialise_(model, scheme, generator=generator(), bias=0.3)
    layer = next(weight_layers(model))
    assert layer.weight.abs().max() <= bound
    assert layer.weight.abs().max() > 0.99 * bound
    assert abs(layer.weight.mean().item()) < 0.01 * bound
    if scheme == "torch":
        assert 0 < layer.bias.abs().max() <= bound
    else:
        assert torch.equal(layer.bias, torch.full_like(layer.bias, 0.3))


@pytest.mark.parametrize("scheme", ["sparse", "normalised", "torch"])
def test_only_the_generator_decides(scheme: str) -> None:
    first, second, other = (classifier((20, 10, 3)) for _ in range(3))
    before = torch.get_rng_state()
    initialise_(first, scheme, generator=generator(1))
    initialise_(second, scheme, generator=generator(1))
    initialise_(other, scheme, generator=generator(2))
    assert torch.equal(before, torch.get_rng_state()), "torch's global generator is not touched"
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_scale_multiplies_the_weights_alone() -> None:
    one, two = classifier((20, 10, 3)), classifier((20, 10, 3))
    initialise_(one, "sparse", generator=generator(), bias=0.1)
    initialise_(two, "sparse", generator=generator(), bias=0.1, scale=0.5)
    for a, b in zip(weight_layers(one), weight_layers(two), strict=True):
        torch.testing.assert_close(0.5 * a.weight, b.weight)
        assert torch.equal(a.bias, b.bias)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="scheme='zeros'"):
        initialise_(classifier((3, 2)), "zeros", generator=generator())
    with pytest.raises(ValueError, match="ReLU has no linear layer"):
        initialise_(nn.ReLU(), generator=generator())
