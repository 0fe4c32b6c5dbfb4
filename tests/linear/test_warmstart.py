"""Exact momentum and the quadratic form, against dense matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shf
from helpers import assert_close, identical, labelled, mlp, theta
from shf.linear.cg import conjugate_gradient
from shf.linear.flat import inner_products
from shf.linear.warmstart import conjugate_to_last

CE = nn.CrossEntropyLoss()


def system(seed, n=6):
    source = torch.Generator().manual_seed(seed)
    M = torch.randn(n, n, generator=source, dtype=torch.float64)
    b, d = torch.randn(2, n, generator=source, dtype=torch.float64)
    return M @ M.t() + 0.1 * torch.eye(n, dtype=torch.float64), b, d


def combined(A, b, d, iterations=1):
    cg = conjugate_gradient(A.mv, b, iterations=iterations)
    return cg, *conjugate_to_last(A.mv, b, cg.last.clone(), cg.values[-1], d.clone(), inner_products)


@given(seed=st.integers(0, 10**6), iterations=st.integers(1, 4))
def test_it_is_the_minimum_over_the_plane(seed, iterations):
    A, b, d = system(seed)
    cg, delta, value = combined(A, b, d, iterations)
    V = torch.stack([cg.last, d], 1)
    expected = V @ torch.linalg.solve(V.t() @ A @ V, V.t() @ b)
    assert_close(delta, expected, 1e-6)
    assert value == pytest.approx((0.5 * delta @ A @ delta - b @ delta).item(), rel=1e-8)
    assert value <= cg.values[-1] + 1e-12


@pytest.mark.parametrize("d", [lambda x: 3 * x, torch.zeros_like, lambda x: torch.full_like(x, torch.nan)])
def test_a_last_update_that_has_nothing_to_add_is_left_out(d):
    """Parallel, zero or not a number. Fails without the comparison with rounding: by division by zero, or with NaN for δ."""
    A, b, _ = system(0)
    x = conjugate_gradient(A.mv, b, iterations=1).last
    cg, delta, value = combined(A, b, d(x))
    assert identical(delta, x)
    assert value == cg.values[-1]


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_of_the_optimizer(steps):
    """The last of three steps is the minimum of the damped model over P⁻¹g (P = I) and the move before it."""
    model, batches = mlp(), [labelled(seed=k) for k in range(steps)]
    options = {"damping": 0.5, "preconditioner": None, "backtracking": None, "damping_factor": 1.0}
    optimizer = shf.SHF(model, CE, delta_momentum="exact", cg_iterations=1, **options)
    moves = [torch.zeros(len(theta(model)), dtype=torch.float64)]
    for inputs, targets in batches:
        before = theta(model)
        g = torch.cat(
            [p.reshape(-1) for p in torch.autograd.grad(CE(model(inputs), targets), list(model.parameters()))]
        )
        product = shf.gauss_newton_product(model, CE, inputs, targets)
        A = torch.stack([product(e).clone() for e in torch.eye(len(g), dtype=torch.float64)])
        A += 0.5 * torch.eye(len(g), dtype=torch.float64)
        info = optimizer.step(inputs, targets)
        moves.append(theta(model) - before)
        assert info.step_size == 1
    V = torch.stack([-g, moves[-2]][: min(steps, 2)], 1)
    assert_close(moves[-1], V @ torch.linalg.solve(V.t() @ A @ V, V.t() @ -g), 1e-8)
    assert (info.products, info.chosen_iterate) == ((1, 1) if steps == 1 else (2, 2))


def test_momentum_that_was_shut_off_stays_off():
    """γ = 0 by the rule for divergence, or from the start: steps of CG alone."""
    ends = []
    for options in ({"delta_momentum": "exact"}, {"delta_momentum": "start"}):
        torch.manual_seed(0)
        model = mlp()
        optimizer = shf.SHF(model, CE, cg_decay=0.0, seed=1, **options)
        infos = [optimizer.step(*labelled(seed=k)) for k in range(3)]
        ends.append((theta(model), [info.products for info in infos]))
    assert identical(*ends)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("rows", [None, 5])
def test_the_last_iteration_needs_no_transposed_product(monkeypatch, decay, rows):
    """J' for the gradient and ζ - 1 iterations; the update is what whole products would have made."""
    pulled = []
    vjp = shf.model.jacobian.Jacobian.vjp
    monkeypatch.setattr(
        "shf.model.jacobian.Jacobian.vjp", lambda *args, **words: pulled.append(1) or vjp(*args, **words)
    )
    options = {"preconditioner": None, "cg_iterations": 3, "weight_decay": decay, "curvature_batch": rows, "seed": 1}
    ends = []
    for whole in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = shf.SHF(model, CE, **options)
        if whole:
            monkeypatch.setattr(
                "shf.linear.solver.conjugate_gradient", lambda *a, quadratic, **k: conjugate_gradient(*a, **k)
            )
        pulled.clear()
        optimizer.step(*labelled())
        ends.append((theta(model), len(pulled)))
    assert_close(ends[0][0], ends[1][0], 1e-12)
    assert (ends[0][1], ends[1][1]) == (3, 4)
