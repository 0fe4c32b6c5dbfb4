"""A batch that is not finite: an error or passed over, and nothing poisoned; λ's bounds, visible when reached."""

import copy
import math

import pytest
import torch
from torch import nn

import shf
import worlds
from helpers import FEATURES, identical, labelled, mlp, normalised, snapshot, theta

CE = nn.CrossEntropyLoss()
x, t = labelled()


def spoiled(value, row=7):
    data = x.clone()
    data[row, 2] = value
    return data


def without_counters(taken):
    """What a skipped batch must leave alone: all but the number of rejections in a row."""
    taken = copy.deepcopy(taken)
    del taken["optimizer"]["param_groups"][0]["shf"]["rejections"]
    return taken


# --- skip ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, 7])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("make", [mlp, normalised])
def test_a_bad_batch_is_passed_over(make, warm, row, value):
    """Fails if `_iterate` lets the error through, writes the buffers of the bad pass, or counts its loss."""
    optimizer = shf.SHF(make(), CE, nonfinite="skip", curvature_batch=5)
    if warm:
        optimizer.step(x, t)
    before = snapshot(optimizer)
    info = optimizer.step(spoiled(value, row), t)
    assert not info.accepted
    assert info.step_size == 0
    assert info.skipped is not None
    assert "not finite: inputs" in info.skipped
    assert identical(without_counters(snapshot(optimizer)), without_counters(before))
    assert optimizer.step(x, t).skipped is None


def test_a_run_with_bad_batches_is_the_run_without_them():
    """Dropout masks too. Fails if a skipped batch counts as an iteration, from which the masks are drawn."""
    ends = []
    for bad in (False, True):
        torch.manual_seed(0)
        optimizer = shf.SHF(mlp(dropout=0.5), CE, nonfinite="skip", seed=1)
        for k in range(6):
            if bad and k % 2:
                optimizer.step(spoiled(math.nan), t)
            optimizer.step(*labelled(seed=k))
        ends.append(snapshot(optimizer))
    assert identical(*ends)


def test_raise_is_the_default_and_says_which():
    """Fails if `_pass_over` skips whatever was asked for."""
    with pytest.raises(shf.NonFiniteError, match="not finite: inputs"):
        shf.SHF(mlp(), CE).step(spoiled(math.nan), t)


def test_the_epochs_mean_objective_does_not_count_it():
    """Fails if NaN enters the sum: no later epoch could then be said to diverge."""
    optimizer = shf.SHF(mlp(), CE, nonfinite="skip")
    first = optimizer.step(x, t)
    optimizer.step(spoiled(math.nan), t)
    optimizer.next_epoch()
    assert optimizer.param_groups[0]["shf"]["last_mean_loss"] == first.loss_before


def test_other_errors_are_not_skipped():
    with pytest.raises(IndexError):
        shf.SHF(mlp(), CE, nonfinite="skip").step(x, t + 9)


def test_hf_skips_too():
    optimizer = shf.HF(mlp(), CE, nonfinite="skip", cg_iterations=3)
    batches, bad = [labelled(5, seed=1), labelled(7, seed=2)], (spoiled(math.nan), t)
    optimizer.step(batches, curvature=labelled(4))
    before = snapshot(optimizer)
    assert optimizer.step([*batches, bad], curvature=labelled(4)).skipped is not None
    assert identical(without_counters(snapshot(optimizer)), without_counters(before))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_an_objective_that_overflows_with_its_weight_decay(nonfinite):
    """Loss and its gradient are finite, the penalty is not. Fails without the check in `shf_step`: any finite trial is
    then an improvement on infinity, and is taken."""
    model = nn.Linear(FEATURES, 3)
    with torch.no_grad():
        model.weight.fill_(1e25)
    optimizer = shf.SHF(model, CE, weight_decay=1.0, nonfinite=nonfinite)
    before = snapshot(optimizer)
    if nonfinite == "raise":
        with pytest.raises(shf.NonFiniteError, match="weight decay"):
            optimizer.step(torch.zeros(6, FEATURES), t[:6])
        assert identical(snapshot(optimizer), before)
    else:
        assert optimizer.step(torch.zeros(6, FEATURES), t[:6]).skipped is not None
        assert identical(without_counters(snapshot(optimizer)), without_counters(before))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_running_statistics_are_not_poisoned(nonfinite):
    """Inputs of 10³⁰: normalised they are fine, loss and gradient are finite, but their variance is not. Fails without
    `Network.spoiled`: a running variance that is infinite once stays so."""
    optimizer = shf.SHF(normalised(torch.float32), CE, nonfinite=nonfinite)
    optimizer.step(x.float(), t)
    before = snapshot(optimizer)
    if nonfinite == "skip":
        assert "would make 1.running_var not finite" in optimizer.step(1e30 * x.float(), t).skipped
    else:
        with pytest.raises(shf.NonFiniteError, match=r"would make 1\.running_var not finite"):
            optimizer.step(1e30 * x.float(), t)
    assert identical(without_counters(snapshot(optimizer)), without_counters(before))


def test_a_buffer_that_is_not_finite_anyway_is_no_obstacle():
    model = mlp()
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    assert shf.SHF(model, CE).step(x, t).accepted


