"""The parts of docs/extending.md, run as they are printed: against dense solutions, saved and loaded, by two processes."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shf
import worlds
from helpers import assert_close, identical, labelled, mlp, theta

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
CE = nn.CrossEntropyLoss()
LAMBDA = 0.3
ALL = 80
"""Iterations that solve a system of 51 unknowns."""


def page() -> dict:
    """What the page's blocks define, one after the other."""
    names: dict = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


PARTS = page()
OPTIONS = {
    "damping": lambda parts: {"damping": parts["AveragedRatio"](initial=LAMBDA)},
    "preconditioner": lambda parts: {"preconditioner": parts["RunningFisher"](share=0.8)},
    "solver": lambda parts: {"solver": parts["ConjugateResiduals"](iterations=6)},
    "together": lambda parts: {
        "damping": parts["AveragedRatio"](initial=LAMBDA),
        "preconditioner": parts["RunningFisher"](),
        "solver": parts["ConjugateResiduals"](),
    },
}


def test_the_page_is_short_and_its_last_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert max(len(block.splitlines()) for block in blocks) <= 40
    assert PARTS["info"].loss_after <= PARTS["info"].loss_before
    assert "damping=AveragedRatio(" in repr(PARTS["optimizer"])


# --- a step against dense matrices ---------------------------------------------------------------------------------------


def dense(model):
    """B + λI and -∇f at the model's parameters."""
    x, t = labelled()
    product = shf.gauss_newton_product(model, CE, x, t)
    B = torch.stack([product(e) for e in torch.eye(len(theta(model)), dtype=torch.float64)])
    gradient = torch.autograd.grad(CE(model(x), t), list(model.parameters()))
    return B + LAMBDA * torch.eye(len(B), dtype=B.dtype), -torch.cat([g.reshape(-1) for g in gradient])


def one_step(**options):
    """θ's change in a step that takes what the solver ends with, the model before it, and the optimizer."""
    torch.manual_seed(0)
    model = mlp()
    before = copy.deepcopy(model)
    optimizer = shf.SHF(model, CE, seed=1, backtracking=None, **{"damping": LAMBDA, **options})
    info = optimizer.step(*labelled())
    assert info.accepted
    assert info.step_size == 1
    return theta(model) - theta(before), before, optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"damping": PARTS["AveragedRatio"](initial=LAMBDA), "cg_iterations": ALL},
        {"preconditioner": PARTS["RunningFisher"](), "cg_iterations": ALL},
        {"solver": PARTS["ConjugateResiduals"](iterations=ALL)},
    ],
    ids=["damping", "preconditioner", "solver"],
)
def test_a_step_is_the_dense_solution(options):
    step, before, _ = one_step(**options)
    assert_close(step, torch.linalg.solve(*dense(before)), 1e-9)


def test_one_iteration_goes_along_the_preconditioned_gradient():
    step, before, optimizer = one_step(preconditioner=PARTS["RunningFisher"](), cg_iterations=1)
    A, b = dense(before)
    x, t = labelled()
    rows = [torch.autograd.grad(CE(before(x[[j]]), t[[j]]), list(before.parameters())) for j in range(len(x))]
    squares = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows]).square().mean(0)
    y = b / (squares + LAMBDA).pow(0.75)
    assert_close(step, (b @ y) / (y @ A @ y) * y)
    kept = torch.cat([optimizer.state[p]["fisher_average"].reshape(-1) for p in optimizer.model.parameters()])
    assert_close(kept, squares)


def test_the_preconditioner_averages_over_steps():
    torch.manual_seed(0)
    parts = {"preconditioner": PARTS["RunningFisher"](share=0.8)}
    optimizer = shf.SHF(mlp(), CE, **parts)
    seen = []
    for k in range(2):
        fresh = shf.SHF(copy.deepcopy(optimizer.model), CE, **parts)
        fresh.step(*labelled(seed=k))  # its first average is the batch's own diagonal
        seen.append([fresh.state[p]["fisher_average"] for p in fresh.model.parameters()])
        optimizer.step(*labelled(seed=k))
    for p, first, second in zip(optimizer.model.parameters(), *seen, strict=True):
        assert_close(optimizer.state[p]["fisher_average"], 0.8 * first + 0.2 * second)


def test_few_conjugate_residuals_make_the_residual_smaller_than_cg_does():
    residuals = []
    for options in ({"solver": PARTS["ConjugateResiduals"](iterations=4)}, {"cg_iterations": 4}):
        step, before, _ = one_step(preconditioner=None, **options)
        A, b = dense(before)
        residuals.append((A @ step - b).norm())
    assert residuals[0] < 0.999 * residuals[1]


