"""After many steps in a row that do not move: a diagnosis in words, once; the counter is part of the state."""

import copy
import dataclasses
import math
import re
import warnings

import pytest
import torch
from torch import nn

import shf
from helpers import identical, labelled, mlp, snapshot
from shf.data.batches import Batch
from shf.errors import FloorWarning
from shf.info import DampingBound, StepInfo
from shf.linear.cg import CGStop
from shf.runtime.diagnosis import describe, diagnose

CE = nn.CrossEntropyLoss()
x, t = labelled()


class Stuck(nn.Module):
    """Further from where it began than `radius`, its outputs are not finite."""

    def __init__(self, radius=0.0):
        super().__init__()
        self.body, self.radius = mlp(), radius
        self.register_buffer("origin", self.body[0].weight.detach().clone())

    def forward(self, inputs):
        far = (self.body[0].weight - self.origin).norm() > self.radius
        return self.body(inputs) + (math.nan if far else 0.0)


@pytest.mark.parametrize(
    ("model", "inputs"), [(Stuck, x), (mlp, torch.full_like(x, math.nan))], ids=["rejected", "passed over"]
)
def test_the_warning_points_at_the_users_own_line(model, inputs):
    optimizer = shf.SHF(model(), CE, max_rejections=1, nonfinite="skip")
    with pytest.warns(shf.SHFWarning) as caught:
        optimizer.step(inputs, t)
    assert caught[0].filename == __file__


def warned(optimizer, steps):
    """In which of the steps a warning came, and the last one's text."""
    found, text = [], ""
    for k in range(1, steps + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step(x, t)
        if caught:
            found.append(k)
            text = str(caught[-1].message)
            assert caught[-1].category is shf.SHFWarning
    return found, text


def test_a_diagnosis_after_so_many_rejections_and_only_then():
    """Fails if the counter is not kept, or the warning repeated at every further step."""
    found, text = warned(shf.SHF(Stuck(), CE, max_rejections=4), 9)
    assert found == [4]
    for words in (
        "4 steps in a row did not move the parameters",
        "λ = 1.03",
        "ρ = -inf",
        "gradient norm",
        "3 of 3 trials not finite",
        "12 rows",
        "inputs 12×4 float64 from",
        "targets 12 int64 from 0 to 2",
        "larger damping",
    ):
        assert words in text


def test_a_step_that_moves_begins_a_new_count():
    optimizer = shf.SHF(Stuck(), CE, max_rejections=3)
    assert warned(optimizer, 2)[0] == []
    optimizer.model.radius = math.inf
    assert optimizer.step(x, t).accepted
    optimizer.model.radius = 0.0
    optimizer.model.origin.copy_(optimizer.model.body[0].weight.detach())
    assert warned(optimizer, 4)[0] == [3]


def test_never_if_asked():
    assert warned(shf.SHF(Stuck(), CE, max_rejections=None), 60)[0] == []


def test_skipped_batches_count_and_the_data_are_named():
    optimizer = shf.SHF(mlp(), CE, nonfinite="skip", max_rejections=2)
    bad = x.clone()
    bad[3, 1] = math.nan
    optimizer.step(bad, t)
    with pytest.warns(shf.SHFWarning, match="1 not finite.*look at the data.*not finite: inputs"):
        optimizer.step(bad, t)


def test_where_warnings_are_errors_the_step_has_not_happened():
    """Fails if the warning comes after the writes."""
    optimizer = shf.SHF(Stuck(), CE, max_rejections=2)
    optimizer.step(x, t)
    before = snapshot(optimizer)
    for _ in range(2):
        with pytest.raises(shf.SHFWarning, match="2 steps in a row"):
            optimizer.step(x, t)
        assert identical(snapshot(optimizer), before)


def test_the_counter_is_part_of_the_state():
    """Fails if `rejections` is not among the scalars."""
    optimizer = shf.SHF(Stuck(), CE, max_rejections=4)
    warned(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = shf.SHF(Stuck(), CE, max_rejections=4)
    other.load_state_dict(saved)
    assert warned(other, 4)[0] == [2]


# --- the words ----------------------------------------------------------------------------------------------------------

INFO = shf.StepInfo(2.0, 2.0, 1.0, -math.inf, 3.0, 0.0, 1, 3, CGStop.ITERATIONS, False, 9, 0, 1, 3)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"gradient_norm": 0.0}, "the gradient is zero"),
        ({"gradient_norm": 1e-9}, "lost in rounding"),
        ({"failed_trials": 4}, "trial points overflow"),
        ({"cg_stop": CGStop.NON_FINITE}, "a curvature product overflows"),
        ({"cg_stop": CGStop.NON_POSITIVE_CURVATURE}, "must be convex"),
        ({"damping_bound": DampingBound.CEILING}, "λ is at its ceiling.*no step is short enough"),
        ({"reduction_ratio": 1.0}, "too short for the precision of the parameters"),
        ({}, "To try: damping=30"),
    ],
)
def test_the_advice_belongs_to_the_symptom(changes, advice):
    batch = Batch.of(x, t)
    text = diagnose(dataclasses.replace(INFO, **changes), 7, batch)
    assert re.search(advice, text)
    plain = diagnose(INFO, 7, batch)
    assert not changes or not re.search(advice, plain)


