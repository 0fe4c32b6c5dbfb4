"""Buffers of all kinds: a step writes those that its pass changed, and no others."""

import pytest
import torch
from torch import nn

import shf
from helpers import CLASSES, FEATURES, assert_close, labelled, theta

CE = nn.CrossEntropyLoss()
NODES = 30


class OnGraph(nn.Module):
    """Two layers over the neighbours of each node of one graph, which is a buffer."""

    def __init__(self, neighbours):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("neighbours", neighbours)
        self.body = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6)).double()
        self.head = nn.Linear(6, CLASSES).double()

    def forward(self, x):
        return self.neighbours @ self.head((self.neighbours @ self.body(x)).relu())


def neighbours():
    source = torch.Generator().manual_seed(0)
    return torch.eye(NODES).double() + (torch.rand(NODES, NODES, generator=source) < 0.1)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    "options", [{}, {"preconditioner": None}, dict(shf.presets.fast)], ids=["paper", "none", "fast"]
)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_as_good_as_a_dense_one(layout, options):
    dense, sparse = OnGraph(neighbours()), OnGraph(neighbours().to_sparse(layout=layout))
    for model in (dense, sparse):
        optimizer = shf.SHF(model, CE, seed=1, **options)
        for _ in range(2):
            optimizer.step(*labelled(NODES))
    assert_close(theta(sparse), theta(dense), 1e-9)
    assert sparse.body[1].num_batches_tracked == dense.body[1].num_batches_tracked == 2
    assert torch.equal(sparse.neighbours.to_dense(), neighbours())


class Masked(nn.Module):
    """A mask that is one block of memory, looked at as several; and a count of passes, which changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(FEATURES, FEATURES).double()).expand(2, FEATURES, FEATURES))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.head = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x):
        self.passes += 1
        return self.head((self.mask @ x[:, None, :, None]).sum((1, 3)))


@pytest.mark.parametrize("options", [{}, {"microbatch": 5}, {"curvature_batch": 4}], ids=["all", "chunks", "some"])
def test_an_expanded_buffer_is_left_as_it_is(options):
    model = Masked()
    optimizer = shf.SHF(model, CE, **options)
    assert all(optimizer.step(*labelled()).accepted for _ in range(2))
    assert model.passes == 2
    assert model.mask.stride(0) == 0


def test_an_error_while_buffers_are_written_is_taken_back_with_them(monkeypatch):
    model = Masked()
    optimizer = shf.SHF(model, CE)
    before = theta(model)
    monkeypatch.setattr(optimizer._last_solution, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(*labelled())
    assert torch.equal(theta(model), before)
    assert model.passes == 0
