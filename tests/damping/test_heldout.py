"""The rule that hears the next batch, and the initial λ: on hand-made numbers, on quadratics, and in steps."""

import math

import pytest
import torch
from torch import nn

import shf
from helpers import assert_close, identical, labelled, mlp, theta, valued
from shf.damping.heldout import HIGH, LOW, Averages, powers
from shf.preconditioners import Identity
from shf.selection import Rate

CE = nn.CrossEntropyLoss()


def heard(*verdicts):
    averages = Averages()
    for change, slope in verdicts:
        averages = averages.hear(change, slope)
    return averages


# --- the rule, in numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "direction"),
    [(0.9, 1), (0.6, 1), (HIGH + 0.01, 1), (HIGH - 0.01, 0), (LOW + 0.01, 0), (LOW - 0.01, -1), (0.0, -1), (-2.0, -1)],
)
def test_agreeing_verdicts_move_lambda_outside_of_the_balance(q, direction):
    found = powers(heard(*[(-q, -1.0)] * 5))
    assert math.copysign(1, found) * (found != 0) == direction


def test_the_further_off_the_faster():
    paces = [powers(heard(*[(-q, -1.0)] * 5)) for q in (0.45, 0.6, 0.8, 0.9, 1.0)]
    assert paces == sorted(paces)
    assert 1 <= paces[0] < 2
    assert paces[-1] == 2
    assert powers(heard(*[(5.0, -1.0)] * 5)) == -4


def test_where_the_slope_is_lost_in_noise_lambda_stays():
    assert powers(heard(*[(0.3, 1.0)] * 5)) == 0
    assert powers(heard(*[(0.3, -1.0), (0.3, 0.9)] * 6)) == 0
    assert powers(heard(*[(2.0, -1.0), (2.0, 0.9)] * 6)) == -4  # but not where steps do more harm than good
    assert powers(heard(*[(0.3, -1.0), (0.3, -0.9)] * 6)) < 0


@pytest.mark.parametrize(("harm", "rises"), [(1.1, True), (0.9, False)])
def test_a_step_that_cost_more_than_it_gained_raises_lambda_at_once(monkeypatch, harm, rises):
    """After a single verdict, of which the averages would say nothing yet."""
    optimizer = regression(damping=1.0, damping_factor=0.9)
    info = optimizer.step(*valued(seed=0))
    gain = info.loss_before - info.loss_after
    monkeypatch.setattr(
        "shf.problems.shared.SharedProblem.value", lambda self, theta: self.linearise(Identity()).value - harm * gain
    )
    found = optimizer.step(*valued(seed=1)).damping
    assert found == pytest.approx(0.9**-4 if rises else 1.0)


def test_what_is_lost_in_rounding_is_not_costly(monkeypatch):
    """A change of f's last bit, when steps have gained less than that."""
    optimizer = regression(damping=1.0, damping_factor=0.9)
    optimizer.step(*valued(seed=0))
    optimizer.param_groups[0]["shf"] |= {"heldout_unit": 1e-18}
    monkeypatch.setattr(
        "shf.problems.shared.SharedProblem.value", lambda self, theta: self.linearise(Identity()).value * (1 - 2e-16)
    )
    assert optimizer.step(*valued(seed=1)).damping == 1.0


def test_a_small_ratio_on_the_batch_itself_raises_lambda(monkeypatch):
    optimizer = regression(damping=1.0, damping_factor=0.9)
    monkeypatch.setattr("shf.algorithm.reduction_ratio", lambda *args: 0.2)
    optimizer.step(*valued())
    assert optimizer.damping == pytest.approx(1 / 0.9)
    monkeypatch.setattr("shf.algorithm.reduction_ratio", lambda *args: 1.0)
    optimizer.step(*valued())
    assert optimizer.damping == pytest.approx(1 / 0.9)


def test_fewer_than_three_verdicts_say_nothing():
    assert powers(heard(*[(-1.0, -1.0)] * 2)) == 0
    assert powers(heard(*[(-1.0, -1.0)] * 3)) > 0


