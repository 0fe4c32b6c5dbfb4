"""The dense Jacobian, row by row: against plain autograd, by the formula of linear maps and by the exact fallback."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from cases import CASES, ROWS
from helpers import assert_close, mlp, valued
from shf.data.batches import Batch
from shf.data.draws import Draws, preserved_global_state
from shf.data.rows import RowAxis
from shf.model import rowjacobian
from shf.model.jacobian import Jacobian
from shf.model.linearuses import LinearUses
from shf.model.network import Network
from shf.model.rowjacobian import row_jacobian
from shf.runtime.context import twice_differentiable_kernels
from test_cases import build

MOST, FIRST = 10**8, (RowAxis(0),)
FIRST = (RowAxis(0),)


@pytest.fixture(autouse=True)
def _context():
    with preserved_global_state(), twice_differentiable_kernels(torch.device("cpu")):
        yield


@pytest.fixture
def fallbacks(monkeypatch):
    """The numbers of the parameters that took the fallback, in the order of the calls."""
    found = []
    original = rowjacobian._case_by_case

    def watched(jacobian, by_case, widths, wanted, **options):
        found.append(wanted)
        return original(jacobian, by_case, widths, wanted, **options)

    monkeypatch.setattr(rowjacobian, "_case_by_case", watched)
    return found


class Laplacian(nn.Module):
    """Δu of a network u of one number, by nested derivatives."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.u = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))[:-1]

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
            return sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1]))


def jacobian_of(model, inputs, *, forward=None, axes=FIRST, **options):
    network = Network(model, list(model.parameters()), *([forward] if forward else []))
    batch = Batch.of(inputs, torch.zeros(len(inputs)))
    return Jacobian(network, batch, Draws(0, len(inputs)), axes=axes, **options)


def dense(model, inputs):
    """By torch.autograd.functional.jacobian; of one output, rows on axis 0."""
    names, values = zip(*model.named_parameters(), strict=True)

    def outputs(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (inputs,)).reshape(-1)

    parts = torch.autograd.functional.jacobian(outputs, tuple(p.detach() for p in values))
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


