"""Counting and selecting rows, and which of them are the curvature batch."""

import math
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from helpers import identical
from shf.data.batches import Batch, count_rows, curvature_rows, select_rows

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

Pair = namedtuple("Pair", "left right")


@st.composite
def rows_of(draw):
    """A number of rows and some of them, in any order, also repeated."""
    count = draw(st.integers(1, 6))
    return count, torch.tensor(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8)))


# --- curvature rows -----------------------------------------------------------------------------------------------------

batches = st.integers(2, 40).flatmap(lambda B: st.tuples(st.just(B), st.integers(1, B - 1)))


@given(batches, st.integers(0, 1000))
def test_curvature_rows_of_any_epoch(sizes, epoch):
    B, C = sizes
    assert curvature_rows(B, C, epoch).tolist() == [(epoch * C + i) % B for i in range(C)]


@given(batches)
def test_curvature_rows_pass_through_every_row_equally_often(sizes):
    B, C = sizes
    period = B // math.gcd(B, C)
    visits = torch.cat([curvature_rows(B, C, epoch) for epoch in range(period)]).bincount(minlength=B)
    assert (visits == C // math.gcd(B, C)).all()
    assert identical(curvature_rows(B, C, period), curvature_rows(B, C, 0))


def test_h_epochs_make_one_pass_where_c_divides_b():
    assert torch.cat([curvature_rows(1000, 100, epoch) for epoch in range(10)]).tolist() == list(range(1000))


def test_where_c_does_not_divide_b_rows_wrap_around():
    assert [curvature_rows(10, 4, epoch).tolist() for epoch in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


@pytest.mark.parametrize("size", [None, 10, 11, 1000])
def test_all_rows_of_a_batch_that_is_not_larger(size):
    assert curvature_rows(10, size, epoch=3) is None


# --- selecting ----------------------------------------------------------------------------------------------------------


@given(rows_of(), st.lists(st.integers(1, 3), max_size=2), st.sampled_from([torch.float32, torch.float64, torch.int64]))
def test_tensors(count_and_rows, rest, dtype):
    count, rows = count_and_rows
    data = torch.arange(count * math.prod(rest)).view(count, *rest).to(dtype)
    assert identical(select_rows(data, rows), data[rows])
    assert count_rows(data) == count


@given(rows_of(), st.integers(1, 4), st.sampled_from([torch.int32, torch.int64]), st.data())
def test_csr_matrices_stay_sparse(count_and_rows, columns, index, data):
    count, rows = count_and_rows
    numbers = data.draw(
        st.lists(st.sampled_from([0.0, 0.0, 1.5, -2.0]), min_size=count * columns, max_size=count * columns)
    )
    dense = torch.tensor(numbers, dtype=torch.float64).view(count, columns)
    csr = dense.to_sparse_csr()
    pointers, columns_of = csr.crow_indices().to(index), csr.col_indices().to(index)
    csr = torch.sparse_csr_tensor(pointers, columns_of, csr.values(), dense.shape, check_invariants=True)
    found = select_rows(csr, rows)
    assert found.layout == torch.sparse_csr
    assert found.crow_indices().dtype == found.col_indices().dtype == index
    assert found.values().numel() == int((dense[rows] != 0).sum())
    assert identical(found.to_dense(), dense[rows])
    assert count_rows(csr) == count


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans(), st.data())
def test_packed_sequences(lengths, enforce_sorted, data):
    if enforce_sorted:
        lengths = sorted(lengths, reverse=True)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6)))
    sequences = [100.0 * i + torch.arange(2.0 * n).view(n, 2) for i, n in enumerate(lengths)]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    found = select_rows(packed, rows)
    assert isinstance(found, PackedSequence)
    assert identical(unpack_sequence(found), [sequences[i] for i in rows])
    assert (count_rows(packed), count_rows(found)) == (len(lengths), len(rows))