def test_noise_around_the_threshold_does_not_move_lambda():
    """A mean below the threshold, but by less than its own error."""
    noisy = [(1.1, -1.0), (-1.0, -1.0), (1.2, -1.0), (-1.1, -1.0)] * 3
    averages = heard(*noisy)
    assert averages.quotient < LOW
    assert powers(averages) == 0
    assert powers(heard(*[(0.05, -1.0), (0.06, -1.0)] * 6)) < 0


def test_the_standard_error_is_that_of_weighted_means():
    torch.manual_seed(0)
    values = torch.randn(300, 40).double() + 1
    statistics = [heard(*[(v, 0.0) for v in row.tolist()]).beyond(0.0) for row in values]
    means = [heard(*[(v, 0.0) for v in row.tolist()]) for row in values]
    spread = torch.tensor([a.change / a.weight for a in means]).std().item()
    typical = torch.tensor([a.change / a.weight / t for a, t in zip(means, statistics, strict=True)]).median().item()
    assert typical == pytest.approx(spread, rel=0.2)


# --- on a quadratic -----------------------------------------------------------------------------------------------------


def averages_of(optimizer):
    scalars = optimizer.param_groups[0]["shf"]
    return Averages(**{name: scalars[f"heldout_{name}"] for name in Averages.__dataclass_fields__})


def regression(**options):
    torch.manual_seed(0)
    settings = {"damping_rule": "held-out", "preconditioner": None, "cg_decay": 0.0, "seed": 1, **options}
    return shf.SHF(nn.Linear(4, 3).double(), nn.MSELoss(), **settings)


@pytest.mark.parametrize(("damping", "expected"), [(1e-9, 0.5), (1e6, 1.0)])
def test_a_newton_step_is_one_half_and_a_tiny_one_is_one(damping, expected):
    """On the same batch, where f is quadratic: q = ½ at the minimum along the step, 1 where f is linear along it."""
    optimizer = regression(damping=damping, cg_iterations=20, damping_factor=1.0)
    for _ in range(2):
        optimizer.step(*valued())
    assert averages_of(optimizer).quotient == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("damping", "clipped"), [(3.0, False), (1e-9, True)])
def test_the_verdict_is_about_the_next_batch(damping, clipped):
    optimizer = regression(damping=damping, cg_iterations=20, damping_factor=1.0)
    first, second = valued(seed=0), valued(seed=1)
    loss = nn.MSELoss()
    before = loss(optimizer.model(second[0]), second[1]).item()
    info = optimizer.step(*first)
    after = loss(optimizer.model(second[0]), second[1]).item()
    optimizer.step(*second)
    units = (after - before) / (info.loss_before - info.loss_after)
    assert (abs(units) > 3) == clipped
    assert averages_of(optimizer).change == pytest.approx(3.0 if clipped else units)


def test_a_rejected_step_is_not_judged(monkeypatch):
    optimizer = regression()
    optimizer.step(*valued())
    assert all("moved" in entry for entry in optimizer.state.values())
    with monkeypatch.context() as patch:
        patch.setattr("shf.selection.line_search", lambda *args, **kwargs: Rate(0.0, args[1]))
        assert not optimizer.step(*valued()).accepted
    assert not any("moved" in entry for entry in optimizer.state.values())
    before = averages_of(optimizer)
    optimizer.step(*valued())
    assert averages_of(optimizer) == before


# --- in training --------------------------------------------------------------------------------------------------------


def noisy_run(rule, steps=60):
    """Batches of six rows of a regression on noise: every batch can be fitted, none helps the next."""
    torch.manual_seed(0)
    options = {"damping": 1e-3, "damping_factor": 0.9, "damping_rule": rule, "cg_iterations": 5, "seed": 1}
    optimizer = shf.SHF(nn.Linear(4, 3).double(), nn.MSELoss(), **options)
    return [optimizer.step(*valued(6, seed=k)).damping for k in range(steps)]


def test_lambda_neither_sinks_nor_rises_without_bound_where_there_is_only_noise():
    assert noisy_run("batch")[-1] < 1e-4  # ρ on the batch itself is 1 all the while
    held = noisy_run("held-out")
    assert 5e-4 < min(held) <= max(held) < 1e3


