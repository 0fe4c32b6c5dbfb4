"""Flattening parameters into one vector, and back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import identical
from shf.linear.flat import Shapes

shape_lists = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float32, torch.float64])


def tensors_of(shapes, dtype=torch.float64):
    """Tensors of these shapes that number their entries through."""
    total = sum(math.prod(s) for s in shapes)
    numbers = iter(torch.arange(1, total + 1, dtype=dtype).split([math.prod(s) for s in shapes]))
    return [next(numbers).view(s) for s in shapes]


@given(shape_lists, dtypes)
def test_round_trip(shapes, dtype):
    tensors = tensors_of(shapes, dtype)
    layout = Shapes.of(tensors)
    vector = layout.flatten(tensors, tensors[0])
    assert identical(vector, torch.arange(1, layout.total + 1, dtype=dtype))
    assert identical(layout.split(vector), tensors)


@given(shape_lists)
def test_pieces_are_views(shapes):
    layout = Shapes.of(tensors_of(shapes))
    vector = torch.zeros(layout.total, dtype=torch.float64)
    for piece in layout.split(vector):
        piece += 1
    assert torch.equal(vector, torch.ones_like(vector))


@given(shape_lists, st.data())
def test_none_stands_for_zeros(shapes, data):
    tensors = tensors_of(shapes)
    some = [t if data.draw(st.booleans()) else None for t in tensors]
    layout = Shapes.of(tensors)
    expected = [torch.zeros_like(t) if s is None else t for s, t in zip(some, tensors, strict=True)]
    assert identical(layout.split(layout.flatten(some, tensors[0])), expected)


def test_all_none_takes_dtype_from_like():
    like = torch.zeros(1, dtype=torch.float32)
    assert identical(Shapes((torch.Size([2]), torch.Size([]))).flatten([None, None], like), torch.zeros(3))


def test_flattens_non_contiguous_tensors_in_logical_order():
    matrix = torch.arange(6.0).view(2, 3).t()
    assert Shapes.of([matrix]).flatten([matrix], matrix).tolist() == [0, 3, 1, 4, 2, 5]


def test_writes_into_out():
    out = torch.empty(3)
    result = Shapes.of([torch.zeros(2), torch.zeros(1)]).flatten([torch.ones(2), torch.zeros(1)], out, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert out.tolist() == [1, 1, 0]


@pytest.mark.parametrize("length", [2, 4])
def test_a_vector_of_another_length_is_refused(length):
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        Shapes.of([torch.zeros(3)]).split(torch.zeros(length))


def test_another_number_of_tensors_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Shapes.of([torch.zeros(3)]).flatten([], torch.zeros(1))
