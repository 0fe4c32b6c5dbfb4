"""Each option where it matters and where it vanishes.

A case names two runs that must differ and two that must not; a run is three epochs of two batches unless it says otherwise.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import shf
from helpers import (
    FEATURES,
    ROWS,
    assert_close,
    counts,
    identical,
    labelled,
    mlp,
    normalised,
    overshooting_model,
    theta,
    valued,
)

CE = nn.CrossEntropyLoss()


def run(
    *, dropout=0.3, epochs=3, batches=2, model=None, loss=CE, data=labelled, biases_only=False, scales=None, **options
):
    """θ at the end of a run."""
    torch.manual_seed(0)
    model = mlp(dropout) if model is None else model()
    params = [p for p in model.parameters() if p.ndim < 2] if biases_only else None
    optimizer = shf.SHF(model, loss, params, **{"seed": 1, **options})
    for epoch in range(epochs):
        for number in range(batches):
            inputs, targets = data(seed=number)
            optimizer.step(inputs, targets if scales is None else scales[epoch] * targets)
        optimizer.next_epoch()
    return theta(model)


@dataclass(frozen=True)
class Case:
    """Values of one option: `differ` under the settings `where`, `same` under the settings `vanishes`."""

    differ: tuple[Any, Any]
    same: tuple[Any, Any]
    where: dict[str, Any] = field(default_factory=dict)
    vanishes: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0


ONE_STEP = {"epochs": 1, "batches": 1}
ONE_EPOCH = {"epochs": 1}
DIVERGING = {"loss": nn.MSELoss(), "data": valued, "epochs": 5, "scales": (1e2, 1e3, 1e4, 1e4, 1e4), "dropout": 0.0}


class Held(nn.Module):
    def forward(self, x):
        return shf.hold_steady(x)


OVERSHOOTING = {"model": overshooting_model, "loss": nn.PoissonNLLLoss(), "data": counts, "damping": 1e-3}

CASES = {
    # λ beside a curvature that is everywhere far larger
    "damping": Case(
        (1.0, 10.0), (1e-12, 1e-14), vanishes={"weight_decay": 0.1, "preconditioner": None}, tolerance=1e-9
    ),
    # the first step has its λ from the start
    "damping_factor": Case((0.99, 0.5), (0.99, 0.5), vanishes=ONE_STEP),
    # λ does not rise in the first step
    "damping_rise": Case((1.0, 4.0), (1.0, 4.0), where={**OVERSHOOTING, "damping_factor": 0.5}, vanishes=ONE_STEP),
    # holding steady what no parameter moves
    "structural_damping": Case(
        (0.0, 1.0),
        (0.0, 1.0),
        where={"model": lambda: nn.Sequential(*mlp()[:2], Held(), *mlp()[2:])},
        vanishes={"model": lambda: nn.Sequential(Held(), *mlp())},
        tolerance=1e-10,
    ),
    # the others have dense references of their own, in tests/linear
    "solver": Case(("cg", "dense"), ("cg", shf.solvers.CG(iterations=3))),
    "target_ratio": Case((0.1, 0.9), (0.1, 0.5), where={"solver": "trust-region"}),
    # a linear model and a quadratic loss: solved after as many iterations as there are parameters
    "cg_iterations": Case(
        (1, 3),
        (30, 40),
        vanishes={"model": lambda: nn.Linear(FEATURES, 3).double(), "loss": nn.MSELoss(), "data": valued},
        tolerance=1e-6,
    ),
    "damping_rule": Case(
        ("batch", "held-out"), ("batch", "held-out"), where={"damping_factor": 0.8}, vanishes=ONE_STEP
    ),
    "cg_worth": Case((False, True), (False, True), where={"cg_iterations": 12}, vanishes={"cg_iterations": 1}),
    "cg_noise": Case(
        (None, 0.0),
        (None, 0.0),
        where={**OVERSHOOTING, "noise_every": 1},
        vanishes={"noise_every": 1, "cg_iterations": 1},
    ),
    "cg_survival": Case((None, 0.99), (None, 0.99), vanishes={"cg_iterations": 1}),
    # seen in `averaged` and in `StepInfo` alone
    "averaging": Case((), (0.0, 0.9)),
    "noise_every": Case((), (None, 1)),
    "curvature_batch": Case((None, 5), (None, ROWS)),
    "curvature_rows": Case(("block", "strided"), ("block", "strided"), where={"curvature_batch": 5}),
    "delta_momentum": Case(("start", "exact"), ("start", "exact"), vanishes={"cg_decay": 0.0}),
    "cg_decay": Case((0.5, 0.9), (0.5, 0.9), vanishes=ONE_STEP),
    "cg_decay_growth": Case((1.01, 1.5), (1.01, 1.5), vanishes=ONE_EPOCH),
    "cg_decay_max": Case((0.99, 0.6), (0.99, 0.6), where={"cg_decay_growth": 1.5}),  # 0.5 · 1.01² stays below 0.6
    "update_decay": Case((1.0, 0.5), (1.0, 0.5), vanishes=ONE_EPOCH),
    "preconditioner": Case(
        ("empirical-fisher", None), ("empirical-fisher", None), vanishes={"preconditioner_exponent": 0.0}
    ),
    "preconditioner_squares": Case(
        ("exact", "sampled"), ("exact", "auto"), where={"model": normalised, "dropout": 0.0}
    ),
    "preconditioner_exponent": Case((0.75, 0.5), (0.75, 0.5), vanishes={"preconditioner": None}),
    "factor_average": Case(
        (0.95, 0.0), (0.95, 0.0), where={"preconditioner": "kronecker", "factor_every": 1}, vanishes=ONE_STEP
    ),
    "factor_every": Case((1, 4), (1, 4), where={"preconditioner": "kronecker"}),
    "backtracking": Case(("all", None), ("all", None), where=OVERSHOOTING, vanishes={"cg_iterations": 1}),
    "line_search_steps": Case((60, 0), (60, 0), where={**OVERSHOOTING, "cg_iterations": 1}),
    "max_norm": Case((None, 0.5), (None, 1e6)),
    "damping_min": Case((1e-15, 1.0), (1e-15, 1.0), where={"damping_factor": 0.5}, vanishes={"damping_factor": 1.0}),
    "damping_max": Case(
        (1e15, 1e-3),
        (1e15, 1e-3),
        where={**OVERSHOOTING, "damping_factor": 0.5},
        vanishes={"damping": 1e-3, **ONE_STEP},
    ),
    # batches that are not finite and steps that do not move: see faults/test_nonfinite.py and faults/test_rejections.py
    "nonfinite": Case((), ("raise", "skip")),
    "max_rejections": Case((), (50, None)),
    # chunks change nothing but memory: see the tests below
    "microbatch": Case((), (None, 5), tolerance=1e-9),
    "momentum_off_on_divergence": Case((False, True), (False, True), where=DIVERGING),
    "weight_decay": Case((0.0, 0.1), (0.0, 0.1), vanishes={"biases_only": True}),
    "decay_direction": Case(
        (False, True),
        (False, True),
        where={"preconditioner": "kronecker", "weight_decay": 0.1},
        vanishes={"preconditioner": "kronecker", "weight_decay": 0.0},
    ),
    # between processes only: where they matter is tested there
    "split_vectors": Case((), (False, True)),
    "message_dtype": Case((), (None, "bfloat16")),
    "check_every": Case((), (100, 1)),
    "rank_timeout": Case((), (None, 10.0)),
    "seed": Case((1, 2), (1, 2), vanishes={"dropout": 0.0}),
}


def test_every_option_has_a_case():
    assert set(CASES) == {*shf.Config.names(), "weight_decay", "seed"}


@pytest.mark.parametrize("option", [name for name, case in CASES.items() if case.differ])
def test_where_it_matters(option):
    case = CASES[option]
    a, b = (run(**{**case.where, option: value}) for value in case.differ)
    assert (a - b).abs().max() > 1e-5


@pytest.mark.parametrize("option", CASES)
def test_where_it_vanishes(option):
    case = CASES[option]
    a, b = (run(**{**case.vanishes, option: value}) for value in case.same)
    assert_close(a, b, case.tolerance)


# --- damping ------------------------------------------------------------------------------------------------------------


def test_huge_damping_is_gradient_descent():
    """λ → ∞ without preconditioner: δ → -g/λ."""
    inputs, targets = labelled()
    model = mlp()
    gradient = torch.autograd.grad(CE(model(inputs), targets), list(model.parameters()))
    before = theta(model)
    shf.SHF(model, CE, damping=1e8, preconditioner=None).step(inputs, targets)
    assert_close(1e8 * (theta(model) - before), -torch.cat([g.reshape(-1) for g in gradient]), 1e-6)


# --- preconditioners ----------------------------------------------------------------------------------------------------


def test_preconditioners_differ_under_few_iterations():
    ends = {kind: run(preconditioner=kind) for kind in ("empirical-fisher", "jacobi", None)}
    assert not torch.allclose(ends["empirical-fisher"], ends["jacobi"])
    assert not torch.allclose(ends["jacobi"], ends[None])


def test_preconditioners_agree_where_cg_solves():
    whole = {"cg_iterations": 150, "backtracking": None, "epochs": 1, "batches": 1}
    ends = [run(preconditioner=kind, **whole) for kind in ("empirical-fisher", "jacobi", None)]
    assert_close(ends[0], ends[2], 1e-7)
    assert_close(ends[1], ends[2], 1e-7)


# --- backtracking and line search ---------------------------------------------------------------------------------------


def first_step(**options):
    torch.manual_seed(0)
    model = overshooting_model()
    optimizer = shf.SHF(model, OVERSHOOTING["loss"], **{"damping": 1e-3, "cg_iterations": 4, **options})
    return optimizer, optimizer.step(*counts())


@pytest.mark.parametrize(("rule", "chosen"), [("all", 2), ("first-worse", 4), (None, 5)])
def test_backtracking_chooses_by_the_objective(rule, chosen):
    """Three curvature rows make late iterates overshoot: f falls, rises, falls and rises along them."""

    def step(iterations, rule):
        torch.manual_seed(1)
        return shf.SHF(
            mlp(), CE, cg_iterations=iterations, backtracking=rule, curvature_batch=3, damping=0.1, seed=1
        ).step(*labelled())

    alone = [step(n, None) for n in range(1, 6)]
    assert all(info.step_size == 1 for info in alone)  # so that loss_after is f at that iterate
    f = [info.loss_after for info in alone]
    assert f[1] == min(f)
    assert f[2] > f[3] < f[4]
    info = step(5, rule)
    assert info.chosen_iterate == chosen
    assert info.loss_after == pytest.approx(f[chosen - 1], rel=1e-12)


@pytest.mark.parametrize(("rule", "least"), [("all", 4), ("first-worse", 1), (None, 1)])
def test_backtracking_costs_evaluations(rule, least):
    torch.manual_seed(0)
    info = shf.SHF(mlp(), CE, cg_iterations=4, backtracking=rule).step(*labelled())
    assert info.step_size == 1
    assert info.evaluations == {"all": 4, None: 1}.get(rule, info.evaluations)
    assert least <= info.evaluations <= 4
    if rule is None:
        assert info.chosen_iterate == 4


def test_the_line_search_rescues_a_step_that_goes_too_far():
    searched, rescued = first_step(cg_iterations=1)
    refused, rejected = first_step(cg_iterations=1, line_search_steps=0)
    assert 0 < rescued.step_size < 1
    assert rescued.accepted
    assert rescued.loss_after < rescued.loss_before
    assert (rejected.step_size, rejected.accepted) == (0.0, False)
    torch.manual_seed(0)
    assert identical(theta(refused.model), theta(overshooting_model()))
    assert searched.damping == refused.damping > 1e-3  # λ is judged at the full step


@pytest.mark.parametrize("steps", [1, 5])
def test_the_line_search_gives_up_after_its_steps(steps):
    needed = round(math.log(first_step(cg_iterations=1)[1].step_size, 0.8))
    assert needed > 5
    info = first_step(cg_iterations=1, line_search_steps=steps)[1]
    assert (info.accepted, info.evaluations) == (False, 1 + steps)
    assert first_step(cg_iterations=1, line_search_steps=needed)[1].accepted


# --- β and clipping -----------------------------------------------------------------------------------------------------


def test_update_decay_shortens_the_steps_of_later_epochs():
    moves = {}
    for c in (1.0, 0.25):
        torch.manual_seed(0)
        optimizer = shf.SHF(mlp(), CE, update_decay=c)
        before = theta(optimizer.model)
        optimizer.next_epoch()
        info = optimizer.step(*labelled())
        moves[c] = theta(optimizer.model) - before, info
    assert_close(moves[0.25][0], 0.25 * moves[1.0][0], 1e-12)
    assert moves[0.25][1] == moves[1.0][1]  # loss_after is before β


@pytest.mark.parametrize("bound", [0.3, "fan-in"])
def test_max_norm_holds_after_every_step(bound):
    model = mlp()
    with torch.no_grad():
        model[0].weight.mul_(4)
    biases = model[0].bias.detach().clone()
    optimizer = shf.SHF(model, CE, max_norm=bound)
    for _ in range(3):
        info = optimizer.step(*labelled())
        assert info.accepted
        for layer in (model[0], model[2]):
            limit = round(math.sqrt(layer.in_features)) if bound == "fan-in" else bound
            assert layer.weight.square().sum(1).max() <= limit * (1 + 1e-12)
    assert not torch.equal(model[0].bias, biases)


def test_max_norm_is_outside_of_the_reported_objective():
    infos = []
    for bound in (None, 0.1):
        torch.manual_seed(0)
        infos.append(shf.SHF(mlp(), CE, max_norm=bound).step(*labelled()))
    assert infos[0] == infos[1]


def test_a_rejected_step_is_not_clipped():
    torch.manual_seed(0)
    model = overshooting_model()
    before = theta(model)
    info = shf.SHF(model, nn.PoissonNLLLoss(), damping=1e-3, line_search_steps=0, cg_iterations=1, max_norm=1e-6).step(
        *counts()
    )
    assert not info.accepted
    assert identical(theta(model), before)


# --- reduction ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature_batch", [None, 5])
@pytest.mark.parametrize("preconditioner", ["empirical-fisher", "jacobi", "kronecker", None])
def test_a_sum_is_a_mean_on_another_scale(curvature_batch, preconditioner):
    """B times the loss, with B times the damping and decay: the same steps."""
    options = {"curvature_batch": curvature_batch, "preconditioner": preconditioner}
    mean = run(loss=CE, damping=0.5, weight_decay=0.01, **options)
    total = run(loss=nn.CrossEntropyLoss(reduction="sum"), damping=0.5 * ROWS, weight_decay=0.01 * ROWS, **options)
    assert_close(total, mean, 1e-9)


def summed(outputs, targets):
    return CE(outputs, targets) * len(outputs)


def test_a_callable_is_a_mean_unless_it_is_said_otherwise():
    def averaged(outputs, targets):
        return CE(outputs, targets)

    options = {"curvature_batch": 5}
    assert_close(run(loss=averaged, **options), run(loss=CE, **options), 1e-9)
    by_sum = run(loss=nn.CrossEntropyLoss(reduction="sum"), **options)
    assert_close(run(loss=summed, reduction="sum", **options), by_sum, 1e-9)
    with pytest.raises(ValueError, match="give reduction='sum'"):
        run(loss=summed, **options)


# --- microbatch ---------------------------------------------------------------------------------------------------------


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 3, 2, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(27, 3),
    ).double()


def recurrent():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(1, 4, num_layers=2, dropout=0.4).double()
            self.out = nn.Linear(4, 3).double()

        def forward(self, x):
            return self.out(self.rnn(x.t()[:, :, None])[0][-1])  # rows on axis 1 of the layer's input

    return Recurrent()


def attentive():
    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True)
            self.enter, self.layer, self.out = nn.Linear(1, 4).double(), layer.double(), nn.Linear(4, 3).double()

        def forward(self, x):
            return self.out(self.layer(self.enter(x[:, :, None])).mean(1))

    return Attentive()


def several_outputs():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(dropout=0.3)

        def forward(self, x):
            z = self.body(x)
            return {"logits": z, "norms": (z.square().sum(1),)}

    return Several()


def on_several_outputs(outputs, targets):
    return CE(outputs["logits"], targets) + 0.1 * outputs["norms"][0].mean()


def across_rows(outputs, targets):
    """Convex, and no sum over rows: the largest of the rows' losses, smoothly."""
    rows = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return rows.logsumexp(0)


