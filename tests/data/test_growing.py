"""The gradient's noise, and batches that grow with it."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import shf
from helpers import labelled, mlp, normalised, valued
from shf.data.growing import BatchSize
from shf.info import StepInfo

CE = nn.CrossEntropyLoss()

# --- the noise ----------------------------------------------------------------------------------------------------------


def noise(model, data, loss=CE, **options):
    torch.manual_seed(0)
    return shf.SHF(model, loss, noise_every=1, seed=1, **options).step(*data).gradient_noise


@pytest.mark.parametrize("rows", [12, 13])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("microbatch", [None, 5])
def test_it_is_the_difference_of_two_halves(rows, reduction, microbatch):
    torch.manual_seed(0)
    model, (inputs, targets) = mlp(), labelled(rows)
    loss, first = nn.CrossEntropyLoss(reduction="sum"), rows // 2
    parts = []
    for part in (slice(0, first), slice(first, rows)):
        gradients = torch.autograd.grad(loss(model(inputs[part]), targets[part]), list(model.parameters()))
        parts.append(torch.cat([g.reshape(-1) for g in gradients]))
    a = ((rows - first) / first) ** 0.5
    expected = (a * parts[0] - parts[1] / a).square().sum() / (parts[0] + parts[1]).square().sum()
    found = noise(model, (inputs, targets), nn.CrossEntropyLoss(reduction=reduction), microbatch=microbatch)
    assert found == pytest.approx(expected.item(), rel=1e-9)


def test_on_average_it_is_the_trace_of_the_covariance():
    """Against single cases' gradients, as Byrd et al. have it."""
    torch.manual_seed(0)
    model, found, exact = nn.Linear(4, 3).double(), [], []
    for seed in range(80):
        inputs, targets = valued(20, seed=seed)
        cases = []
        for x, t in zip(inputs, targets, strict=True):
            gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), t), list(model.parameters()))
            cases.append(torch.cat([g.reshape(-1) for g in gradients]))
        stack = torch.stack(cases)
        exact.append((stack.var(0).sum() / 20).item())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found.append(noise(model, (inputs, targets), nn.MSELoss()) * stack.mean(0).square().sum().item())
        model.load_state_dict(state)
    assert sum(found) / 80 == pytest.approx(sum(exact) / 80, rel=0.25)


