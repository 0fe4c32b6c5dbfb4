"""Layers that begin at zero, or close to it, hide what lies before them: rows are still found where they are, in outputs and
in draws, and rows that influence each other are still seen to do so."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shf
from helpers import CLASSES, FEATURES, identical, labelled, theta
from shf.data.batches import Batch
from shf.data.rows import RowAxis
from shf.model.network import Network
from shf.probing.layout import find_layout
from shf.probing.unzeroed import without_zeros

CE = nn.CrossEntropyLoss()
STEPS = 5


def zero(layer):
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


def find(model, inputs):
    return find_layout(Network(model, list(model.parameters())), Batch.of(inputs, None), 0)


class TimeFirst(nn.Module):
    """Outputs as (time · rows, classes); dropout before the head if `p`."""

    def __init__(self, p=0.0):
        super().__init__()
        self.body, self.head, self.p = nn.GRU(FEATURES, 6), zero(nn.Linear(6, CLASSES)), p

    def forward(self, x):
        hidden = self.body(x.transpose(0, 1))[0].flatten(0, 1)
        return self.head(F.dropout(hidden, self.p, self.training))


def sequences(rows=30):
    torch.manual_seed(1)
    x = torch.randn(rows, STEPS, FEATURES, dtype=torch.float64)
    return x, (x.sum(2) > 0).long()


def tagged(z, t):
    return F.cross_entropy(z, t.T.flatten())


@pytest.mark.parametrize("options", [{"microbatch": 10}, {"microbatch": 10, "curvature_batch": 12}])
def test_outputs_behind_a_head_of_zeros_are_joined_in_order(options):
    """Fails if rows are looked for at the zeros: chunks are then joined rows first, against targets that are time first."""
    torch.manual_seed(0)
    model, (x, t) = TimeFirst().double(), sequences()
    optimizer = shf.SHF(model, tagged, preconditioner=None, damping=0.01, seed=0, **options)
    for _ in range(3):
        true = tagged(model(x), t).item()
        assert optimizer.step(x, t).loss_before == pytest.approx(true, rel=1e-12)


def test_so_are_draws():
    torch.manual_seed(0)
    layout = find(TimeFirst(0.5).double(), sequences()[0])
    assert layout.draws == [RowAxis(0, STEPS, minor=True)]
    assert layout.outputs == [RowAxis(0, STEPS, minor=True)]
    assert layout.separable


class BetweenRows(nn.Module):
    """Attention between rows, behind a gate; on top of it a head that may be zero."""

    def __init__(self, gate, head=lambda layer: layer, *, train_gate=True):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), head(nn.Linear(6, CLASSES))
        self.gate = nn.Parameter(torch.tensor(gate), requires_grad=train_gate)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.head(h + self.gate * (F.softmax(h @ h.T, 1) @ h))


@pytest.mark.parametrize(
    "model",
    [
        lambda: BetweenRows(0.0),
        lambda: BetweenRows(1e-5),
        lambda: BetweenRows(0.0, zero),
        lambda: BetweenRows(0.0, train_gate=False),
    ],
    ids=["zero", "faint", "and a head of zeros", "frozen"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_will_influence_each_other_are_not_taken_apart(model, dtype):
    torch.manual_seed(0)
    model = model().to(dtype)
    before, (x, t) = theta(model), labelled(30, dtype)
    with pytest.raises(ValueError, match="rows that influence each other"):
        shf.SHF(model, CE, microbatch=10, preconditioner=None).step(x, t)
    assert identical(theta(model), before)


def test_other_randomness_behind_zeros_is_refused():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = zero(nn.Linear(FEATURES, CLASSES).double())

        def forward(self, x):
            return self.head(x * random.random())

    with pytest.raises(RuntimeError, match="gives different outputs for the same inputs"):
        shf.SHF(Noisy(), CE).step(*labelled())


class Bag(nn.Module):
    """A sum of embeddings over the longest of the rows: padding adds nothing because it is embedded as zero."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 6, padding_idx=0), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.words(x[:, : int((x > 0).sum(1).max())]).sum(1))


def test_padding_stays_zero():
    x = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 6], [2, 0, 0, 0]] * 4)
    assert find(Bag(), x).separable


class Root(nn.Module):
    """Finite at its zeros alone."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.zeros(8)), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(x) + self.scale.sqrt().sum()


class Particular(Root):
    def forward(self, x):
        if self.scale.any():
            raise ValueError("expected zeros")
        return self.head(x)


@pytest.mark.parametrize("model", [Root, Particular])
def test_a_model_that_needs_its_zeros_is_looked_at_with_them(model):
    layout = find(model(), labelled(dtype=torch.float32)[0])
    assert layout.separable
    assert layout.conclusive
    assert layout.obstacle is None


def test_looking_changes_nothing():
    torch.manual_seed(0)
    model = BetweenRows(0.0, zero)
    before = theta(model)
    network, batch = Network(model, list(model.parameters())), Batch.of(labelled(dtype=torch.float32)[0], None)
    awake = without_zeros(network, batch, 0)
    assert all(bool(v.all()) for v in awake.leaves())
    assert identical(theta(model), before)


def test_a_model_is_looked_at_in_seven_runs():
    """Once for zeros, on three rows and on two, each row beside itself, and with and without gradients: each run counts in a
    first step on few rows."""
    model, runs = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), []
    nn.init.zeros_(model[0].bias)
    model.register_forward_hook(lambda *_: runs.append(1))
    find(model, torch.randn(6, 4))
    assert len(runs) == 7
