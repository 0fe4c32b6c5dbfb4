"""What processes know of each other, without processes: shares, agreement, testimony, frozen draws of a share."""

import json
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import mlp
from shf.data.batches import curvature_rows
from shf.data.draws import Draws
from shf.data.repeatable import checksum
from shf.data.rows import RowAxis
from shf.distributed.agreement import differences, to_text
from shf.distributed.collective import SINGLE, Share
from shf.distributed.failure import FailureReports
from shf.linear.decay import Decay
from shf.linear.flat import Shapes

# --- rows ---------------------------------------------------------------------------------------------------------------


def shares(sizes):
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Share(first, rows, sum(sizes)) for first, rows in zip(firsts, sizes, strict=True)]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(sum), st.integers(1, 40), st.integers(0, 9))
def test_the_union_of_the_ranks_curvature_rows_is_the_single_processs(sizes, size, epoch):
    for strided in (False, True):
        rows = curvature_rows(sum(sizes), size, epoch, strided=strided)
        if rows is None:
            assert all(share.within(None) is None for share in shares(sizes))
            continue
        found = []
        for share in shares(sizes):
            own = share.within(rows)
            found += (share.numbers if own is None else own + share.first).tolist()
        assert sorted(found) == sorted(rows.tolist())


@given(st.integers(2, 200), st.data())
def test_strided_rows_are_spread_evenly_and_pass_through_all(rows, data):
    size = data.draw(st.integers(1, rows - 1))
    epochs = -(-rows // size)
    picked = [curvature_rows(rows, size, epoch, strided=True) for epoch in range(epochs)]
    assert all(len(set(p.tolist())) == size for p in picked)
    assert set(torch.cat(picked).tolist()) == set(range(rows))
    first, last = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    held = sum(first <= row < last for row in picked[0].tolist())
    assert abs(held - size * (last - first) / rows) < 2


def test_strided_rows_of_a_small_batch():
    assert [curvature_rows(10, 4, e, strided=True).tolist() for e in range(3)] == [
        [0, 2, 5, 7],
        [1, 3, 6, 8],
        [2, 4, 7, 9],
    ]


def test_alone_everything_is_its_own_part():
    vector = torch.arange(3.0)
    assert SINGLE.sum(lambda: vector, vector) is vector
    assert SINGLE.add(lambda: [1.5, 2.0], 2) == [1.5, 2.0]
    assert SINGLE.own(vector) is SINGLE.whole(vector, 3) is vector
    assert list(SINGLE.part(3)) == [0, 1, 2]
    assert SINGLE.dots((vector, vector)) == [5.0]


@pytest.mark.parametrize("axis", [RowAxis(0), RowAxis(1), RowAxis(0, 3), RowAxis(0, 3, minor=True)])
def test_a_share_sees_its_rows_of_what_is_drawn_for_the_whole(axis):
    def drawn(draws, rows, subset=None):
        shape = axis.resized((2, 2), rows)
        with draws.over(subset):
            return torch.rand(shape)

    whole = drawn(Draws(3, 7), 7)
    for first, rows in ((0, 2), (2, 5), (6, 1)):
        own = torch.arange(first, first + rows)
        draws = Draws(3, 7, [axis], own=own)
        assert torch.equal(drawn(draws, rows), axis.take(whole, own))
        subset = torch.tensor([rows - 1])
        assert torch.equal(drawn(draws, 1, subset), axis.take(whole, own[subset]))


@pytest.mark.parametrize(("first", "last"), [(0, 27), (0, 5), (3, 20), (9, 9), (13, 27)])
def test_the_decay_of_some_entries(first, last):
    shapes = Shapes.of(list(mlp().parameters()))
    decay = Decay(shapes, (0.5, 0.0, 2.0, 0.0))
    n = sum(shapes.sizes)
    vector = torch.randn(n, dtype=torch.float64)
    whole = decay.add_product_(torch.zeros_like(vector), vector, 0.0)
    part = decay.within(first, last)
    own = vector[first:last]
    assert torch.equal(part.add_product_(torch.zeros_like(own), own, 0.0), whole[first:last])
    gradient = part.add_gradient_(torch.zeros_like(own), part.shapes.split(own))
    assert torch.equal(gradient, whole[first:last])
    assert sum(part.shapes.sizes) == last - first


# --- agreement ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_every_bit_and_its_place_shows_in_the_checksum(dtype):
    tensor = (100 * torch.randn(3, 4)).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    assert checksum(tensor.t().contiguous()) != before
    bits = tensor.view(torch.uint8)
    for place in (0, 5, bits.numel() - 1):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[place] ^= 1
        assert checksum(changed) != before


def test_opposite_changes_do_not_cancel_in_the_checksum():
    tensor = torch.ones(4, dtype=torch.float64)
    changed = tensor.clone()
    changed[0], changed[1] = torch.nextafter(tensor[0], tensor[0] + 1), torch.nextafter(tensor[1], tensor[1] - 1)
    assert checksum(changed) != checksum(tensor)


def test_a_tensor_without_entries_has_a_checksum():
    assert checksum(torch.zeros(3, 0)) == checksum(torch.zeros(0))


def test_a_long_tensor_is_summed_in_chunks():
    tensor = torch.zeros(2**20 + 5)
    before = checksum(tensor)
    tensor[2**20 + 2] = 1
    assert checksum(tensor) != before


def test_differences_are_named_with_their_values_and_ranks():
    texts = [
        to_text({"a": {"b": 1, "c": [2]}}),
        to_text({"a": {"b": 1, "c": [2]}}),
        to_text({"a": {"b": 3}, "d": None}),
    ]
    words, ranks = differences(texts)
    assert (
        words
        == "a.b is 1 on rank 0, 3 on rank 2; a.c is [2] on rank 0, absent on rank 2; d is absent on rank 0, None on rank 2"
    )
    assert ranks == [2]


def test_many_differences_are_cut_short():
    words, _ = differences([to_text(dict.fromkeys("abcdefgh", 1)), to_text(dict.fromkeys("abcdefgh", 2))])
    assert words.endswith("; and 3 more")


# --- testimony ----------------------------------------------------------------------------------------------------------


class Board(dict):
    """A store in memory."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key, default=None):
        return self[key]


class Broken(Board):
    def check(self, keys):
        raise RuntimeError("no route to host")


class Stuck(Board):
    def check(self, keys):
        threading.Event().wait(60)


def test_who_says_nothing_is_missing():
    board = Board()
    FailureReports(board, 2, 4).report_failure(7, "connection closed")
    finding = FailureReports(board, 0, 4, grace=0.2).hear(7)
    assert finding.ranks == (1, 3)
    assert finding.words == "rank 1, 3 gave no sign within 0.2 s: killed, hanging, or out of reach"


def test_who_raised_is_named_at_once():
    board = Board()
    FailureReports(board, 1, 4).report_failure(7, "KeyboardInterrupt", raised=True)
    finding = FailureReports(board, 0, 4, grace=60).hear(7)
    assert finding == finding.__class__((1,), "rank 1 raised KeyboardInterrupt")


@pytest.mark.parametrize(("step", "counts"), [(5, False), (6, True), (7, True), (8, True), (9, False)])
def test_only_words_about_this_step_or_its_neighbours_count(step, counts):
    board = Board()
    FailureReports(board, 1, 2).report_failure(step, "timed out")
    finding = FailureReports(board, 0, 2, grace=0.1).hear(7)
    assert (finding.ranks == ()) == counts
    assert ("every rank is alive" in finding.words) == counts


@pytest.mark.parametrize("store", [Broken(), Stuck()])
def test_a_store_that_does_not_answer_is_said_to_be_gone(store):
    finding = FailureReports(store, 0, 2, grace=0.1).hear(7)
    assert finding.ranks == ()
    assert "does not answer" in finding.words


def test_testimony_is_plain_data():
    board = Board()
    FailureReports(board, 1, 2).report_failure(3, "ValueError: ü")
    assert json.loads(board["shf/testimony/1"]) == {"step": 3, "words": "ValueError: ü", "raised": False}