def test_it_is_measured_when_asked_for():
    optimizer = shf.SHF(mlp(), CE, noise_every=3)
    assert [optimizer.step(*labelled()).gradient_noise is not None for _ in range(5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert shf.SHF(mlp(), CE).step(*labelled()).gradient_noise is None


def test_a_model_with_batch_statistics_and_a_single_row():
    assert noise(normalised(), labelled()) > 0
    assert shf.SHF(mlp(), CE, noise_every=1).step(*labelled(1)).gradient_noise is None


class Chosen(nn.Linear):
    """Outputs for some positions of each row, of one row more than of another."""

    def forward(self, x, mask):
        return super().forward(x[..., None])[mask]


def test_outputs_that_are_parts_of_rows_are_refused():
    x, _ = labelled(5)
    mask = torch.arange(4).expand(5, 4) <= torch.tensor([0, 1, 2, 3, 1])[:, None]
    optimizer = shf.SHF(Chosen(1, 3).double(), lambda z, t: z.square().mean(), preconditioner=None, noise_every=1)
    with pytest.raises(
        ValueError, match=r"noise_every: an output of shape \(12, 3\) .* which of 5 cases; .*noise_every=None"
    ):
        optimizer.step((x, mask))


# --- the size -----------------------------------------------------------------------------------------------------------


def test_the_size_grows_when_the_test_fails():
    size = BatchSize(100, 10_000, tolerance=0.5)
    assert size.hear(0.2, 100).size == 100  # 0.2 ≤ θ² = 0.25
    assert size.hear(0.3, 100).size == 120  # tr Σ / (θ² ‖g‖²)
    assert size.hear(5.0, 100).size == 150  # not more than half as much again at once
    assert size.hear(None, 100) == size
    assert size.hear(float("nan"), 100) == size


def test_the_size_never_falls_and_has_a_largest():
    size = BatchSize(100, 200, tolerance=0.5)
    for noise_now in (5.0, 5.0, 5.0, 0.0, 0.0, 0.0):
        before, size = size, size.hear(noise_now, size.size)
        assert before.size <= size.size <= 200
    assert size.size == 200


@pytest.mark.parametrize(("size", "largest", "tolerance"), [(0, 10, 0.5), (11, 10, 0.5), (5, 10, 0.0), (5, 10, 1.0)])
def test_what_is_out_of_range_is_refused(size, largest, tolerance):
    with pytest.raises(ValueError, match="must be"):
        BatchSize(size, largest, tolerance)


# --- the loader ---------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 500), size=st.integers(1, 500), largest=st.integers(1, 500))
def test_an_epoch_is_cut_evenly(rows, size, largest):
    """No batch is above the largest, and none a small rest."""
    largest = max(largest, size)
    loader = shf.GrowingLoader((torch.zeros(rows, 1),), size, largest=largest)
    sizes = [len(batch) for (batch,) in loader]
    assert (sum(sizes), len(sizes)) == (rows, len(loader))
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) in (round(rows / min(size, rows)), math.ceil(rows / largest))


@pytest.mark.parametrize("as_dataset", [False, True])
def test_every_epoch_has_every_row_once_in_a_new_order(as_dataset):
    rows = torch.arange(50)
    data = TensorDataset(rows, rows) if as_dataset else (rows, rows)
    loader = shf.GrowingLoader(data, 12)
    epochs = [[batch for batch, _ in loader] for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [10] * 5  # not four of 12, the largest, and a rest of 2
    assert len(loader) == 5
    orders = [torch.cat(epoch) for epoch in epochs]
    assert all(torch.equal(order.sort().values, rows) for order in orders)
    assert not torch.equal(*orders)


def test_batches_grow_within_an_epoch_as_the_steps_say():
    torch.manual_seed(0)
    inputs = torch.randn(400, 4, dtype=torch.float64)
    loader = shf.GrowingLoader((inputs, torch.randn(400, 3, dtype=torch.float64)), 10, largest=80)
    optimizer = shf.SHF(nn.Linear(4, 3).double(), nn.MSELoss(), noise_every=1)
    sizes = []
    for _ in range(3):
        for batch, targets in optimizer.epoch(loader):
            sizes.append(len(batch))
            loader.hear(optimizer.step(batch, targets))
    assert sizes[0] == 10
    assert max(sizes) == loader.batch_size == 80  # targets are noise: no batch is large enough


@given(rows=st.integers(4, 300), size=st.integers(4, 40), replicas=st.integers(1, 2), noise=st.floats(0, 3, width=16))
def test_processes_share_the_batches_of_one(rows, size, replicas, noise):
    """Also as they grow; and none is left without a row."""
    data = (torch.arange(rows),)
    one = shf.GrowingLoader(data, size, seed=5)
    shares = [shf.GrowingLoader(data, size, seed=5, num_replicas=replicas, rank=rank) for rank in range(replicas)]
    for (whole,), *parts in zip(one, *shares, strict=True):
        assert torch.equal(whole, torch.cat([part for (part,) in parts]))
        assert all(len(part) for (part,) in parts)
        for loader in (one, *shares):
            loader.hear(measured(noise))


def measured(noise: float) -> StepInfo:
    return replace(StepInfo.of_skipped(1.0, ""), skipped=None, gradient_noise=noise)


def test_a_loader_continues_where_it_was():
    rows = torch.arange(40)
    first = shf.GrowingLoader((rows, rows), 4, largest=20, seed=3)
    for _ in first:
        first.hear(measured(noise=1.0))
    assert first.batch_size > 4
    second = shf.GrowingLoader((rows, rows), 4, largest=20, seed=3)
    second.load_state_dict(first.state_dict())
    for (a, _), (b, _) in zip(first, second, strict=True):
        assert torch.equal(a, b)
        first.hear(measured(noise=0.5))
        second.hear(measured(noise=0.5))
        assert first.batch_size == second.batch_size


def test_numbers_of_numpy_do_not_reach_its_state():
    loader = shf.GrowingLoader(labelled(40), np.int64(10), largest=np.int64(20), tolerance=np.float64(0.5))
    assert {type(value) for value in loader.state_dict().values()} == {int, type(None)}
    list(loader)
    loader.hear(measured(noise=1e-3))
    assert {type(value) for value in loader.state_dict().values()} == {int, float}


@pytest.mark.parametrize("data", [(torch.arange(3), torch.arange(4)), (torch.empty(0),)])
def test_data_without_a_common_length_are_refused(data):
    with pytest.raises(ValueError, match="expected one length"):
        shf.GrowingLoader(data, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_replicas": 2, "rank": 2}, r"rank=2, num_replicas=2\): ranks count from 0, below num_replicas"),
        ({"num_replicas": 0}, r"rank=0, num_replicas=0\): ranks count from 0"),
        ({"num_replicas": 3}, r"batch_size=5, num_replicas=3\) of 40 rows: batches must have at least two rows"),
    ],
)
def test_processes_that_cannot_share_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        shf.GrowingLoader(labelled(40), 5, **options)


def test_noise_before_the_first_batch_changes_nothing():
    loader = shf.GrowingLoader(labelled(40), 5)
    loader.hear(measured(noise=1.0))
    assert loader.state_dict() == shf.GrowingLoader(labelled(40), 5).state_dict()