def test_nothing_is_remembered_where_the_batch_is_the_judge():
    optimizer = shf.SHF(mlp(), CE)
    optimizer.step(*labelled())
    assert all(set(entry) == {"delta"} for entry in optimizer.state.values())
    assert not [name for name in optimizer.param_groups[0]["shf"] if name.startswith("heldout")]


def test_hearing_costs_one_evaluation():
    counts = {}
    for rule in ("batch", "held-out"):
        optimizer = shf.SHF(mlp(), CE, damping_rule=rule, seed=1)
        counts[rule] = [optimizer.step(*labelled(seed=k)).evaluations for k in range(3)]
    assert [h - b for h, b in zip(counts["held-out"], counts["batch"], strict=True)] == [0, 1, 1]


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5}, {"damping": "auto"}, {"averaging": 0.9}])
def test_a_resumed_run_is_the_same_bit_by_bit(options):
    def make():
        torch.manual_seed(0)
        settings = {"damping_rule": "held-out", "damping_factor": 0.9, "seed": 3, **options}
        return shf.SHF(mlp(dropout=0.3), CE, **settings)

    def run(optimizer, begin, end):
        for k in range(begin, end):
            optimizer.step(*labelled(seed=k))
        return optimizer

    whole, first, second = run(make(), 0, 7), run(make(), 0, 4), make()
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    run(second, 4, 7)
    assert identical(second.state_dict(), whole.state_dict())
    assert torch.equal(theta(second.model), theta(whole.model))


# --- the initial λ ------------------------------------------------------------------------------------------------------


def test_the_first_damping_is_ten_mean_eigenvalues():
    model, (inputs, targets) = mlp(), labelled()
    product = shf.gauss_newton_product(model, CE, inputs, targets)
    n = len(theta(model))
    trace = sum(product(e)[i].item() for i, e in enumerate(torch.eye(n, dtype=torch.float64)))
    found = []
    for seed in range(60):
        torch.manual_seed(0)
        found.append(shf.SHF(mlp(), CE, damping="auto", seed=seed).step(inputs, targets).damping)
    mean = sum(found) / len(found)
    assert mean == pytest.approx(10 * trace / n, rel=0.2)


@pytest.mark.parametrize("rule", ["batch", "held-out"])
def test_lambda_does_not_fall_below_a_thousandth_of_the_first(monkeypatch, rule):
    """Also after the state was saved and loaded; and a floor that is asked for holds where it is higher. Fails where λ may
    fall to the settings' own floor."""
    monkeypatch.setattr("shf.algorithm.reduction_ratio", lambda *args: 1.0)
    options = {"damping": "auto", "damping_rule": rule, "damping_factor": 0.01, "seed": 1}
    optimizer, other = (shf.SHF(mlp(), CE, **options) for _ in range(2))
    first = optimizer.step(*labelled()).damping
    monkeypatch.setattr("shf.damping.heldout.HeldOut.listen", lambda self, damping, here: 0.01 * damping)
    other.load_state_dict(optimizer.state_dict())
    for one in (optimizer, other):
        infos = [one.step(*labelled(seed=k)) for k in range(6)]
        assert infos[-1].damping == pytest.approx(first / 1000)
        assert infos[-1].damping_bound is shf.DampingBound.FLOOR
    higher = shf.SHF(mlp(), CE, damping_min=first / 10, **options)
    assert min(higher.step(*labelled(seed=k)).damping for k in range(6)) == pytest.approx(first / 10)


def test_the_scale_of_the_loss_does_not_matter():
    """f and 1000 f have the same steps when λ is found by itself."""
    ends = []
    for scale in (1.0, 1000.0):
        torch.manual_seed(0)
        model = mlp()
        optimizer = shf.SHF(model, lambda z, t, s=scale: s * CE(z, t), damping="auto", preconditioner=None, seed=1)
        for k in range(4):
            optimizer.step(*labelled(seed=k))
        ends.append(theta(model))
    assert_close(*ends, 1e-8)