def test_the_rule_follows_the_average_of_rho():
    optimizer = shf.SHF(mlp(), CE, damping=PARTS["AveragedRatio"](initial=LAMBDA))
    damping, average = LAMBDA, None
    for k in range(8):
        info = optimizer.step(*labelled(seed=k))
        assert info.damping == damping
        rho = max(info.reduction_ratio, -1.0)
        average = 0.7 * (rho if average is None else average) + (1 - 0.7) * rho
        damping = damping / 0.9 if average < 0.25 else damping * 0.9 if average > 0.75 else damping
        assert optimizer.damping == damping
        assert optimizer.param_groups[0]["shf"]["ratio_average"] == average


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PARTS["AveragedRatio"](share=1.0),
            r"AveragedRatio\(share=1.0\): must be a number at least 0 and below 1",
        ),
        (lambda: PARTS["AveragedRatio"](initial=1.0, most=0.5), r"AveragedRatio\(initial=1.0\): must be between"),
    ],
)
def test_a_part_refuses_what_its_options_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("part", "beside"),
    [("damping", "damping_factor"), ("preconditioner", "preconditioner_exponent"), ("solver", "cg_iterations")],
)
def test_options_of_the_part_it_replaces_are_refused(part, beside):
    with pytest.raises(TypeError, match=f"{beside} belongs to the {part}"):
        shf.SHF(mlp(), CE, **OPTIONS[part](PARTS), **{beside: 1})


# --- saved and loaded ----------------------------------------------------------------------------------------------------


def train(optimizer, steps):
    for k in steps:
        optimizer.step(*labelled(30, seed=k))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_saved_run_goes_on_bit_by_bit(name, tmp_path):
    torch.manual_seed(0)
    optimizer = shf.SHF(mlp(dropout=0.2), CE, seed=1, **OPTIONS[name](PARTS))
    train(optimizer, range(3))
    torch.save([optimizer.model.state_dict(), optimizer.state_dict()], tmp_path / "saved")
    train(optimizer, range(3, 6))
    other = shf.SHF(mlp(dropout=0.2), CE, seed=2, **OPTIONS[name](PARTS))
    model, state = torch.load(tmp_path / "saved", weights_only=True)
    other.model.load_state_dict(model)
    other.load_state_dict(state)
    train(other, range(3, 6))
    assert identical(other.model.state_dict(), optimizer.model.state_dict())
    assert identical(other.state_dict(), optimizer.state_dict())


def test_a_step_that_fails_leaves_what_parts_remember():
    optimizer = shf.SHF(mlp(), CE, **OPTIONS["together"](PARTS))
    train(optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    inputs, targets = labelled()
    with pytest.raises(shf.NonFiniteError):
        optimizer.step(inputs * torch.inf, targets)
    assert identical(optimizer.state_dict(), before)


@pytest.mark.parametrize("name", OPTIONS)
def test_hf_takes_them_too(name):
    torch.manual_seed(0)
    optimizer = shf.HF(mlp(), CE, **OPTIONS[name](PARTS))
    infos = [optimizer.step([labelled(seed=0), labelled(seed=1)], curvature=labelled(seed=0)) for _ in range(4)]
    assert infos[-1].loss_after < infos[0].loss_before


# --- two processes -------------------------------------------------------------------------------------------------------


def spread(rank, name, options):
    """Some steps of one of two processes, which holds 17 of 30 rows or the others; alone where there is no rank."""
    parts = page()
    torch.manual_seed(0)
    optimizer = shf.SHF(mlp(dropout=0.2), CE, seed=1, **OPTIONS[name](parts), **options)
    share = slice(None) if rank is None else slice(0, 17) if rank == 0 else slice(17, None)
    for k in range(4):
        inputs, targets = labelled(30, seed=k)
        optimizer.step(inputs[share], targets[share])
    return theta(optimizer.model), optimizer.state_dict()["param_groups"][0]["shf"]


@pytest.mark.parametrize("options", [{}, {"split_vectors": True}], ids=["whole", "split"])
@pytest.mark.parametrize("name", OPTIONS)
def test_two_processes_take_the_steps_of_one(name, options):
    alone, numbers = spread(None, name, {})
    (first, own), (second, other) = worlds.run(2, spread, name, options)
    assert torch.equal(first, second)
    assert own == other
    assert_close(first, alone, 1e-8)
    assert_close(own["damping"], numbers["damping"], 1e-8)


def test_two_processes_with_other_parts_are_told():
    outcomes = worlds.attempt(2, other_parts)
    assert all(outcome.error[0] == "RankError" and "share=0.5" in outcome.error[1] for outcome in outcomes)


def other_parts(rank):
    parts = page()
    torch.manual_seed(0)
    rule = parts["AveragedRatio"](share=0.5 if rank else 0.7)
    shf.SHF(mlp(), CE, seed=1, damping=rule).step(*labelled())
