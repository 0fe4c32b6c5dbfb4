"""Weight clipping: no unit's squared incoming norm above the bound, and nothing else moved."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_close
from shf.flat import Shapes
from shf.maxnorm import clip_norms_

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
