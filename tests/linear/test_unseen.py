"""What share of a batch's solution is taken where batches are drawn anew."""

import pytest
import torch
from torch import nn

import shf
from helpers import assert_close, theta, valued
from shf.linear.roots import Roots
from shf.linear.sides import smaller_side
from shf.linear.trustregion import _Search
from shf.linear.unseen import share, stepped

MSE = nn.MSELoss()


class Remembering:
    """Steps of which each batch says what the last one came to."""

    def __init__(self):
        self.numbers = {}

    def hear(self, value, eps=1e-16):
        keep = self.numbers.__setitem__
        self.run = shf.solvers.Run(lambda *_: None, value=value, recall=self.numbers.get, remember=keep)
        return share(self.run, eps)


@pytest.mark.parametrize(("signal", "noise"), [(3.0, 1.0), (1.0, 1.0), (1.0, 9.0), (2.0, 0.0)])
def test_it_finds_the_share_for_which_all_rows_gain_most(signal, noise):
    """On averages that are exact: own rows gain (η - ½η²)(S + N), others ηN less."""
    steps, eta = Remembering(), 1.0
    assert steps.hear(100.0) == eta
    for _ in range(5):
        fall = (eta - 0.5 * eta**2) * (signal + noise)
        stepped(steps.run, fall)
        eta = steps.hear(steps.run.value - fall + eta * noise)
        assert eta == pytest.approx(max(signal / (signal + noise), 0.25), rel=1e-12)


@pytest.mark.parametrize("gap", [0.0, 3e-16, -0.5])
def test_nothing_new_and_good_news_leave_it_whole(gap):
    """f evaluated again on the same rows differs by rounding, which is more than such a step gains."""
    steps = Remembering()
    steps.hear(1.0)
    for _ in range(3):
        stepped(steps.run, 1e-17)
        assert steps.hear(1.0 + gap) == 1.0


def test_a_step_that_was_not_made_says_nothing():
    steps = Remembering()
    steps.hear(1.0)
    stepped(steps.run, 0.0)
    assert steps.hear(5.0) == 1.0


@pytest.mark.parametrize(("rows", "weights"), [(12, 0.0), (4, 0.0), (4, 0.2), (12, 0.2)])
def test_a_trial_is_that_share_of_the_dense_solution(rows, weights):
    source = torch.Generator().manual_seed(0)
    R = torch.randn(rows, 7, generator=source, dtype=torch.float64)
    r, at = torch.randn(rows, generator=source, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    roots = Roots(R, weights, r, weights * at if weights else None, lambda d: R @ d)

    def value(d):
        return 0.5 * ((R @ d + r).square().sum() + weights * (at + d).square().sum()).item()

    run = shf.solvers.Run(lambda *_: None, value, value(0 * at))
    trial = _Search(roots, smaller_side(roots), run, 0.1, share=0.4)._trial(0.05)
    B = R.t() @ R + (weights + trial.damping) * torch.eye(7, dtype=torch.float64)
    assert_close(trial.delta, -0.4 * torch.linalg.solve(B, roots.gradient()), 1e-9)
    assert trial.delta.norm().item() == pytest.approx(0.05, rel=1e-3)
    assert trial.rho == pytest.approx(1.0, rel=1e-9)  # of the model at that share


def test_on_new_noisy_rows_in_every_step_it_ends_nearer_to_what_all_rows_want():
    """A linear model, 60 noisy rows for 21 parameters: whole steps fit each draw."""
    truth = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    ends = {}
    for shares in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(20, 1).double()
        optimizer = shf.SHF(model, MSE, seed=1, **shf.presets.residual)
        error = []
        for _ in range(40):
            x = torch.randn(60, 20, dtype=torch.float64)
            optimizer.step(x, x @ truth + torch.randn(60, 1, dtype=torch.float64))
            error.append((model.weight.detach().t() - truth).square().sum().item())
            if not shares:
                optimizer.param_groups[0]["shf"]["share_gained"] = 0.0
        ends[shares] = sum(error[-20:])
    assert ends[True] < 0.4 * ends[False]


def test_on_the_same_rows_it_stays_whole():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = shf.SHF(model, MSE, seed=1, **shf.presets.residual)
    for _ in range(30):
        optimizer.step(*valued(40))
        assert optimizer.param_groups[0]["shf"].get("share", 1.0) == 1.0
    assert theta(model).isfinite().all()
