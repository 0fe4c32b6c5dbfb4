"""Martens' batch method: the same objective however the data are cut, long CG runs, its own damping."""

import copy
import math
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shf
from helpers import FEATURES, assert_close, identical, labelled, mlp, normalised, snapshot, theta, valued

CE = nn.CrossEntropyLoss()
SUM = nn.CrossEntropyLoss(reduction="sum")
LIKE_SHF = {
    "damping_factor": 0.99,
    "cg_iterations": 3,
    "cg_decay": 0.5,
    "backtracking": "all",
    "progress_tolerance": 0.0,
    "iterate_spacing": 1.0001,
}


def cut(data, *sizes):
    """The rows of a batch in several batches."""
    return list(zip(*(part.split(list(sizes)) for part in data), strict=True))


def run(batches, curvature, loss=CE, steps=3, make=mlp, **options):
    torch.manual_seed(0)
    model = make()
    optimizer = shf.HF(model, loss, seed=1, **options)
    infos = [optimizer.step(batches, curvature=curvature) for _ in range(steps)]
    return theta(model), infos


def assert_same_infos(found, expected, tolerance=1e-8):
    exact = attrgetter("chosen_iterate", "cg_steps", "cg_stop", "step_size", "accepted", "products", "evaluations")
    close = attrgetter("loss_before", "loss_after", "gradient_norm", "reduction_ratio", "damping")
    for a, b in zip(found, expected, strict=True):
        assert exact(a) == exact(b)
        assert close(a) == pytest.approx(close(b), rel=tolerance)


