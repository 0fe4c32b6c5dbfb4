"""What moves from epoch to epoch: γ, β, the curvature rows, and the end of momentum."""

import pytest
import torch
from torch import nn

import shf
from helpers import identical, labelled, mlp, theta, valued
from shf.data.batches import select_rows


def optimizer_of(model=None, loss=None, **options):
    return shf.SHF(model or mlp(), loss or nn.CrossEntropyLoss(), **options)


# --- γ and β ------------------------------------------------------------------------------------------------------------


def test_gamma_grows_by_a_hundredth_up_to_its_ceiling():
    optimizer = optimizer_of()
    for epoch in range(80):
        assert optimizer.epoch_index == epoch
        assert optimizer.cg_decay == pytest.approx(min(0.5 * 1.01**epoch, 0.99), rel=1e-12)
        optimizer.next_epoch()
    assert optimizer.cg_decay == 0.99  # reached at epoch 69


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cg_decay": 0.25, "cg_decay_growth": 2.0}, [0.25, 0.5, 0.99, 0.99]),
        ({"cg_decay": 0.25, "cg_decay_growth": 2.0, "cg_decay_max": 0.75}, [0.25, 0.5, 0.75, 0.75]),
        ({"cg_decay": 0.25, "cg_decay_growth": 1.0}, [0.25] * 4),
        ({"cg_decay": 0.0}, [0.0] * 4),
        pytest.param({"cg_decay": 1.0}, [1.0, 0.99, 0.99], id="a ceiling holds from the second epoch on"),
    ],
)
def test_gamma_follows_its_options(options, expected):
    optimizer, found = optimizer_of(**options), []
    for _ in expected:
        found.append(optimizer.cg_decay)
        optimizer.next_epoch()
    assert found == expected


@pytest.mark.parametrize("c", [1.0, 0.998, 0.5])
def test_beta_decays_by_c(c):
    optimizer = optimizer_of(update_decay=c)
    for epoch in range(5):
        assert optimizer.update_scale == pytest.approx(c**epoch, rel=1e-14)
        optimizer.next_epoch()


# --- curvature rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        pytest.param(12, 4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]], id="h = 3"),
        pytest.param(10, 4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]], id="C does not divide B"),
        pytest.param(4, 4, [[], [], []], id="C = B: all rows, nothing selected"),
        pytest.param(3, 4, [[], [], []], id="a last batch smaller than C"),
    ],
)
def test_curvature_rows_cycle_with_the_epochs(rows, size, expected):
    taken = {"inputs": [], "targets": []}

    def select(data, wanted):
        if len(wanted) == size:  # the look at how the model treats rows takes two and three
            taken["targets" if data.ndim == 1 else "inputs"].append(wanted.tolist())
        return select_rows(data, wanted)

    optimizer = optimizer_of(curvature_batch=size, select=select)
    found = {"inputs": [], "targets": []}
    for _ in expected:
        for _ in range(2):  # the same rows for every batch of an epoch
            for log in taken.values():
                log.clear()
            optimizer.step(*labelled(rows))
            for name, log in taken.items():
                found[name].append(log[0] if log else [])
        optimizer.next_epoch()
    twice = [block for block in expected for _ in range(2)]
    assert found == {"inputs": twice, "targets": twice}


@pytest.mark.parametrize(("epoch", "curved"), [(0, True), (1, False), (2, True)])
def test_curvature_comes_from_those_rows_alone(epoch, curved):
    """The last four rows have no loss: where they are the curvature batch B is 0, and δ = -g/λ promises ‖g‖²/λ."""

    def loss(outputs, targets):
        value, weight = targets
        return (weight[:, None] * (outputs - value).square()).mean()

    inputs, value = valued(8)
    weight = torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64)
    optimizer = optimizer_of(loss=loss, curvature_batch=4, preconditioner=None, damping=10.0, backtracking=None)
    for _ in range(epoch):
        optimizer.next_epoch()
    info = optimizer.step(inputs, (value, weight))
    assert info.step_size == 1
    flat = (info.loss_after - info.loss_before) / (-(info.gradient_norm**2) / 10.0)
    assert (info.reduction_ratio == pytest.approx(flat, rel=1e-9)) == (not curved)


# --- the end of momentum ------------------------------------------------------------------------------------------------


def test_disable_momentum_is_for_good():
    optimizer = optimizer_of()
    optimizer.step(*labelled())
    optimizer.disable_momentum()
    for _ in range(3):
        assert optimizer.cg_decay == 0.0
        optimizer.next_epoch()
    assert optimizer.cg_decay == 0.0