MODELS = {
    "mlp": {},
    "mlp without dropout": {"dropout": 0.0},
    "convolutions": {"model": convolutional},
    "recurrence": {"model": recurrent},
    "attention": {"model": attentive},
    "several outputs": {"model": several_outputs, "loss": on_several_outputs},
    "a loss across rows": {"loss": across_rows},
    "a sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
    "batch statistics in eval mode": {"model": lambda: normalised().eval()},
}


CHUNKS = [
    *((case, {"microbatch": 5}) for case in MODELS),
    *((case, {"microbatch": 3, "curvature_batch": 7}) for case in MODELS),
    *((case, {"microbatch": 5, "preconditioner": "jacobi"}) for case in ("mlp", "convolutions", "recurrence", "a sum")),
    *((case, {"microbatch": 1}) for case in ("mlp", "convolutions", "a loss across rows")),
]


@pytest.mark.parametrize(("case", "options"), CHUNKS, ids=str)
def test_microbatch_changes_nothing(case, options):
    settings = {**MODELS[case], "epochs": 2, "batches": 1, **options}
    assert_close(run(**settings), run(**{**settings, "microbatch": None}), 1e-8)


@pytest.mark.parametrize("microbatch", [1, 5, ROWS, 100])
def test_microbatch_bounds_the_rows_at_once(microbatch):
    model, seen = mlp(dropout=0.3), []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    optimizer = shf.SHF(model, CE, microbatch=microbatch, curvature_batch=7)
    optimizer.step(*labelled())
    seen.clear()  # the first step also looks at three rows
    optimizer.step(*labelled())
    assert max(seen) == math.ceil(ROWS / math.ceil(ROWS / microbatch)) <= microbatch  # in even chunks