@pytest.mark.parametrize(("rows", "size"), [(101, 2), (8293, 47), (7, 2), (5, 5), (1, 1)])
def test_its_length_is_the_number_of_batches(rows, size):
    loader = shf.GrowingLoader((torch.arange(rows),), size)
    assert len(loader) == len(list(loader))


def test_tuples_of_samples_stay_tuples():
    """torch's own collation makes lists of them, and a model takes a list as one argument."""
    inputs, targets = labelled()
    samples = [((x, {"twice": (x, x)}), t) for x, t in zip(inputs, targets, strict=True)]
    (first, named), _ = next(iter(shf.GrowingLoader(samples, 5)))
    assert torch.equal(first, named["twice"][1])
    assert isinstance(named["twice"], tuple)


class Named(NamedTuple):
    pair: tuple
    extra: Any


class Kept(dict):
    """Of a class of its own."""


class Two(tuple):
    """With a constructor of its own."""

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


def test_other_kinds_of_samples_stay_what_torch_makes_of_them():
    samples = [Named((torch.zeros(2), i), Kept(size=torch.zeros(3).shape, two=Two(i, i))) for i in range(6)]
    batch = next(iter(shf.GrowingLoader(samples, 6)))
    expected = default_collate(samples)
    assert isinstance(batch, Named)
    assert isinstance(batch.pair, tuple)
    assert type(batch.extra) is type(expected.extra)
    assert [type(v) for v in batch.extra.values()] == [type(v) for v in expected.extra.values()]


class Stream(IterableDataset):
    """Some have a length and, as all datasets, an index that is not there."""

    def __iter__(self):
        return iter(range(10))

    def __len__(self):
        return 10


def test_a_list_of_samples_is_a_dataset():
    inputs, targets = labelled()
    samples = list(zip(inputs, targets, strict=True))
    loader, same = shf.GrowingLoader(samples, 5), shf.GrowingLoader((inputs, targets), 5)
    assert len(loader) == 3
    for (x, t), (x_, t_) in zip(loader, same, strict=True):
        assert torch.equal(x, x_)
        assert torch.equal(t, t_)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ((torch.zeros(5, 2).numpy(), torch.zeros(5)), {"batch_size": 2}, "expected a Dataset with a length"),
        (dict(zip("xt", labelled(), strict=True)), {"batch_size": 2}, r"data=dict\): expected a Dataset"),
        (DataLoader(TensorDataset(*labelled())), {"batch_size": 2}, r"data=DataLoader\): expected a Dataset"),
        (
            Stream(),
            {"batch_size": 2},
            r"data=Stream\): expected a Dataset with a length and an index \(an iterable one",
        ),
        (labelled(), {"batch_size": 5.0}, r"batch_size=5.0\): must be a whole number"),
        (labelled(), {"batch_size": None}, r"batch_size=None\): must be a whole number"),
        (labelled(), {"batch_size": True}, r"batch_size=True\): must be a whole number"),
        (labelled(), {"batch_size": 5, "seed": None}, r"seed=None\): must be a whole number"),
        (labelled(), {"batch_size": 5, "rank": 0.5}, r"rank=0.5\): must be a whole number"),
        (
            list(torch.zeros(6, 3)),
            {"batch_size": 2},
            r"a list of 6 tensors, the first of shape \(3,\)\): samples, or columns",
        ),
        (
            (torch.tensor(1), torch.tensor(2)),
            {"batch_size": 2},
            r"a tuple of 2 tensors, the first of shape \(\)\): samples",
        ),
        (labelled(), {"batch_size": 5, "largest": 7.5}, r"largest=7.5\): must be a whole number"),
    ],
)
def test_other_data_and_sizes_are_refused(data, options, words):
    with pytest.raises(TypeError, match=words):
        shf.GrowingLoader(data, **options)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_batches_are_made_as_one_says(as_tensors):
    rows = torch.arange(12)
    data = (rows, rows) if as_tensors else [(row, row) for row in rows]
    loader = shf.GrowingLoader(data, 4, collate_fn=lambda samples: sorted(int(a) for a, _ in samples))
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert sorted(i for batch in batches for i in batch) == list(range(12))


def test_batches_of_a_tensor_dataset_are_taken_whole(monkeypatch):
    """And are the ones that are made of samples."""
    rows = torch.arange(20.0).reshape(10, 2)
    whole, samples = (
        shf.GrowingLoader(data, 4, seed=1) for data in (TensorDataset(rows, rows), list(zip(rows, rows, strict=True)))
    )
    expected = list(samples)
    monkeypatch.setattr("shf.data.growing.default_collate", None)
    for batch, other in zip(whole, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