structures = st.recursive(
    st.sampled_from(["vector", "matrix", "csr", "packed"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=5,
)


def built(shape, rows):
    """The structure, with a tensor of these rows in each place."""
    if isinstance(shape, dict):
        return {key: built(value, rows) for key, value in shape.items()}
    if isinstance(shape, Pair):
        return Pair(*(built(value, rows) for value in shape))
    if isinstance(shape, list | tuple):
        return type(shape)(built(value, rows) for value in shape)
    vector = 1.0 + torch.tensor(rows, dtype=torch.float64)
    return {
        "vector": vector,
        "matrix": vector.outer(torch.ones(2, dtype=torch.float64)),
        "csr": vector[:, None].to_sparse_csr(),
        "packed": pack_sequence([v.expand(2) for v in vector], enforce_sorted=False),
    }[shape]


def opened(tree):
    """Dense tensors in place of sparse and packed ones, for comparison."""
    if isinstance(tree, PackedSequence):
        return unpack_sequence(tree)
    if isinstance(tree, torch.Tensor):
        return tree.to_dense() if tree.layout == torch.sparse_csr else tree
    if isinstance(tree, dict):
        return {key: opened(value) for key, value in tree.items()}
    return type(tree)(*map(opened, tree)) if isinstance(tree, Pair) else type(tree)(map(opened, tree))


@given(structures, rows_of())
def test_nested_structures(shape, count_and_rows):
    count, rows = count_and_rows
    data = built(shape, range(count))
    assert count_rows(data) == count
    assert identical(opened(select_rows(data, rows)), opened(built(shape, rows.tolist())))


@pytest.mark.parametrize("constant", [None, "mode", 3])
def test_what_is_no_tensor_passes_through(constant):
    data = {"x": torch.arange(4), "constant": constant}
    assert count_rows(data) == 4
    assert identical(select_rows(data, torch.tensor([2, 0])), {"x": torch.tensor([2, 0]), "constant": constant})


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (3, TypeError, "no tensors in int: expected a tensor, or a tuple, list or dict of tensors"),
        ([], TypeError, "no tensors in list"),
        (["a", "b"], TypeError, "no tensors in list.*pass count= and select="),
        ((torch.zeros(3), torch.zeros(4)), ValueError, r"agree in their number of rows \(axis 0\), got \[3, 4\]"),
        (torch.tensor(1.0), ValueError, r"no rows \(0 dimensions\)"),
    ],
)
def test_what_has_no_rows_is_refused(data, error, says):
    with pytest.raises(error, match=says):
        count_rows(data)


# --- batches ------------------------------------------------------------------------------------------------------------


def test_a_batch_takes_the_same_rows_of_inputs_and_targets():
    batch = Batch.of({"x": torch.arange(5), "y": torch.arange(5) * 10}, (torch.arange(5) * 100,))
    part = batch.take(torch.tensor([3, 1]))
    assert (batch.rows, part.rows) == (5, 2)
    assert identical(part.inputs, {"x": torch.tensor([3, 1]), "y": torch.tensor([30, 10])})
    assert identical(part.targets, (torch.tensor([300, 100]),))
    assert batch.take(None) is batch


def test_targets_may_be_none():
    assert Batch.of(torch.zeros(3, 2), None).take(torch.tensor([0])).targets is None


def test_own_functions_replace_the_conventions():
    words = ["tree", "leaf", "root"]
    batch = Batch.of(words, [4, 5, 6], select=lambda data, rows: [data[i] for i in rows], count=len)
    part = batch.take(torch.tensor([2, 0]))
    assert (batch.rows, part.inputs, part.targets, part.rows) == (3, ["root", "tree"], [6, 4], 2)


@pytest.mark.parametrize(
    ("inputs", "targets", "says"),
    [
        (torch.zeros(0, 4), torch.zeros(0), "batch is empty: 0 rows, expected at least 1"),
        (torch.zeros(3, 4), torch.zeros(2), "inputs have 3 rows but targets have 2: they must agree"),
        (torch.zeros(3, 4), {"a": torch.zeros(3), "b": torch.zeros(4)}, r"got \[3, 4\]"),
    ],
)
def test_batches_that_do_not_fit_are_refused(inputs, targets, says):
    with pytest.raises(ValueError, match=says):
        Batch.of(inputs, targets)
