"""Layers run case by case for the preconditioner: what they remember, and who listens to them, is left out of it."""

import copy

import pytest
import torch
from torch import nn

import shf
from helpers import identical, labelled, mlp, snapshot

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
