"""Weight clipping: no unit's squared incoming norm above the bound, and nothing else moved."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shf
from helpers import assert_close
from shf.linear.flat import Shapes
from shf.nn import SparseLinear
from shf.update import clip_norms_, input_major_groups

SHAPES = [(3, 4), (3,), (2, 3, 2, 2), (), (5, 1)]


def clipped(bound, seed=0, scale=3.0):
    """Tensors before and after."""
    source = torch.Generator().manual_seed(seed)
    tensors = [scale * torch.randn(s, generator=source, dtype=torch.float64) for s in SHAPES]
    shapes = Shapes.of(tensors)
    return tensors, shapes.split(clip_norms_(shapes.flatten(tensors, tensors[0]), shapes, bound))


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3), st.floats(0.1, 100))
def test_norms_are_within_the_bound_and_directions_are_kept(seed, bound, scale):
    for before, after in zip(*clipped(bound, seed, scale), strict=True):
        if before.ndim < 2:
            assert torch.equal(before, after)
            continue
        for w, c in zip(before.flatten(1), after.flatten(1), strict=True):
            norm = w.square().sum()
            assert c.square().sum() <= bound * (1 + 1e-12)
            assert_close(c, w * min(1.0, (bound / norm).sqrt().item()), 1e-12)


def test_units_within_the_bound_are_not_touched_at_all():
    before, after = clipped(1e6)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("inputs", "bound"), [(1, 1), (4, 2), (784, 28), (500, 22), (6, 2), (7, 3)])
def test_fan_in_is_the_rounded_root_of_the_inputs(inputs, bound):
    weight = torch.full((2, inputs), 10.0, dtype=torch.float64)
    shapes = Shapes.of([weight])
    (found,) = shapes.split(clip_norms_(weight.reshape(-1).clone(), shapes, "fan-in"))
    assert_close(found.square().sum(1), torch.full((2,), float(bound)), 1e-12)


def in_layer(layer, bound):
    """The layer's weight after clipping, found by what the layer says of itself."""
    parameters = list(layer.parameters())
    shapes = Shapes.of(parameters)
    theta = shapes.flatten([p.detach() for p in parameters], parameters[0].detach())
    return shapes.split(clip_norms_(theta, shapes, bound, input_major_groups(layer, parameters)))[0]


def test_a_layer_on_sparse_inputs_is_clipped_as_the_same_linear_layer():
    torch.manual_seed(0)
    sparse, dense = SparseLinear(9, 4).double(), nn.Linear(9, 4).double()
    with torch.no_grad():
        sparse.weight.copy_(5 * torch.randn(9, 4))
        dense.weight.copy_(sparse.weight.T)
    for bound in (2.0, "fan-in"):
        assert_close(in_layer(sparse, bound).T, in_layer(dense, bound), 1e-12)
    assert_close(in_layer(sparse, "fan-in").square().sum(0), torch.full((4,), 3.0, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_units_of_a_transposed_convolution_are_its_output_maps(groups):
    """Each output map's incoming weights: those of the input maps in its group, all places of the kernel."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups).double()
    with torch.no_grad():
        layer.weight.mul_(50)
    after, share, maps = in_layer(layer, 1.5), 4 // groups, 6 // groups
    for g in range(groups):
        for o in range(maps):
            w = layer.weight.detach()[g * share : (g + 1) * share, o]
            assert_close(after[g * share : (g + 1) * share, o], w * (1.5 / w.square().sum()).sqrt(), 1e-12)


def test_a_step_bounds_the_units_of_a_sparse_layer():
    torch.manual_seed(0)
    model = nn.Sequential(SparseLinear(9, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight.mul_(20)
    assert shf.SHF(model, nn.CrossEntropyLoss(), max_norm=0.5).step(torch.randn(20, 9), torch.arange(20) % 3).accepted
    assert_close(model[0].weight.detach().square().sum(0), torch.full((4,), 0.5), 1e-5)