def test_microbatch_with_batch_statistics_is_an_error():
    with pytest.raises(ValueError, match="microbatch=5: the model has batch statistics in 1"):
        run(model=normalised, microbatch=5)


class Centred(nn.Module):
    """Rows influence each other, through no layer that torch knows for it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3).double()

    def forward(self, x):
        z = self.layer(x)
        return z - z.mean(0)


class Scaled(nn.Module):
    """Rows influence each other by an extreme value: two of them already show what three do."""

    def __init__(self, row):
        super().__init__()
        self.layer, self.row = nn.Linear(FEATURES, 3).double(), row

    def forward(self, x):
        return self.layer(x / (x[:, 0] if self.row == "first" else -x[:, 0]).exp().amax())


@pytest.mark.parametrize("row", ["first", "second"])
def test_microbatch_where_rows_share_an_extreme_value_is_an_error(row):
    """Fails if the model is not run on a row beside itself; whichever of the two rows has the extreme value."""
    inputs, targets = labelled()
    inputs[0, 0] = inputs[:, 0].max() + 1
    with pytest.raises(ValueError, match="microbatch=5: the model has rows that influence each other"):
        shf.SHF(Scaled(row), CE, microbatch=5).step(inputs, targets)


class Trimmed(nn.Linear):
    """An output for each step, as many as the longest of the rows at hand has."""

    def forward(self, x, lengths):
        return super().forward(x[:, : int(lengths.max()), None]).movedim(2, 1)


def test_microbatch_where_chunks_have_outputs_of_other_lengths_is_an_error():
    data, lengths = labelled(), torch.tensor([1, 2, 3, 4, 2, 2, 1, 3, 1, 2, 1, 1])
    optimizer = shf.SHF(Trimmed(1, 3).double(), CE, preconditioner=None, microbatch=4)
    with pytest.raises(ValueError, match=r"shapes \[\(4, 3, 4\), \(4, 3, 3\), .* pad it to one length"):
        optimizer.step((data[0], lengths), data[1][:, None].expand(-1, 4))


def test_microbatch_where_rows_influence_each_other_is_an_error_also_after_a_single_row():
    optimizer = shf.SHF(Centred(), CE, microbatch=5)
    optimizer.step(*labelled(1))
    with pytest.raises(ValueError, match="microbatch=5: the model has rows that influence each other"):
        optimizer.step(*labelled())


def test_microbatch_where_rows_influence_each_other_is_an_error_also_if_the_first_rows_are_equal():
    inputs, targets = labelled()
    inputs[1] = inputs[0]
    with pytest.raises(ValueError, match="microbatch=5: the model has rows that influence each other"):
        shf.SHF(Centred(), CE, microbatch=5).step(inputs, targets)


@pytest.mark.parametrize("microbatch", [None, 3])
def test_a_buffer_changes_once_per_step(microbatch):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, inputs):
            self.passes += 1
            return self.layer(inputs)

    model = Counting()
    shf.SHF(model, CE, microbatch=microbatch).step(*labelled())
    assert model.passes == 1