def test_without_momentum_cg_starts_from_zero():
    optimizer = optimizer_of()
    cold, warm = optimizer.step(*labelled()), optimizer.step(*labelled())
    optimizer.disable_momentum()
    off = optimizer.step(*labelled())
    # A start other than zero costs one product for its residual.
    assert [info.products - info.cg_steps for info in (cold, warm, off)] == [0, 1, 0]


def test_disabled_momentum_equals_gamma_zero():
    ends = []
    for options, disable in (({"cg_decay": 0.0}, False), ({"cg_decay": 0.7}, True)):
        torch.manual_seed(0)
        optimizer = optimizer_of(**options)
        if disable:
            optimizer.disable_momentum()
        for _ in range(3):
            optimizer.step(*labelled())
        ends.append(theta(optimizer.model))
    assert identical(*ends)


UP, DOWN = 10.0, 0.1


@pytest.mark.parametrize(
    ("changes", "off_after"),
    [
        pytest.param([UP, UP], 3, id="two rises running"),
        pytest.param([UP, DOWN, UP, DOWN], None, id="never twice running"),
        pytest.param([DOWN, DOWN, DOWN], None, id="only falls"),
        pytest.param([UP, DOWN, UP, UP, DOWN], 5, id="twice running in the end, and off it stays"),
    ],
)
@pytest.mark.parametrize("watched", [True, False])
def test_momentum_goes_off_when_training_diverges(changes, off_after, watched):
    inputs, targets = valued()
    optimizer = optimizer_of(loss=nn.MSELoss(), momentum_off_on_divergence=watched)
    scale = 1e6
    for epoch, change in enumerate([1.0, *changes], start=1):
        scale *= change
        assert optimizer.cg_decay > 0 or (watched and off_after is not None and epoch > off_after)
        for batch in optimizer.epoch([(inputs, scale * targets)] * 2):
            optimizer.step(*batch)
    assert (optimizer.cg_decay == 0) == (watched and off_after is not None)


def test_divergence_is_judged_by_the_mean_over_the_epoch():
    inputs, targets = valued()
    optimizer = optimizer_of(loss=nn.MSELoss(), momentum_off_on_divergence=True)
    # The first batch's objective rises from epoch to epoch, the epochs' means fall.
    for first, second in ((1e3, 1e9), (1e4, 1e8), (1e5, 1e7)):
        for scale in (first, second):
            optimizer.step(inputs, scale * targets)
        optimizer.next_epoch()
    assert optimizer.cg_decay > 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("cuts", [(3, 6, 12), (12, 6, 3)], ids=["growing", "shrinking"])
def test_divergence_does_not_depend_on_how_an_epoch_is_cut(reduction, cuts):
    """The objective per row falls as batches grow and rises as they shrink; its sum over a batch does the reverse."""
    inputs, targets = valued()
    optimizer = optimizer_of(loss=nn.MSELoss(reduction=reduction), damping=1e9, momentum_off_on_divergence=True)
    for rows in cuts:
        for chunk in torch.arange(len(inputs)).split(rows):
            optimizer.step(inputs[chunk], 1e6 * rows**-0.25 * targets[chunk])
        optimizer.next_epoch()
    assert (optimizer.cg_decay == 0) == (cuts[0] > cuts[-1])


def test_divergence_of_the_batch_method_is_judged_per_row():
    """More data from epoch to epoch are no divergence."""
    optimizer = shf.HF(mlp(), nn.MSELoss(reduction="sum"), damping=1e9, momentum_off_on_divergence=True)
    inputs, targets = valued()
    for times in (1, 2, 4):
        data = (inputs.repeat(times, 1), 1e6 * times**-0.25 * targets.repeat(times, 1))
        optimizer.step(list(zip(*(t.chunk(2) for t in data), strict=True)), curvature=data)
        optimizer.next_epoch()
    assert optimizer.cg_decay > 0


def test_an_epoch_without_steps_neither_rises_nor_falls():
    inputs, targets = valued()
    optimizer = optimizer_of(loss=nn.MSELoss(), momentum_off_on_divergence=True)
    for scale in (1e3, 1e4, None, 1e5):
        if scale is not None:
            optimizer.step(inputs, scale * targets)
        optimizer.next_epoch()
    assert optimizer.cg_decay == 0