def test_a_step_too_short_for_the_precision_has_not_moved_the_parameters():
    """Fails if it counts as accepted: nobody would hear that training stands still."""
    torch.manual_seed(0)
    optimizer = shf.SHF(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), damping=1e12, max_rejections=2, seed=1)
    info = optimizer.step(*labelled(dtype=torch.float32))
    assert (info.accepted, info.step_size) == (False, 0.0)
    assert info.loss_after == info.loss_before
    with pytest.warns(shf.SHFWarning, match="too short for the precision"):
        optimizer.step(*labelled(dtype=torch.float32))


def test_a_skipped_step_says_that_nothing_moved():
    info = StepInfo.of_skipped(0.5, "the data")
    assert (info.accepted, info.step_size, info.damping, info.skipped) == (False, 0.0, 0.5, "the data")


def test_any_data_can_be_described():
    assert describe(None) == "none"
    assert describe(torch.full((3, 2), 4.0)) == "3×2 float32 all 4"
    assert describe([torch.tensor([1, 5])]) == "2 int64 from 1 to 5"
    assert describe(torch.tensor([math.nan, math.inf])) == "2 float32, 2 not finite"
    assert describe(torch.zeros(0, 3)) == "0×3 float32"
    assert describe(torch.eye(2).to_sparse_csr()) == "2×2 float32 all 1"
    assert describe(torch.tensor([True, False])) == "2 bool from 0 to 1"


def test_a_floor_that_holds_exact_steps_short_is_said_once():
    """All rows in each step, a smooth target: λ = 0.01 tr(B)/n is far too much in the end, and ρ = 1 says so in vain."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    network = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    optimizer = shf.SHF(network, nn.MSELoss(), **shf.presets.fast)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(180):
            optimizer.step(inputs, torch.sin(6 * inputs))
    assert [w.category for w in caught] == [FloorWarning]
    assert "shf.presets.residual" in str(caught[0].message)
    freed = shf.SHF(
        network, nn.MSELoss(), **{**shf.presets.fast, "damping": optimizer.param_groups[0]["shf"]["damping"]}
    )
    for _ in range(60):  # as the warning says; another one would be an error
        info = freed.step(inputs, torch.sin(6 * inputs))
    assert info.damping_bound is None


def test_on_noisy_batches_the_floor_is_not_spoken_of():
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 20, generator=source)
    classes = (inputs[:, :5] + 2 * torch.randn(1000, 5, generator=source)).argmax(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = shf.SHF(network, CE, **shf.presets.fast)
    at_floor = 0
    for _ in range(150):  # a warning would be an error
        rows = torch.randint(1000, (200,), generator=source)
        at_floor += optimizer.step(inputs[rows], classes[rows]).damping_bound is not None
    assert at_floor > 10