def test_linear_regression_is_solved_in_one_step():
    inputs, targets = valued(20)
    model = nn.Linear(FEATURES, 3, bias=False).double()
    optimizer = shf.HF(model, nn.MSELoss(), damping=1e-14, progress_tolerance=0.0)
    info = optimizer.step(cut((inputs, targets), 13, 7), curvature=(inputs, targets))
    assert_close(model.weight.detach(), torch.linalg.lstsq(inputs, targets).solution.t(), 1e-7)
    assert (info.step_size, info.reduction_ratio) == (1, pytest.approx(1))


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (7, 5), (1, 4, 2, 5)])
@pytest.mark.parametrize("loss", [CE, SUM], ids=["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"preconditioner": None}, {"microbatch": 3}], ids=str)
def test_data_may_come_in_one_batch_or_in_several(sizes, loss, options):
    data, curvature = labelled(), labelled(6, seed=1)
    options = {**LIKE_SHF, **options}  # long runs of CG magnify rounding
    whole, part = (run(b, curvature, loss, **options) for b in ([data], cut(data, *sizes)))
    assert_close(part[0], whole[0], 1e-8)
    assert_same_infos(part[1], whole[1])


@pytest.mark.parametrize("loss", [CE, SUM], ids=["mean", "sum"])
@pytest.mark.parametrize("curvature_batch", [None, 5])
def test_with_the_settings_of_shf_it_is_shf(loss, curvature_batch):
    data = labelled()
    rows = slice(curvature_batch)
    found, infos = run(cut(data, 7, 5), (data[0][rows], data[1][rows]), loss, weight_decay=0.1, **LIKE_SHF)
    torch.manual_seed(0)
    model = mlp()
    optimizer = shf.SHF(model, loss, weight_decay=0.1, curvature_batch=curvature_batch)
    expected = [optimizer.step(*data) for _ in infos]
    assert_close(found, theta(model), 1e-9)
    assert_same_infos(infos, expected)


def test_the_curvature_batch_is_where_curvature_comes_from():
    batches = cut(labelled(), 6, 6)
    ends = [run(batches, labelled(6, seed=seed), steps=1) for seed in (1, 2)]
    assert ends[0][1][0].loss_before == ends[1][1][0].loss_before
    assert ends[0][1][0].gradient_norm == ends[1][1][0].gradient_norm
    assert not torch.allclose(ends[0][0], ends[1][0])


# --- long runs of CG ----------------------------------------------------------------------------------------------------


def wide():
    return nn.Sequential(nn.Linear(FEATURES, 20), nn.Tanh(), nn.Linear(20, 3)).double()


def test_cg_stops_by_relative_progress():
    data = labelled(40)
    infos = [
        run([data], data, steps=1, make=wide, damping=1e-3, progress_tolerance=tolerance)[1][0]
        for tolerance in (5e-4, 5e-6, 5e-8)
    ]
    assert all(info.cg_stop is shf.CGStop.PROGRESS for info in infos)
    assert 10 < infos[0].cg_steps < infos[1].cg_steps < infos[2].cg_steps < 250
    limited = run([data], data, steps=1, make=wide, damping=1e-3, cg_iterations=infos[0].cg_steps - 1)[1][0]
    assert (limited.cg_steps, limited.cg_stop) == (infos[0].cg_steps - 1, shf.CGStop.ITERATIONS)


@pytest.mark.parametrize(("rule", "evaluations"), [("first-worse", None), ("all", 9), (None, 1)])
def test_iterates_are_kept_at_powers(rule, evaluations):
    kept = [1, 2, 3, 4, 5, 7, 9, 11, 12]  # the last is always there
    data = labelled(40)
    _, infos = run(
        [data], data, make=wide, steps=6, damping=1e-2, backtracking=rule, progress_tolerance=0, cg_iterations=12
    )
    for info in infos:
        assert info.cg_steps == 12
        assert info.chosen_iterate in kept
        assert evaluations is None or info.step_size < 1 or info.evaluations == evaluations
    assert any(info.step_size == 1 for info in infos)


def test_spacing_is_an_option():
    data = labelled(40)
    _, (info,) = run(
        [data], data, steps=1, make=wide, backtracking="all", iterate_spacing=2.0, cg_iterations=9, progress_tolerance=0
    )
    assert info.evaluations == 5  # 1, 2, 4, 8 and the last


def test_damping_moves_by_two_thirds():
    data = labelled()
    optimizer = shf.HF(mlp(), CE, damping=9.0)
    assert optimizer.step([data], curvature=data).reduction_ratio > 0.75
    assert optimizer.damping == pytest.approx(6.0)
    optimizer = shf.HF(mlp(), lambda z, t: CE(z, t) if z.requires_grad else CE(z, t) * math.nan, damping=6.0)
    assert optimizer.step([data], curvature=data).reduction_ratio == -math.inf
    assert optimizer.damping == pytest.approx(9.0)


def test_momentum_is_constant():
    optimizer, data = shf.HF(mlp(), CE), labelled()
    products = []
    for _ in range(4):
        assert optimizer.cg_decay == 0.95
        info = optimizer.step([data], curvature=data)
        products.append(info.products - info.cg_steps)
        optimizer.next_epoch()
    assert products == [0, 1, 1, 1]


# --- what can be iterated again -----------------------------------------------------------------------------------------


class Shelf:
    """Re-iterable, and nothing else."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize(
    "wrap",
    [list, tuple, Shelf, lambda b: DataLoader(TensorDataset(*map(torch.cat, zip(*b, strict=True))), batch_size=6)],
)
def test_whatever_can_be_iterated_again(wrap):
    batches, curvature = cut(labelled(), 6, 6), labelled(4)
    assert identical(run(wrap(batches), curvature), run(batches, curvature))


@pytest.mark.parametrize(
    "once", [iter, lambda b: (pair for pair in b), lambda b: zip(*zip(*b, strict=True), strict=True)]
)
def test_one_time_iterators_are_refused(once):
    optimizer, batches = shf.HF(mlp(), CE), cut(labelled(), 6, 6)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=r"batches is a one-time iterator \((list_iterator|generator|zip)\): expected"):
        optimizer.step(once(batches), curvature=labelled(4))
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([], r"batches is empty: expected at least one \(inputs, targets\) pair"),
        ([labelled(), labelled(0)], "batch is empty: 0 rows"),
        ([(torch.full((3, FEATURES), math.nan, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))], "is nan"),
    ],
)
def test_bad_batches_change_nothing(batches, says):
    optimizer = shf.HF(mlp(), CE)
    optimizer.step([labelled()], curvature=labelled(4))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=says):
        optimizer.step(batches, curvature=labelled(4))
    assert identical(snapshot(optimizer), before)


# --- what it shares with SHF --------------------------------------------------------------------------------------------


def test_masks_are_the_same_in_every_pass():
    """With damping this large δ is next to nothing, and every trial must see the objective that the gradient saw."""
    batches = cut(labelled(), 7, 5)
    _, infos = run(batches, labelled(4), make=lambda: mlp(dropout=0.5), damping=1e9)
    for info in infos:
        assert info.loss_after == pytest.approx(info.loss_before, rel=1e-6)
        assert info.accepted
    assert len({info.loss_before for info in infos}) == 3  # but other masks in every step


def test_the_same_seed_gives_the_same_run():
    batches = cut(labelled(), 7, 5)
    assert identical(*(run(batches, labelled(4), make=lambda: mlp(dropout=0.5)) for _ in range(2)))


def test_a_saved_run_continues_exactly():
    batches, curvature = cut(labelled(), 7, 5), labelled(4)
    optimizer = shf.HF(normalised(), CE, seed=1)
    optimizer.step(batches, curvature=curvature)
    twin = shf.HF(copy.deepcopy(optimizer.model), CE)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for o in (optimizer, twin):
        o.step(batches, curvature=curvature)
    assert identical(snapshot(optimizer), snapshot(twin))


def test_trials_do_not_move_buffers():
    model, batches = normalised(), cut(labelled(), 7, 5)
    info = shf.HF(model, CE, cg_iterations=10).step(batches, curvature=labelled(4))
    assert info.evaluations > 1
    assert model[1].num_batches_tracked.item() == 1


def test_repr_and_info():
    optimizer = shf.HF(mlp(), CE, cg_iterations=20)
    assert repr(optimizer).startswith("HF(cg_iterations=20; λ=")
    assert isinstance(optimizer.step([labelled()], curvature=labelled(4)), shf.StepInfo)


@pytest.mark.parametrize("options", [{"curvature_batch": 5}, {"curvature_rows": "strided"}, shf.presets.classifier])
def test_options_about_the_curvature_batch_are_refused(options):
    with pytest.raises(TypeError, match=r"give the curvature batch to step"):
        shf.HF(mlp(), CE, **options)


@pytest.mark.parametrize(
    ("batches", "curvature"),
    [(labelled()[0], labelled()), ([labelled()], labelled()[0]), ([(*labelled(), None)], labelled())],
)
def test_what_is_no_pair_is_refused(batches, curvature):
    optimizer = shf.HF(mlp(), CE)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=r"\(inputs, targets\), got .* not a pair"):
        optimizer.step(batches, curvature)
    assert identical(snapshot(optimizer), before)