def test_what_the_first_damping_costs_is_counted():
    counts = {}
    for damping in ("auto", 1.0):
        optimizer = shf.SHF(mlp(), CE, damping=damping, noise_every=2, seed=1)
        infos = [optimizer.step(*labelled(seed=k)) for k in range(2)]
        counts[damping] = [(info.gradients, info.products) for info in infos]
    (first, second), (plain, _) = counts["auto"], counts[1.0]
    assert first == (plain[0], plain[1] + 3)  # three outputs: three products; the gradient's own pass serves
    assert second == counts[1.0][1]


def test_before_the_first_step_there_is_no_damping_yet():
    optimizer = shf.SHF(mlp(), CE, damping="auto")
    assert math.isnan(optimizer.damping)
    optimizer.step(*labelled())
    assert optimizer.damping > 0


def test_a_batch_without_curvature_does_not_choose_the_first_damping():
    """Fails if λ begins at 1 and without a floor because all targets of the first batch are ignored."""
    inputs, targets = labelled()

    silent = torch.full_like(targets, CE.ignore_index)
    summed = nn.CrossEntropyLoss(reduction="sum")

    def damping(*batches):
        torch.manual_seed(0)
        optimizer = shf.SHF(mlp(), lambda z, t: 1e-6 * summed(z, t), reduction="sum", damping="auto", seed=1)
        found = [optimizer.step(inputs, t).damping for t in batches]
        return found[-1], optimizer.param_groups[0]["shf"]["damping_floor"]

    (after, floor), (expected, _) = damping(silent, silent, targets), damping(targets)
    assert after == pytest.approx(expected, rel=0.5)
    assert floor == pytest.approx(after / 1000)


@pytest.mark.filterwarnings("ignore:loss .* has no curvature")
def test_a_loss_without_curvature_is_not_looked_at_for_ever():
    optimizer = shf.SHF(nn.Linear(4, 3).double(), nn.L1Loss(), damping="auto", seed=1)
    infos = [optimizer.step(*valued(seed=k)) for k in range(12)]
    assert [info.products - info.cg_steps for info in infos] == [3] + [4] * 9 + [1] * 2
    assert infos[5].damping != 1.0  # it moves by ρ meanwhile


@pytest.mark.parametrize(
    "name", ["damping_rule", "cg_worth", "cg_noise", "cg_survival", "noise_every", "curvature_batch", "factor_every"]
)
def test_the_batch_method_does_not_have_it(name):
    with pytest.raises(TypeError, match=rf"HF\(\) has no option '{name}'"):
        shf.HF(mlp(), CE, **{name: None})


def test_the_batch_method_finds_its_first_damping_too():
    optimizer = shf.HF(mlp(), CE, damping="auto", seed=1)
    info = optimizer.step([labelled()], curvature=labelled())
    assert info.accepted
    assert info.damping == pytest.approx(1000 * optimizer.param_groups[0]["shf"]["damping_floor"])


def test_with_one_output_the_first_damping_hangs_little_on_chance():
    """A single probe's spread is hundreds of times wider."""
    inputs, targets = labelled(60)[0], (labelled(60)[1] > 0).double()
    found = []
    for seed in range(30):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 1), nn.Flatten(0)).double()
        optimizer = shf.SHF(model, nn.BCEWithLogitsLoss(), damping="auto", seed=seed)
        info = optimizer.step(inputs, targets)
        found.append(info.damping)
    assert max(found) < 10 * min(found)
    again = shf.SHF(model, nn.BCEWithLogitsLoss(), seed=seed).step(inputs, targets)
    assert info.products - info.cg_steps == again.products - again.cg_steps + 8


def test_a_step_is_not_judged_after_its_parameters_were_frozen():
    optimizer = shf.SHF(mlp(), CE, damping_rule="held-out", seed=1)
    first = optimizer.model[0].weight
    optimizer.step(*labelled())
    assert "moved" in optimizer.state[first]
    first.requires_grad_(False)
    optimizer.step(*labelled(seed=1))
    assert "moved" not in optimizer.state[first]
