"""When CG stops because another iteration is not worth its price."""

import pytest
import torch
from torch import nn

import shf
from helpers import labelled, mlp, valued
from shf.linear.stopping import marginal_value, prices


@pytest.mark.parametrize("gains", [[8, 4, 2, 1, 0.5], [5, 4.9, 4.8, 0.1, 0.01], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("fixed", [0.5, 2.0, 10.0])
def test_it_stops_where_the_gain_per_cost_was_largest(gains, fixed):
    """Gains that never grow: the best quotient is passed exactly where an iteration falls below it."""
    stop, values = marginal_value(fixed, 1.0), [0.0]
    stopped = len(gains)
    for j, gain in enumerate(gains, start=1):
        values.append(values[-1] - gain)
        if stop(values):
            stopped = j
            break
    quotients = [sum(gains[:j]) / (fixed + j) for j in range(1, stopped + 1)]
    best = quotients.index(max(quotients)) + 1
    assert stopped <= best + 1  # one iteration is needed to see that it gained too little
    assert stopped == len(gains) or max(quotients) >= sum(gains) / (fixed + len(gains))


def test_an_uphill_start_does_not_stop_it():
    assert not marginal_value(1.0, 1.0)([3.0, 1.0])


def test_products_on_few_rows_are_cheap():
    fixed, each = prices(1.0, compared=True)
    cheap_fixed, cheap_each = prices(0.1, compared=False)
    assert (fixed, each) == (pytest.approx(8 / 3), pytest.approx(5 / 3))
    assert (cheap_fixed, cheap_each) == (pytest.approx(4 / 3 + 4 / 30), pytest.approx(4 / 30))


def test_fewer_iterations_where_they_gain_little():
    """One direction carries all of the descent: the first iteration finds it."""
    torch.manual_seed(0)
    inputs, targets = valued(200)
    inputs[:, 1:] *= 1e-3
    steps = {}
    for worth in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False).double()
        optimizer = shf.SHF(model, nn.MSELoss(), cg_worth=worth, cg_iterations=12, preconditioner=None, seed=1)
        info = optimizer.step(inputs, targets)
        steps[worth] = (info.cg_steps, info.cg_stop)
    assert steps[False][0] == 12
    assert steps[True][0] < 6
    assert steps[True][1] is shf.CGStop.PROGRESS


def test_zeta_is_still_the_most():
    optimizer = shf.SHF(mlp(), nn.CrossEntropyLoss(), cg_worth=True, cg_iterations=1)
    assert optimizer.step(*labelled()).cg_steps == 1