class Centred(nn.Module):
    """Rows influence each other, and no module says so."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, inputs):
        return self.body(inputs - inputs.mean(0))


def test_what_a_bad_batch_shows_of_the_model_is_not_remembered():
    """On a NaN in the first rows all outputs are NaN, as if rows did not matter. Fails if that layout is kept: the next
    batch would be cut into chunks, which have other means."""
    optimizer = shf.SHF(Centred(), CE, nonfinite="skip", microbatch=4)
    assert optimizer.step(spoiled(math.nan, row=0), t).skipped is not None
    with pytest.raises(ValueError, match="microbatch=4: the model has rows that influence each other"):
        optimizer.step(x, t)


# --- several processes --------------------------------------------------------------------------------------------------


def skip_together(rank, options):
    """A good batch, one that is bad on rank 1 alone, and a good one."""
    torch.manual_seed(0)
    model = normalised() if options.pop("buffers", False) else mlp()
    optimizer = shf.SHF(model, CE, nonfinite="skip", seed=3, **options)
    rows = slice(0, 8) if rank == 0 else slice(8, None)
    infos = [optimizer.step(x[rows], t[rows])]
    before = without_counters(snapshot(optimizer))
    infos.append(optimizer.step(spoiled(math.nan, row=9)[rows], t[rows]))
    unchanged = identical(without_counters(snapshot(optimizer)), before)
    infos.append(optimizer.step(x[rows], t[rows]))
    return unchanged, theta(model), infos


@pytest.mark.parametrize("options", [{}, {"buffers": True}, {"split_vectors": True}], ids=str)
def test_all_ranks_skip_together(options):
    """Fails if only the rank with the bad rows passes over the batch: the others end with a RankError, or wait."""
    first, second = worlds.run(2, skip_together, options)
    for unchanged, _, infos in (first, second):
        assert unchanged
        assert [info.skipped is None for info in infos] == [True, False, True]
    assert "another process" in first[2][1].skipped
    assert "not finite: inputs" in second[2][1].skipped
    assert identical(first[1], second[1])
    assert first[2][2] == second[2][2]


# --- λ at both ends -----------------------------------------------------------------------------------------------------


def test_the_floor_is_held_and_shown():
    """Fails if `shf_step` does not hold λ within its range."""
    optimizer = shf.SHF(mlp(), CE, damping=1.0, damping_min=0.97)
    infos = [optimizer.step(x, t) for _ in range(8)]
    assert infos[0].damping_bound is None
    assert infos[-1].damping_bound is shf.DampingBound.FLOOR
    assert optimizer.damping == 0.97


@pytest.mark.parametrize(("damping", "held"), [(1e-30, 0.5), (1e30, 2.0)])
def test_a_state_from_elsewhere_is_brought_within_the_range(damping, held):
    """Fails if λ is held to its range only where it moves."""
    optimizer = shf.SHF(mlp(), CE, damping_min=0.5, damping_max=2.0)
    optimizer.param_groups[0]["shf"]["damping"] = damping
    assert optimizer.step(x, t).damping == held
    assert 0.5 <= optimizer.damping <= 2.0


def test_the_ceiling_is_held_and_shown():
    """Fails if `StepInfo` is not told the bound that λ has reached."""

    class Wild(nn.Module):
        """Every trial point fails."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, 3).double()
            self.register_buffer("origin", self.layer.weight.detach().clone())

        def forward(self, inputs):
            return self.layer(inputs) + (math.nan if (self.layer.weight != self.origin).any() else 0.0)

    optimizer = shf.SHF(Wild(), CE, damping=1.0, damping_max=1.02)
    infos = [optimizer.step(x, t) for _ in range(4)]
    assert [info.damping_bound for info in infos] == [None, *[shf.DampingBound.CEILING] * 3]
    assert [info.accepted for info in infos] == [False] * 4
    assert optimizer.damping == 1.02


@pytest.mark.parametrize("damping", [1e-15, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_at_the_ends_improve_or_are_rejected(dtype, damping):
    optimizer = shf.SHF(mlp(dtype=dtype), CE, damping=damping, cg_iterations=20)
    for _ in range(3):
        info = optimizer.step(x.to(dtype), t)
        assert info.loss_after <= info.loss_before
        assert theta(optimizer.model).isfinite().all()


# --- overflow inside CG -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:loss L1Loss has no curvature")
@pytest.mark.parametrize("scale", [1e18, 1e19, 3e19, 1e25, 1e30])
def test_overflow_inside_cg_in_single_precision(scale):
    """Products and inner products beyond 3·10³⁸: the step is rejected or a good one, and parameters stay finite."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    optimizer = shf.SHF(model, nn.L1Loss() if scale > 1e19 else nn.MSELoss(), damping=1e-3)
    inputs, stops = scale * x.float(), set()
    targets = torch.zeros(len(x), 3)
    for _ in range(5):
        try:
            info = optimizer.step(inputs, targets)
        except shf.NonFiniteError:
            break
        stops.add(info.cg_stop)
        assert info.loss_after <= info.loss_before
        assert theta(model).isfinite().all()
    assert theta(model).isfinite().all()
