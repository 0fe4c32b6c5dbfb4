"""The direction of weight decay, against dense matrices."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shf
from helpers import assert_close
from shf.linear import DecayStep, LinearSystem
from shf.linear.cg import CGStop, conjugate_gradient
from shf.linear.decaystep import minimum
from shf.linear.solver import Path, Run

LAMBDA = 0.7


def system(seed, n=6):
    source = torch.Generator().manual_seed(seed)
    M = torch.randn(n, n, generator=source, dtype=torch.float64)
    b, d = torch.randn(2, n, generator=source, dtype=torch.float64)
    B = M @ M.t() + 0.1 * torch.eye(n, dtype=torch.float64)
    return B, b, d


def solved(B, b, iterations=1):
    A = B + LAMBDA * torch.eye(len(b), dtype=torch.float64)
    cg = conjugate_gradient(A.mv, b, iterations=iterations)
    return LinearSystem(A.mv, LAMBDA), cg


@given(seed=st.integers(0, 10**6), iterations=st.integers(1, 3))
def test_it_is_the_minimum_over_the_plane(seed, iterations):
    """Of the model with λ on x alone. Fails with λ on d as well, or with x left as it is."""
    B, b, d = system(seed)
    damped, cg = solved(B, b, iterations)
    a, c, rise = minimum(damped, b, cg.last, cg.values[-1], d)
    V = torch.stack([cg.last, d], 1)
    H = V.t() @ B @ V
    H[0, 0] += LAMBDA * cg.last @ cg.last
    expected = torch.linalg.solve(H, V.t() @ b)
    if expected[1] < 0:
        expected = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert_close(torch.tensor([a, c], dtype=torch.float64), expected, 1e-6)
    value = 0.5 * expected @ H @ expected - b @ V @ expected
    assert rise == pytest.approx(value.item() - cg.values[-1], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("d", [lambda x: -3 * x, torch.zeros_like, lambda x: torch.full_like(x, torch.nan)])
def test_a_direction_that_has_nothing_to_add_is_left_out(d):
    damped, cg = solved(0 * system(0)[0], system(0)[1])
    assert minimum(damped, system(0)[1], cg.last, cg.values[-1], d(cg.last)) == (1.0, 0.0, 0.0)


def extended(c, numbers, on=True):
    """Numbers that are remembered, products, and what was handed over, for a d that is c times a direction of descent."""
    B, b, _ = system(3)
    damped, cg = solved(B, b)
    seen, path = [], Path([], [], cg.values, cg.last, 1, 1, CGStop.ITERATIONS)
    recall = lambda name, default: numbers.get(name, default)  # noqa: E731
    remember = lambda name, value: numbers.update({name: value})  # noqa: E731
    run = Run(lambda number, x, q, value=None: seen.append((x.clone(), q)), recall=recall, remember=remember)
    d = c * torch.linalg.solve(B, b)
    after = DecayStep(on=on).extend(path, damped, b, lambda: d.clone(), run)
    return after.products, [(x, q, 0.5 * x @ (B + LAMBDA * torch.eye(6, dtype=x.dtype)) @ x - b @ x) for x, q in seen]


def test_the_candidate_comes_with_the_damped_models_value():
    products, ((_, q, expected),) = extended(1.0, {})
    assert products == 2
    assert q == pytest.approx(expected.item(), rel=1e-9)


def test_what_does_not_pay_is_asked_less_and_less_often():
    numbers, asked = {}, []
    for iteration in range(200):
        numbers["iteration"] = iteration
        products, seen = extended(-1.0, numbers)  # uphill: c would be negative
        assert not seen
        if products == 2:
            asked.append(iteration)
    assert asked == [0, 2, 5, 10, 19, 36, 69, 134, 199]


def test_what_pays_is_asked_for_in_every_step():
    numbers = {"decay_pause": 64}
    for iteration in range(3):
        numbers["iteration"] = iteration
        assert extended(1.0, numbers)[0] == 2
    assert extended(1.0, {}, on=False) == (1, [])


def steps(count=3, **options):
    """The largest weight of an input that is always 0, before and after some steps with a λ far above w."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs, targets = torch.randn(60, 5, dtype=torch.float64), torch.randint(3, (60,))
    inputs[:, 2] = 0
    common = {
        "weight_decay": 0.5,
        "damping": 50.0,
        "preconditioner": "kronecker",
        "backtracking": None,
        "cg_decay": 0.0,
    }
    optimizer = shf.SHF(model, nn.CrossEntropyLoss(), cg_iterations=1, seed=0, **{**common, **options})
    before = model[0].weight[:, 2].abs().max().item()
    infos = [optimizer.step(inputs, targets) for _ in range(count)]
    return model[0].weight[:, 2].abs().max().item() / before, infos


def test_weights_without_curvature_go_at_once():
    left, infos = steps(decay_direction=True)
    assert left < 0.1
    assert all(math.isfinite(i.reduction_ratio) and i.accepted for i in infos)
    assert [i.products for i in infos] == [2, 2, 2]
    left, infos = steps(decay_direction=False)
    assert left > 0.9
    assert [i.products for i in infos] == [1, 1, 1]


def test_without_factors_there_is_no_direction():
    """As in a preset of which another preconditioner is wanted."""
    _, infos = steps(decay_direction=True, preconditioner="jacobi")
    assert [i.products for i in infos] == [1, 1, 1]