@pytest.mark.parametrize("microbatch", [None, 4], ids=["whole", "microbatch"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_every_case(case, microbatch, fallbacks):
    if microbatch and not case.separable:
        pytest.skip("rows that influence each other are never taken in chunks")
    torch.set_default_dtype(torch.float64)
    try:
        reference = build(case)
        expected, _ = reference.jacobian(None)
        jacobian = Jacobian(
            reference.network,
            reference.batch,
            reference.draws(),
            microbatch=microbatch,
            axes=reference.layout.outputs,
        )
        assert_close(row_jacobian(jacobian, separable=case.separable, most=MOST), expected)
        if case.kind in ("feed-forward", "randomness"):
            assert not fallbacks
        if case.kind in ("convolutional", "normalisation", "recursive"):
            assert fallbacks
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("microbatch", [None, 7], ids=["whole", "microbatch"])
@pytest.mark.parametrize("sizes", [(2, 64, 1), (3, 8, 6, 5, 1)], ids=["257", "deeper"])
def test_a_differential_equation(sizes, microbatch, fallbacks, monkeypatch):
    model, inputs = Laplacian(*sizes).double(), torch.rand(20, sizes[0], dtype=torch.float64)
    expected = dense(model, inputs)
    found = row_jacobian(jacobian_of(model, inputs, microbatch=microbatch), separable=True, most=MOST)
    assert not fallbacks
    assert_close(found, expected)
    monkeypatch.setattr(rowjacobian, "_by_uses", lambda jacobian, *_: list(range(len(jacobian.network.parameters))))
    assert_close(row_jacobian(jacobian_of(model, inputs, microbatch=microbatch), separable=True, most=MOST), expected)
    assert fallbacks


def test_float32_takes_the_formula_too(fallbacks):
    model, inputs = Laplacian(2, 64, 1), torch.rand(200, 2)
    found = row_jacobian(jacobian_of(model, inputs), separable=True, most=MOST)
    assert not fallbacks
    assert found.dtype == torch.float32
    assert_close(found, dense(model.double(), inputs.double()), 1e-5)


def test_a_layer_used_twice_and_on_sequences_needs_no_fallback(fallbacks):
    layer = nn.Linear(3, 3).double()
    model, inputs = nn.Sequential(layer, nn.Tanh(), layer), torch.randn(6, 4, 3, dtype=torch.float64)
    assert_close(row_jacobian(jacobian_of(model, inputs), separable=True, most=MOST), dense(model, inputs))
    assert not fallbacks


class Mixed(nn.Module):
    """A weight that is also used transposed, one that is not, and a parameter of no layer."""

    def __init__(self):
        super().__init__()
        self.tied, self.plain = nn.Linear(4, 3), nn.Linear(4, 2)
        self.scale, self.idle = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.scale * self.plain(torch.tanh(self.tied(x)) @ self.tied.weight)


def test_only_what_has_no_formula_takes_the_fallback(fallbacks):
    model, (inputs, _) = Mixed().double(), valued()
    jacobian = jacobian_of(model, inputs)
    found = row_jacobian(jacobian, separable=True, most=MOST)
    ((*wanted,),) = fallbacks
    assert {jacobian.network.names[i] for i in wanted} == {"tied.weight", "scale"}
    assert_close(found, dense(model, inputs))
    assert not found[:, 1:3].any()  # `idle`, the second of them


def test_several_outputs_stand_side_by_side_for_each_row(fallbacks):
    model, (inputs, _) = mlp(), valued()

    def forward(model, x):
        z = model(x)
        return {"first": z.sum(1), "ids": z.argmax(1), "second": torch.stack([z, z.square()], 0)}

    axes = [RowAxis(0), RowAxis(1)]
    found = row_jacobian(jacobian_of(model, inputs, forward=forward, axes=axes), separable=True, most=MOST)
    J = dense(model, inputs).view(len(inputs), 3, -1)
    z = model(inputs).detach()[:, :, None]
    expected = torch.cat([J.sum(1, keepdim=True), J, 2 * z * J], 1)
    assert_close(found, expected.flatten(0, 1))
    assert not fallbacks


@pytest.mark.parametrize("entry", [(0, 0), (-1, -1), (5, 20)])
def test_a_wrong_formula_is_seen_in_any_entry(entry, fallbacks, monkeypatch):
    model, (inputs, _) = mlp(), valued()
    original = rowjacobian._write_uses

    def corrupt(jacobian, rows, by_case, widths):
        left = original(jacobian, rows, by_case, widths)
        by_case.flatten(0, 1)[entry] *= 1 + 1e-5
        return left

    monkeypatch.setattr(rowjacobian, "_write_uses", corrupt)
    assert_close(row_jacobian(jacobian_of(model, inputs), separable=True, most=MOST), dense(model, inputs))
    ((wanted,),) = fallbacks  # the parameter whose entry it is, and no other
    assert wanted == {0: 0, -1: 3, 20: 0}[entry[1]]


class Crowd(nn.Module):
    """Rows that influence each other."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = self.inner(x)
        return self.outer(torch.tanh(h - h.mean(0)))


def test_rows_that_influence_each_other_are_seen_unless_it_is_said(fallbacks):
    model, (inputs, _) = Crowd().double(), valued()
    jacobian, expected = jacobian_of(model, inputs), dense(model, inputs)
    assert_close(row_jacobian(jacobian, separable=False, most=MOST), expected)
    assert fallbacks == [[0, 1, 2, 3]]
    widths, everything = [2], torch.empty(len(inputs), 2, jacobian.network.shapes.total, dtype=torch.float64)
    assert rowjacobian._by_uses(jacobian, everything, widths) == [0, 1]  # the formula holds for the outer layer


class Learner(nn.Module):
    """Differentiates by its own parameters in forward."""

    def __init__(self, **options):
        super().__init__()
        self.layer, self.options = nn.Linear(4, 1), options

    def forward(self, x):
        with torch.enable_grad():
            loss = self.layer(x).square().mean()
            (g,) = torch.autograd.grad(loss, self.layer.weight, create_graph=True, **self.options)
        return x.square() @ (self.layer.weight - g).t()


@pytest.mark.parametrize("options", [{}, {"allow_unused": True}, {"materialize_grads": True}], ids=str)
def test_derivatives_by_parameters_in_forward(options, fallbacks):
    """The functions that stand in for linear layers would give none."""
    model, (inputs, _) = Learner(**options).double(), valued()
    expected = dense(model, inputs)
    whole = torch.empty(len(inputs), 1, 5, dtype=torch.float64)
    jacobian = jacobian_of(model, inputs)
    assert 0 in rowjacobian._by_uses(jacobian, whole, [1])
    assert_close(row_jacobian(jacobian, separable=False, most=MOST), expected)


class Curvature(nn.Module):
    """Δu by torch.func."""

    def __init__(self):
        super().__init__()
        self.u = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        slope = torch.func.jacrev(lambda point: self.u(point)[0])
        return torch.func.vmap(torch.func.jacrev(slope))(x).diagonal(dim1=1, dim2=2).sum(1)


def test_derivatives_by_other_means(fallbacks):
    """Functions that stand in for linear layers are unknown to torch.func."""
    model, (inputs, _) = Curvature().double(), valued()
    assert_close(row_jacobian(jacobian_of(model, inputs), separable=True, most=MOST), dense(model, inputs))
    assert fallbacks == [[0, 1, 2, 3]]


def test_too_many_numbers_are_refused_before_memory_is_asked_for():
    model, (inputs, _) = mlp(), valued()
    jacobian = jacobian_of(model, inputs)
    n = jacobian.network.shapes.total
    needed = len(inputs) * 3 * n
    assert row_jacobian(jacobian, separable=True, most=needed).shape == (len(inputs) * 3, n)
    with pytest.raises(ValueError, match=rf"12 rows with 3 outputs each by {n} parameters has {needed:,} numbers"):
        row_jacobian(jacobian, separable=True, most=needed - 1)


def test_memory_that_is_given_is_written_to_completely():
    model, (inputs, _) = Mixed().double(), valued()
    jacobian = jacobian_of(model, inputs)
    out = torch.full((len(inputs) * 2, jacobian.network.shapes.total), float("nan"), dtype=torch.float64)
    assert row_jacobian(jacobian, separable=True, most=MOST, out=out) is out
    assert_close(out, dense(model, inputs))


def test_an_output_shared_by_all_rows_is_refused():
    model, (inputs, _) = mlp(), valued()
    jacobian = jacobian_of(
        model, inputs, forward=lambda model, x: (model(x), model[0].weight.sum()), axes=[RowAxis(0), None]
    )
    with pytest.raises(ValueError, match="output number 1 of the model is shared by all rows"):
        row_jacobian(jacobian, separable=True, most=MOST)


def test_running_out_of_memory_is_no_reason_for_the_fallback(fallbacks, monkeypatch):
    def exhausted(*args):
        raise torch.OutOfMemoryError("out of memory")

    model, (inputs, _) = mlp(), valued()
    jacobian = jacobian_of(model, inputs)
    monkeypatch.setattr(LinearUses, "write_rows", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        row_jacobian(jacobian, separable=True, most=MOST)
    assert not fallbacks


def test_rows_of_a_batch():
    model, (inputs, _) = mlp(), valued()
    rows = torch.tensor([5, 0, 7])
    found = row_jacobian(jacobian_of(model, inputs, rows=rows), separable=True, most=MOST)
    assert_close(found, dense(model, inputs[rows]))
    assert len(inputs) > ROWS
