"""Layers run case by case for the preconditioner: what they remember, and who listens to them, is left out of it."""

import copy

import pytest
import torch
from torch import nn

import shf
from helpers import Objective, assert_close, identical, labelled, mlp, snapshot
from shf.data.batches import Batch
from shf.losses import Loss
from shf.model.layersquares import Use, formula
from shf.model.network import Network
from shf.probing.layout import find_layout

CE = nn.CrossEntropyLoss()
OPTIONS = [{}, {"preconditioner": "jacobi"}, shf.presets.fast]
x, t = labelled()


class Remembers(nn.Module):
    """A scale with a running mean that is assigned, not written in place, and a count of its calls."""

    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        self.calls = self.calls + 1
        return inputs * self.scale


@pytest.mark.parametrize("options", OPTIONS)
def test_a_layer_that_assigns_its_buffers_has_them_once_per_step(options):
    torch.manual_seed(0)
    layers = mlp()
    model = nn.Sequential(layers[0], Remembers(6), *layers[1:])
    before = copy.deepcopy(model)
    before(x)
    shf.SHF(model, CE, **options).step(x, t)
    assert model[1].calls == 1
    assert torch.equal(model[1].mean, before[1].mean)
    assert torch.isfinite(copy.deepcopy(model)(x)).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_hooks_hear_whole_passes_only(options):
    heard = []
    model = nn.Sequential(mlp(), nn.LayerNorm(3).double())
    model[1].register_forward_hook(lambda module, args, output: heard.append(output.detach().sum()))
    shf.SHF(model, CE, **options).step(x, t)
    assert heard
    assert all(torch.isfinite(number).item() for number in heard)  # a tensor of a mapped pass could not be read


def test_a_buffer_that_changes_its_shape_is_named_and_nothing_changes():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, inputs):
            self.seen = torch.cat([self.seen, torch.ones(1)])
            return self.body(inputs)

    optimizer = shf.SHF(Grows(), CE)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"buffer seen has shape \(0,\), and \(1,\) after a pass"):
        optimizer.step(x, t)
    assert identical(snapshot(optimizer), before)


class Scaled(nn.Embedding):
    """Has the formula of nn.Embedding no longer."""

    def forward(self, words):
        return 3 * super().forward(words)


class MeanOfWords(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.out = embedding, nn.Linear(3, 3)

    def forward(self, words):
        return self.out(self.embedding(words).tanh().mean(1))


VARIANTS = {
    "plain": (nn.Embedding, {}),
    "padding": (nn.Embedding, {"padding_idx": 1}),
    "padding from the end": (nn.Embedding, {"padding_idx": -1}),
    "sparse": (nn.Embedding, {"sparse": True}),
    "scaled by frequency": (nn.Embedding, {"scale_grad_by_freq": True}),
    "a forward of its own": (Scaled, {}),
}


def squares_of_embedding(model, words):
    """The empirical Fisher diagonal of the embedding's weight."""
    network, batch = Network(model, list(model.parameters())), Batch.of(words, t)
    diagonal = Objective(network, Loss(CE), batch, find_layout(network, batch, 3)).data_terms()[2]
    return network.shapes.split(diagonal)[0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", VARIANTS)
def test_squares_of_an_embedding_are_those_of_single_cases(name, dtype):
    """A word that a case holds several times counts with the square of the sum."""
    kind, options = VARIANTS[name]
    torch.manual_seed(0)
    model, words = MeanOfWords(kind(6, 3, **options)).double(), torch.randint(5, (len(t), 4), dtype=dtype)
    words[:, 0] = 5
    found, plain = squares_of_embedding(model, words), MeanOfWords(kind(6, 3, **options)).double()
    plain.load_state_dict(model.state_dict())
    plain.embedding.sparse = plain.embedding.scale_grad_by_freq = False
    singles = [
        torch.autograd.grad(CE(plain(words[j : j + 1]), t[j : j + 1]), plain.embedding.weight)[0].square()
        for j in range(len(t))
    ]
    assert_close(found, sum(singles) / len(t))


class Doubled(nn.Conv2d):
    """Has the formula of a convolution no longer."""

    def forward(self, images):
        return super().forward(2 * images)


DEPTHWISE = {
    "one axis": (lambda: nn.Conv1d(3, 3, 4, stride=2, padding=2, groups=3), (3, 9)),
    "two axes": (lambda: nn.Conv2d(3, 6, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2), groups=3), (3, 5, 6)),
    "three axes": (lambda: nn.Conv3d(2, 2, 2, padding=1, groups=2, bias=False), (2, 3, 2, 3)),
    "a kernel that sees padding alone": (lambda: nn.Conv2d(2, 2, 5, padding=2, groups=2), (2, 1, 2)),
    "a forward of its own": (lambda: Doubled(3, 3, 3, groups=3), (3, 4, 4)),
}


@pytest.mark.parametrize("name", DEPTHWISE)
@pytest.mark.parametrize("uses", [1, 2])
def test_squares_of_a_convolution_of_each_channel_are_those_of_single_cases(name, uses, monkeypatch):
    """By a formula: torch's gradient of each case's weights would cost as much as the model's gradient."""
    make, shape = DEPTHWISE[name]
    torch.manual_seed(0)
    layer, calls = make().double(), [torch.randn(4, *shape, dtype=torch.float64) for _ in range(uses)]
    g = [torch.randn_like(layer(a)) for a in calls]
    parameters = dict(layer.named_parameters())
    if name != "a forward of its own":
        monkeypatch.setattr("shf.model.layersquares._pullback_per_case", None)
    found = formula(
        layer, {n: p.detach() for n, p in parameters.items()}, [Use(*pair) for pair in zip(calls, g, strict=True)]
    )
    singles = [
        torch.autograd.grad([layer(a[j : j + 1]) for a in calls], list(parameters.values()), [u[j : j + 1] for u in g])
        for j in range(4)
    ]
    for parameter, *of_cases in zip(parameters, *singles, strict=True):
        assert_close(found[parameter].total, sum(case.square() for case in of_cases))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "a forward of its own"])
def test_an_embedding_makes_no_gradients_of_words_that_a_case_does_not_hold(monkeypatch, name):
    """Fails if each case gets a gradient of the whole vocabulary: a step would cost a hundred gradients."""

    def refused(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr("shf.model.layersquares._pullback_per_case", refused)
    monkeypatch.setattr("shf.model.percase._case_by_case", refused)
    kind, options = VARIANTS[name]
    words = torch.randint(5, (len(t), 4))
    for preset in OPTIONS:
        assert shf.SHF(MeanOfWords(kind(6, 3, **options)).double(), CE, **preset).step(words, t).accepted


def test_an_embedding_whose_weight_is_used_elsewhere_too_takes_the_exact_path():
    class Head(MeanOfWords):
        def forward(self, words):
            return super().forward(words) + self.embedding.weight[:3, 0]

    torch.manual_seed(0)
    model, words = Head(nn.Embedding(6, 3)).double(), torch.randint(6, (len(t), 4))
    singles = [
        torch.autograd.grad(CE(model(words[j : j + 1]), t[j : j + 1]), model.embedding.weight)[0].square()
        for j in range(len(t))
    ]
    assert_close(squares_of_embedding(model, words), sum(singles) / len(t))
