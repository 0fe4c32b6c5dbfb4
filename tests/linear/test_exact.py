"""Solvers that factorise, against dense float64 matrices; and the trust region that is made of them."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import shf
import worlds
from cases import CASES, without_convexity
from helpers import assert_close, identical, labelled, mlp, snapshot, theta, valued
from shf.data.batches import select_rows
from shf.data.tree import map_leaves
from shf.linear import sides
from shf.linear.roots import Roots, cholesky, gram
from shf.linear.sides import smaller_side

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
EXACT = {"cg_decay": 0.0, "preconditioner": None, "backtracking": None}


def random_roots(rows, parameters, weights=0.0, seed=0):
    source = torch.Generator().manual_seed(seed)
    R = torch.randn(rows, parameters, generator=source, dtype=torch.float64)
    r, at = torch.randn(rows, generator=source, dtype=torch.float64), torch.randn(parameters, dtype=torch.float64)
    penalty = weights * at if isinstance(weights, torch.Tensor) or weights else None
    return Roots(R, weights, r, penalty, lambda delta: R @ delta)


def solved(solver, roots, damping, start=None):
    seen = []
    even = not isinstance(roots.weights, torch.Tensor)
    system = shf.solvers.LinearSystem(
        lambda v: roots.product(v) + damping * v,
        damping,
        roots=lambda most: roots,
        size=tuple(roots.rows.shape),
        even=even,
    )
    run = shf.solvers.Run(lambda number, x, q, value=None: seen.append((x.clone(), q)))
    path = solver.solve(system, -roots.gradient(), run, start)
    return path.last, seen


MIXED = torch.tensor([0.3, 0.0, 2.0, 0.0, 0.7, 0.0, 1e-3], dtype=torch.float64)


@pytest.mark.parametrize("solver", [shf.solvers.Dense(), shf.solvers.Rows(), shf.solvers.Auto()])
@pytest.mark.parametrize("shape", [(12, 7), (7, 7), (4, 7)])
@pytest.mark.parametrize("weights", [0.0, 0.2, MIXED], ids=["none", "equal", "mixed"])
@pytest.mark.parametrize("relative", [1.0, 1e-3, 1e-6])
def test_they_agree_with_the_dense_solution(solver, shape, weights, relative):
    roots = random_roots(*shape, weights)
    B = roots.rows.t() @ roots.rows + torch.diag(torch.as_tensor(weights, dtype=torch.float64).expand(7))
    damping = relative * torch.linalg.eigvalsh(B)[-1].item()
    expected = torch.linalg.solve(B + damping * torch.eye(7, dtype=torch.float64), -roots.gradient())
    found, seen = solved(solver, roots, damping)
    assert_close(found, expected, 1e-9)
    ((delta, q),) = seen
    assert identical(delta, found)
    model = 0.5 * found @ (B @ found + damping * found) + roots.gradient() @ found
    assert q == pytest.approx(model.item(), rel=1e-10)


@pytest.mark.parametrize("solver", [shf.solvers.Dense(), shf.solvers.Rows()])
def test_from_a_start_the_damping_holds_the_solution_near_it(solver):
    """argmin ½|Rδ + r|² + ½λ|δ - s|², the momentum of SPRING."""
    roots, start = random_roots(4, 7), torch.arange(7.0, dtype=torch.float64)
    B = roots.rows.t() @ roots.rows
    expected = torch.linalg.solve(B + 0.5 * torch.eye(7, dtype=torch.float64), 0.5 * start - roots.gradient())
    assert_close(solved(solver, roots, 0.5, start.clone())[0], expected, 1e-10)


@pytest.mark.parametrize("damping", [1e-10, 1e-14, 1e-18])
def test_in_the_space_of_rows_the_damping_may_vanish(damping):
    """The solution is the shortest with Rδ = -r. Fails if a number is divided by λ alone."""
    roots = random_roots(4, 7)
    found, _ = solved(shf.solvers.Rows(), roots, damping)
    assert_close(found, -torch.linalg.pinv(roots.rows) @ roots.residual, 1e-6)
    assert torch.linalg.vector_norm(roots.rows @ found + roots.residual) < 1e-8 * torch.linalg.vector_norm(
        roots.residual
    )


@pytest.mark.parametrize("large", [False, True], ids=["eigenvectors", "factors"])
@pytest.mark.parametrize("shape", [(12, 7), (4, 7)])
@pytest.mark.parametrize("weights", [0.0, 0.2, MIXED], ids=["none", "equal", "mixed"])
def test_the_smaller_side_serves_every_damping(shape, weights, large, monkeypatch):
    """Solutions are the dense ones, and λ is found for a length."""
    monkeypatch.setattr(sides, "_LARGE", 0 if large else 100)
    roots = random_roots(*shape, weights)
    side = smaller_side(roots)
    assert isinstance(side, sides.Factors if large else sides.Eigenvectors)
    B = roots.rows.t() @ roots.rows + torch.diag(torch.as_tensor(weights, dtype=torch.float64).expand(7))
    largest = torch.linalg.eigvalsh(B)[-1].item()
    assert 0.1 * largest < side.largest <= largest * (1 + 1e-10)
    b = side.of_rows(roots.residual, roots.penalty)
    for damping in (1e-3, 1.0, 50.0):
        expected = torch.linalg.solve(B + damping * torch.eye(7, dtype=torch.float64), roots.gradient())
        assert_close(side.solve(b, damping), expected, 1e-9)
        length = expected.norm().item()
        for near in (1e-4, 1e2):
            found = side.solve(b, side.damping(b, length, near)).norm().item()
            assert found == pytest.approx(length, rel=0.11 if large else 2e-3)
    whole = side.solve(b, side.least).norm().item()
    assert side.damping(b, 2 * whole, 1.0) == side.least


def test_a_large_matrix_is_factorised_as_long_as_the_damping_is_far_above_rounding(monkeypatch):
    monkeypatch.setattr(sides, "_LARGE", 4)
    roots = random_roots(12, 7)
    least = smaller_side(roots).least
    assert isinstance(smaller_side(roots, 10 * least), sides.Factors)
    assert isinstance(smaller_side(roots, least), sides.Eigenvectors)
    monkeypatch.setattr(sides, "_LARGE", 8)
    assert isinstance(smaller_side(roots, 10 * least), sides.Eigenvectors)


def test_steps_by_factorisations_are_those_by_eigenvectors(monkeypatch):
    """But for the tenth of a length that is left open."""
    ends = []
    for large in (10_000, 1):
        monkeypatch.setattr(sides, "_LARGE", large)
        model, x, t = regression()
        optimizer = shf.SHF(model, MSE, seed=1, **shf.presets.residual)
        ends.append([optimizer.step(x, t).loss_after for _ in range(12)])
    assert ends[1][0] == pytest.approx(ends[0][0], rel=0.2)
    assert max(end[-1] for end in ends) < 1e-4 * ends[0][0]


@pytest.mark.parametrize("rows", [4, 30])
@pytest.mark.parametrize("everywhere", [True, False])
def test_the_trust_region_takes_weight_decay(rows, everywhere):
    """To the minimum of f, decay included, by rows and by parameters, on all parameters or on the weights alone."""
    model = nn.Linear(4, 3).double()
    groups = [{"params": list(model.parameters()), "weight_decay": 1e-2}] if everywhere else None
    optimizer = shf.SHF(model, MSE, groups, weight_decay=1e-2, seed=1, **shf.presets.residual)
    infos = [optimizer.step(*valued(rows)) for _ in range(4)]
    assert infos[-1].gradient_norm < 1e-9 * infos[0].gradient_norm


def test_a_matrix_that_rounding_has_cost_its_definiteness_is_factorised():
    root = cholesky(torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-16]], dtype=torch.float64))
    assert_close(root @ root.t(), torch.ones(2, 2), 1e-6)
    with pytest.raises(ValueError, match="use solver='cg'"):
        cholesky(torch.zeros(2, 2))


# --- whole steps --------------------------------------------------------------------------------------------------------


SUITABLE = [case for case in CASES if case.separable and case.handling["select"] is select_rows]


@pytest.mark.parametrize("case", SUITABLE, ids=lambda case: case.name.replace(" ", "-"))
def test_steps_are_those_of_long_cg_runs(case):
    """On the declared models and losses."""
    ends = []
    for options in ({"solver": "cg", "cg_iterations": 600}, {"solver": "dense"}, {"solver": "rows"}):
        torch.manual_seed(1)
        model = case.model().double()
        inputs, targets = (
            map_leaves(lambda t: t.double() if t.is_floating_point() else t, data) for data in case.data()
        )
        optimizer = shf.SHF(model, case.loss, seed=1, damping=0.1, line_search_steps=0, **EXACT, **options)
        with without_convexity(case):
            optimizer.step(inputs, targets)
        ends.append(theta(model))
    assert_close(ends[1], ends[0], 1e-6)
    assert_close(ends[2], ends[1], 1e-9)


@pytest.mark.parametrize("solver", ["dense", "rows", "auto", "trust-region"])
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("decay", [0.0, 1e-3])
def test_a_least_squares_problem_is_solved_in_one_full_step(solver, rows, decay):
    """λ at its floor. With 3 rows it is convex by the decay alone, or not strictly."""
    inputs, targets = valued(rows)
    model = nn.Linear(4, 3).double()
    exact = shf.presets.residual if solver == "trust-region" else {"solver": solver, "damping": 1e-15, **EXACT}
    optimizer = shf.SHF(model, MSE, [{"params": [*model.parameters()], "weight_decay": decay}], **exact)
    first = optimizer.step(inputs, targets)
    assert first.step_size == 1
    assert optimizer.step(inputs, targets).gradient_norm < 1e-8 * first.gradient_norm


def test_auto_takes_the_smaller_side_and_cg_where_neither_fits(monkeypatch):
    for rows in (3, 40):
        ends = []
        for solver in ("auto", "dense" if rows * 3 >= 51 else "rows"):
            torch.manual_seed(0)
            model = mlp()
            shf.SHF(model, MSE, solver=solver, seed=1, damping=0.1, **EXACT).step(*valued(rows))
            ends.append(theta(model))
        assert identical(*ends)
    monkeypatch.setattr("shf.linear.exact._LARGEST_SIDE", 5)
    info = shf.SHF(mlp(), MSE, solver="auto", cg_iterations=4, seed=1).step(*valued(40))
    assert info.cg_steps == 4


@pytest.mark.parametrize("solver", ["dense", "rows", "auto", "trust-region"])
@pytest.mark.parametrize("microbatch", [None, 5])
def test_chunks_of_rows_change_nothing(solver, microbatch):
    torch.manual_seed(0)
    model = mlp()
    optimizer = shf.SHF(model, CE, solver=solver, microbatch=microbatch, seed=1, **EXACT)
    info = [optimizer.step(*labelled(seed=0)) for _ in range(3)][-1]
    torch.manual_seed(0)
    whole = mlp()
    expected = shf.SHF(whole, CE, solver=solver, seed=1, **EXACT)
    for _ in range(3):
        expected.step(*labelled(seed=0))
    assert info.accepted
    assert_close(theta(model), theta(whole), 1e-8)


# --- the trust region ---------------------------------------------------------------------------------------------------


def regression(rows=60, width=12, seed=0):
    torch.manual_seed(seed)
    x = torch.rand(rows, 2, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
    return model, x, (3 * x[:, :1]).sin() * (2 * x[:, 1:]).cos()


@pytest.mark.parametrize(("rows", "width"), [(60, 8), (20, 12)], ids=["by parameters", "by rows"])
def test_the_residual_preset_goes_far_where_the_fast_one_stops(rows, width):
    ends = {}
    for name in ("residual", "fast"):
        model, x, t = regression(rows, width)
        optimizer = shf.SHF(model, MSE, seed=1, **getattr(shf.presets, name))
        infos = [optimizer.step(x, t) for _ in range(60)]
        assert all(info.loss_after <= info.loss_before for info in infos)
        ends[name] = infos[-1].loss_after
    assert ends["residual"] < 1e-7
    assert ends["residual"] < 1e-2 * ends["fast"]


def test_single_precision_ends_where_the_page_says():
    """Relative error 3e-4, 5e-4, 3e-4 of seeds 0 to 2, and 5e-16 to 1e-15 in double precision (docs/using.md)."""
    for seed in range(3):
        ends = {}
        for dtype in (torch.float32, torch.float64):
            model, x, t = regression(20, 12, seed)
            model.to(dtype)
            optimizer = shf.SHF(model, MSE, seed=1, max_rejections=None, **shf.presets.residual)
            for _ in range(60):
                optimizer.step(x.to(dtype), t.to(dtype))
            with torch.no_grad():
                ends[dtype] = ((model.double()(x) - t).norm() / t.norm()).item()
        assert 1e-5 < ends[torch.float32] < 2e-3
        assert ends[torch.float64] < 1e-12


def test_rho_of_a_step_is_at_least_the_target_unless_it_is_the_shortest():
    model, x, t = regression()
    optimizer = shf.SHF(model, MSE, seed=1, **{**shf.presets.residual, "target_ratio": 0.5})
    infos = [optimizer.step(x, t) for _ in range(25)]
    assert sum(info.reduction_ratio >= 0.45 for info in infos) > 20


def test_a_step_that_was_judged_by_f_is_not_shortened():
    """The bend adds to ∇f'δ, so that Armijo's test would fail steps with ρ above the target, down to α of 1e-3."""
    model, x, t = regression(60, 8)
    optimizer = shf.SHF(model, MSE, seed=1, **shf.presets.residual)
    infos = [optimizer.step(x, t) for _ in range(80)]
    assert all(info.step_size == 1 for info in infos)
    assert all(b.loss_before == pytest.approx(a.loss_after, rel=1e-9) for a, b in pairwise(infos))


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_first_step_has_to_keep_the_models_word_by_a_half(seed):
    """Networks of sines: at the target for later steps, the first one would go further."""

    class Sines(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(1, 6), nn.Linear(6, 1)

        def forward(self, x):
            return self.last(torch.sin(10 * self.first(x)))

    torch.manual_seed(seed)
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    optimizer = shf.SHF(Sines().double(), MSE, **shf.presets.residual)
    ratios = [optimizer.step(x, torch.sin(9 * x)).reduction_ratio for _ in range(6)]
    assert ratios[0] >= 0.5
    assert min(ratios) >= 0.1


def test_the_bend_is_the_second_derivative_of_the_outputs():
    """z(θ + hδ) = z + hJδ + h²/2 z̈: for outputs that are quadratic along the step z̈ is exact."""
    from shf.linear.trustregion import _Search

    R = torch.eye(3, dtype=torch.float64)
    curved = torch.tensor([0.1, -0.2, 0.05], dtype=torch.float64)
    roots = Roots(R, 0.0, torch.ones(3, dtype=torch.float64), None, lambda d: R @ d + 0.5 * curved * (d @ d))
    search = _Search(roots, smaller_side(roots), shf.solvers.Run(lambda *_: None, lambda d: 0.0, 1.0), 0.1)
    delta = torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64)
    found = search._bend(delta, R @ delta, 0.25)
    assert_close(found, -0.5 * curved * (delta @ delta) / 1.25, 1e-10)


def test_the_radius_is_saved_and_loaded():
    model, x, t = regression()
    optimizer = shf.SHF(model, MSE, seed=1, **shf.presets.residual)
    for _ in range(3):
        optimizer.step(x, t)
    other = copy.deepcopy(model)
    again = shf.SHF(other, MSE, seed=1, **shf.presets.residual)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, again):
        for _ in range(3):
            one.step(x, t)
    assert optimizer.param_groups[0]["shf"]["radius"] > 0
    assert identical(theta(model), theta(other))


def test_at_the_minimum_it_stops_and_changes_nothing():
    inputs, targets = valued(20)
    model = nn.Linear(4, 3).double()
    optimizer = shf.SHF(model, MSE, **shf.presets.residual)
    for _ in range(8):
        optimizer.step(inputs, targets)
    before = theta(model)
    assert optimizer.step(inputs, targets).loss_after <= optimizer.step(inputs, targets).loss_before
    assert_close(theta(model), before, 1e-6)


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["dense", "rows", "trust-region"])
@pytest.mark.parametrize(
    ("options", "loss", "words"),
    [
        ({"curvature_batch": 5}, CE, "exact solvers need all rows"),
        ({}, nn.L1Loss(), "has no curvature in the outputs: exact solvers"),
    ],
)
def test_what_cannot_be_written_out_is_refused_and_nothing_changes(solver, options, loss, words):
    data = valued() if isinstance(loss, nn.L1Loss) else labelled()
    with pytest.warns(shf.SHFWarning) if isinstance(loss, nn.L1Loss) else nullcontext():
        optimizer = shf.SHF(mlp(), loss, solver=solver, seed=1, **options)
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match=words):
            optimizer.step(*data)
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize("solver", ["dense", "rows", "trust-region"])
def test_what_would_not_fit_is_refused_before_there_is_memory_for_it(solver, monkeypatch):
    monkeypatch.setattr("shf.linear.exact.MOST_NUMBERS", 100)
    monkeypatch.setattr("shf.linear.trustregion.MOST_NUMBERS", 100)
    optimizer = shf.SHF(mlp(), CE, solver=solver, seed=1)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"J has 36 rows and 51 columns, .* use solver='cg', or fewer rows"):
        optimizer.step(*labelled())
    assert identical(snapshot(optimizer), before)


def test_the_factorised_matrix_counts_too_and_the_other_solver_is_named(monkeypatch):
    """As many parameters as J has room for may be too many for their square, and so for rows."""
    monkeypatch.setattr("shf.linear.exact.MOST_NUMBERS", 700)
    monkeypatch.setattr("shf.linear.trustregion.MOST_NUMBERS", 700)
    monkeypatch.setattr("shf.problems.batch.BatchProblem.roots", lambda *_: pytest.fail("was written out"))
    for solver, decay in (("dense", 0.0), ("trust-region", 1e-2)):  # weights decay and biases do not
        optimizer = shf.SHF(mlp(), MSE, solver=solver, weight_decay=decay, seed=1)
        before = snapshot(optimizer)
        with pytest.raises(
            ValueError, match=r"factorise has 51 rows .* GiB .* use solver='rows', which factorises 12 × 12"
        ):
            optimizer.step(*valued(4))
        assert identical(snapshot(optimizer), before)
    narrow = nn.Linear(4, 1).double()
    with pytest.raises(ValueError, match=r"has 40 rows and 40 columns, .* use solver='dense', which factorises 5 × 5"):
        shf.SHF(narrow, MSE, solver="rows", seed=1).step(valued(40)[0], valued(40)[1][:, :1])
    with pytest.raises(ValueError, match="use solver='cg', or fewer rows"):
        shf.SHF(mlp(), MSE, solver="rows", seed=1).step(*valued(40))


class Steady(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x):
        return self.outer(shf.hold_steady(self.inner(x)).tanh())


def test_structural_damping_is_refused_and_auto_takes_cg():
    for solver in ("dense", "rows", "trust-region"):
        optimizer = shf.SHF(Steady(), CE, solver=solver, structural_damping=0.1, seed=1)
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match=r"no structural damping.* use solver='cg'"):
            optimizer.step(*labelled())
        assert identical(snapshot(optimizer), before)
    info = shf.SHF(Steady(), CE, solver="auto", cg_iterations=4, structural_damping=0.1, seed=1).step(*labelled())
    assert info.cg_steps == 4


def test_batches_of_hf_are_refused():
    optimizer = shf.HF(mlp(), CE, solver=shf.solvers.Rows(), seed=1)
    with pytest.raises(ValueError, match="use solver='cg'"):
        optimizer.step([labelled(), labelled(seed=1)], labelled())


def of_two_processes(rank):
    """What the solvers say of rows that are spread over processes, and whether anything changed."""
    found = []
    for solver in ("dense", "rows", "trust-region", "auto"):
        torch.manual_seed(0)
        optimizer = shf.SHF(mlp(), CE, solver=solver, cg_iterations=4, seed=1)
        before, words = theta(optimizer.model), ""
        try:
            optimizer.step(*labelled(seed=rank))
        except (ValueError, shf.RankError) as error:
            words = str(error)
        found.append((words, bool(torch.equal(theta(optimizer.model), before))))
    return found


def test_several_processes_are_refused_and_auto_takes_cg():
    for found in worlds.run(2, of_two_processes):
        *refused, auto = found
        assert all("exact solvers need all rows in one process" in words and same for words, same in refused)
        assert auto == ("", False)


@pytest.mark.parametrize("solver", ["dense", "rows", "auto", "trust-region"])
@pytest.mark.parametrize("damping", [1e-3, 1e-15])
def test_singular_systems_are_solved(solver, damping):
    """A unit twice, an input of zeros, the same rows again, and a single one: the factorisations fail on such matrices if
    nothing is done about it."""
    model = mlp()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1], model[2].weight[:, :2] = model[0].weight[0], model[0].bias[0], 0.1
    inputs, targets = valued(6)
    inputs[:, 0] = 0
    for rows in (torch.cat([torch.arange(6)] * 4), torch.tensor([0])):
        one = copy.deepcopy(model)
        info = shf.SHF(one, MSE, solver=solver, damping=damping, seed=1, **EXACT).step(inputs[rows], targets[rows])
        assert info.loss_after <= info.loss_before
        assert theta(one).isfinite().all()


def test_a_damping_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"SHF\(damping=0\): must be a number greater than 0"):
        shf.SHF(mlp(), MSE, solver="dense", damping=0)


@pytest.mark.parametrize("solver", ["dense", "rows", "trust-region"])
@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (0, ValueError, "term 'edge' has no rows"),
        (3, shf.NonFiniteError, "term 'edge': loss MSELoss is nan .*not finite: inputs"),
    ],
)
def test_terms_without_rows_or_with_a_bad_point_are_refused(solver, rows, error, words):
    optimizer = shf.SHF(mlp(), {"inside": MSE, "edge": MSE}, seed=1, **{**shf.presets.residual, "solver": solver})
    inputs, targets = valued(6, seed=1)
    inputs[1, 2] = math.nan
    before = snapshot(optimizer)
    with pytest.raises(error, match=words):
        optimizer.step({"inside": valued(6), "edge": (inputs[:rows], targets[:rows])})
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize("solver", ["dense", "rows", "trust-region"])
def test_a_bad_point_is_an_error_and_nothing_changes(solver):
    optimizer = shf.SHF(mlp(), CE, solver=solver, seed=1)
    inputs, targets = labelled()
    inputs[3, 0] = math.nan
    before = snapshot(optimizer)
    with pytest.raises(shf.NonFiniteError, match="inputs"):
        optimizer.step(inputs, targets)
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize("rows", [3, 128, 129, 1100])
def test_half_of_the_products_are_made_and_read(rows):
    R = torch.randn(rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    whole = R @ R.t()
    assert_close(gram(R).tril(), whole.tril(), 1e-12)
    whole.diagonal().add_(1.0)
    half = gram(R)
    half.diagonal().add_(1.0)
    assert_close(torch.linalg.eigvalsh(half), torch.linalg.eigvalsh(whole), 1e-10)
    assert_close(cholesky(half), cholesky(whole), 1e-10)


@pytest.mark.parametrize("weights", [0.0, 0.2, MIXED], ids=["none", "equal", "mixed"])
def test_in_other_units_the_model_is_the_same(weights):
    units = torch.linspace(0.1, 1.0, 7, dtype=torch.float64)
    delta = torch.linspace(-1, 1, 7, dtype=torch.float64)
    plain = random_roots(12, 7, weights)
    scaled = replace(plain, rows=plain.rows.clone()).in_units(units)
    assert torch.dot(scaled.gradient(), units * delta).item() == pytest.approx(
        torch.dot(plain.gradient(), delta).item(), rel=1e-12
    )
    assert_close(scaled.product(units * delta) * units, plain.product(delta), 1e-12)
    assert_close(scaled.change(units * delta), plain.change(delta), 1e-12)


def test_the_radius_is_measured_in_fourth_roots_of_the_curvature():
    from shf.linear.trustregion import _units

    R = torch.diag(torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64))
    roots = Roots(R, 0.0, torch.ones(3, dtype=torch.float64), None, lambda d: R @ d)
    units = _units(roots)
    assert_close(units[:2], (R.square().sum(0)[:2] / 16) ** 0.25, 1e-12)
    assert 0 < units[2] < 1e-2  # a parameter without influence has a unit too
    assert _units(Roots(torch.zeros_like(R), 0.0, roots.residual, None, roots.change)) is None
