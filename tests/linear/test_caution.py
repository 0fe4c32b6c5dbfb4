"""One CG iteration after a step that went too far, until gradients are clear again."""

import io
import math

import pytest
import torch
from torch import nn

import shf
from helpers import counts, identical, labelled, mlp, overshooting_model, theta
from shf.linear.stopping import Caution


@pytest.mark.parametrize(
    ("before", "rho", "noise", "after"),
    [
        (False, 0.9, 0.99, False),  # noise alone is no reason
        (False, 0.2, None, True),
        (False, -math.inf, 0.1, True),  # what went too far did so, however clear the gradient
        (True, 0.9, None, True),  # until noise is measured
        (True, 0.9, 0.5, True),
        (True, 0.3, 0.3, False),
        (True, 0.2, 0.1, True),
    ],
)
def test_when_one_iteration_must_do(before, rho, noise, after):
    caution = Caution(noise=0.3)
    found = caution.after({"cautious": before}, rho, noise)
    assert found == {"cautious": after}
    assert caution.limit(7, found) == (1 if after else 7)


def test_without_the_option_nothing_is_remembered():
    optimizer = overshooting()
    assert optimizer.step(*counts()).reduction_ratio < 0.25
    assert "cautious" not in optimizer.param_groups[0]["shf"]
    assert optimizer.step(*counts()).cg_steps == 4


def test_noise_must_be_measured():
    with pytest.raises(ValueError, match=r"SHF\(cg_noise=0\.3\): .* give noise_every=10"):
        shf.SHF(nn.Linear(2, 2), nn.MSELoss(), cg_noise=0.3)


def overshooting(**options):
    torch.manual_seed(0)
    given = {"damping": 1e-3, "cg_iterations": 4, "preconditioner": None, "noise_every": 2, "seed": 1, **options}
    return shf.SHF(overshooting_model(), nn.PoissonNLLLoss(), **given)


def test_a_run_is_cautious_and_then_no_more():
    """Twice the same rows in one batch: without noise, and so the first measurement after ρ is fine clears it."""
    inputs, targets = (half.repeat(2, 1) for half in counts())
    optimizer = overshooting(cg_noise=0.3, damping_factor=0.5)
    infos = [optimizer.step(inputs, targets) for _ in range(12)]
    assert infos[0].reduction_ratio < 0.25
    expected, cautious = [], False
    for info in infos:
        expected.append(1 if cautious else 4)
        if info.reduction_ratio < 0.25:
            cautious = True
        elif info.gradient_noise is not None:
            assert info.gradient_noise < 1e-20
            cautious = False
    assert [info.cg_steps for info in infos] == expected
    assert {1, 4} <= set(expected[1:]), "both happen"


def test_the_last_of_one_iteration_needs_no_backward_product():
    """As with ζ = 1: a cautious step costs what that costs."""
    data = counts()
    cautious, plain = overshooting(cg_noise=0.0), overshooting(cg_iterations=1)
    cautious.step(*data)
    with pytest.warns(shf.SHFWarning, match="other options"):
        plain.load_state_dict(cautious.state_dict())
    with torch.no_grad():
        for p, q in zip(plain.model.parameters(), cautious.model.parameters(), strict=True):
            p.copy_(q)
    ours, theirs = cautious.step(*data), plain.step(*data)
    assert (ours.cg_steps, ours.products) == (theirs.cg_steps, theirs.products)
    assert identical(theta(cautious.model), theta(plain.model))


def test_it_is_saved_and_loaded():
    data = counts()
    first = overshooting(cg_noise=0.0)
    first.step(*data)
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = overshooting(cg_noise=0.0)
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert second.step(*data).cg_steps == first.step(*data).cg_steps == 1
    assert identical(theta(second.model), theta(first.model))


def test_where_the_model_holds_nothing_changes():
    data, ends = labelled(), []
    for bound in (None, 0.0):
        torch.manual_seed(0)
        optimizer = shf.SHF(mlp(), nn.CrossEntropyLoss(), cg_noise=bound, noise_every=1, seed=1)
        infos = [optimizer.step(*data) for _ in range(5)]
        assert min(info.reduction_ratio for info in infos) > 0.25
        ends.append(theta(optimizer.model))
    assert identical(*ends)
