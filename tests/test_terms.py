"""Objectives made of terms: the sum against dense matrices, what each term has of its own, and what is refused."""

import copy
import math

import pytest
import torch
from torch import nn

import shf
from helpers import assert_close, identical, snapshot, theta
from shf.distributed.collective import SINGLE, Share
from shf.problems.shared import SharedProblem

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
MSE = nn.MSELoss()
SEED, DECAY = 3, 0.01


def laplacian(model, x):
    """By backward passes within one another, without a word of enable_grad."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    parts = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(parts).sum(0)[:, None]


def laplacian_by_func(model, x):
    def at(point):
        return torch.func.hessian(lambda p: model(p)[0])(point).diagonal().sum()

    return torch.func.vmap(at)(x)[:, None]


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)]
    if dropout:
        layers.insert(4, nn.Dropout(dropout))
    return nn.Sequential(*layers).double()


def terms(forward=laplacian):
    return {
        "interior": shf.Term(MSE, forward=forward),
        "boundary": shf.Term(MSE, weight=100.0),
        "data": shf.Term(nn.HuberLoss(reduction="sum"), weight=0.5),
    }


def batches(seed=0):
    """Of 9, 6 and 5 rows."""
    source = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=source, dtype=torch.float64)  # noqa: E731
    return {name: (draw(rows, 2), draw(rows, 1)) for name, rows in (("interior", 9), ("boundary", 6), ("data", 5))}


def optimizer_of(model, objective=None, **options):
    return shf.SHF(
        model, terms() if objective is None else objective, **{"weight_decay": DECAY, "seed": SEED, **options}
    )


def problem_of(optimizer, data):
    """The problem of a step, as Algorithm 1 meets it."""
    objective, groups = optimizer._objective, optimizer.param_groups
    pieces = objective.pieces(data, None, groups, SINGLE)
    rows = [piece.batch.rows for piece in pieces]
    parts = [optimizer._part(p, Share(0, n, n), k) for k, (p, n) in enumerate(zip(pieces, rows, strict=True))]
    return SharedProblem(objective.joined(parts), objective.decay(pieces[0].network, groups))


def flat(grads, model):
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(grads, model.parameters(), strict=True)]
    ).detach()


class Dense:
    """L, ∇L, B and the diagonal of one term of weight 1, from torch alone."""

    def __init__(self, model, term, pair, rows=None):
        x, t = pair if rows is None else (pair[0][rows], pair[1][rows])
        forward = term.forward or (lambda model, x: model(x))
        z, by = forward(model, x.clone()), list(model.parameters())
        grad = lambda y: torch.autograd.grad(y, by, retain_graph=True, allow_unused=True)  # noqa: E731
        self.value = term.loss(z, t).item()
        self.gradient = flat(grad(term.loss(z, t)), model)
        J = torch.stack([flat(grad(e), model) for e in z.reshape(-1)])
        H = torch.autograd.functional.hessian(lambda v: term.loss(v.view_as(t), t), z.detach().reshape(-1))
        mean = term.loss.reduction == "mean"
        self.matrix = J.T @ H @ J * (1 if mean else len(pair[0]) / len(x))
        each = torch.stack([flat(grad(term.loss(z[j], t[j])), model).square() for j in range(len(x))])
        self.diagonal = each.mean(0) if mean else each.sum(0)


def decay_of(model):
    return torch.cat(
        [torch.full_like(p.detach().reshape(-1), DECAY if p.ndim > 1 else 0.0) for p in model.parameters()]
    )


# --- the sum ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", [laplacian, laplacian_by_func])
@pytest.mark.parametrize("options", [{}, {"microbatch": 4}, {"curvature_batch": 4}], ids=str)
def test_value_gradient_products_and_diagonal(forward, options):
    """Fails if a term's weight is left out of any of them, or if terms share the rows of the curvature batch."""
    model, objective, data = network(), terms(forward), batches()
    optimizer = optimizer_of(model, objective, **options)
    optimizer.next_epoch()
    problem, w = problem_of(optimizer, data), decay_of(model)
    point = theta(model)
    dense = {name: Dense(model, term, data[name]) for name, term in objective.items()}
    total = lambda what: sum(objective[name].weight * getattr(d, what) for name, d in dense.items())  # noqa: E731
    found = problem.linearise(shf.preconditioners.EmpiricalFisher(exponent=1.0))
    assert found.value == pytest.approx(total("value") + 0.5 * (w * point * point).sum().item(), rel=1e-12)
    assert found.terms == pytest.approx({n: objective[n].weight * d.value for n, d in dense.items()}, rel=1e-12)
    assert_close(found.gradient, total("gradient") + w * point)
    precondition = found.precondition(0.1)
    assert_close(precondition(torch.ones_like(point)), 1 / (total("diagonal") + 0.1 + w))

    size = options.get("curvature_batch")
    if size:  # of epoch 1
        rows = {n: (size + torch.arange(size)) % len(x) for n, (x, _) in data.items()}
        dense = {n: Dense(model, term, data[n], rows[n]) for n, term in objective.items()}
    B = total("matrix") + torch.diag(w + 0.1)
    system = problem.system(0.1)
    assert_close(torch.stack([system.product(e).clone() for e in torch.eye(len(point)).double()]), B)
    v = torch.linspace(-1, 1, len(point), dtype=torch.float64)
    assert system.quadratic(v) == pytest.approx((v @ B @ v).item(), rel=1e-12)
    assert system.share == (1 if size is None else 12 / 20)
    assert problem.value(point) == pytest.approx(found.value, rel=1e-12)


def test_jacobis_diagonal_is_weighted_too():
    model, data = network(), batches()
    heavy = {name: (2.0 if name == "boundary" else 1.0) for name in data}
    both = [
        problem_of(optimizer_of(model, {n: shf.Term(MSE, weight=k * heavy[n]) for n in data}), data).part
        for k in (1.0, 3.0)
    ]
    one, three = (part.linearise(shf.preconditioners.Jacobi()).diagonal for part in both)
    assert_close(three, 3 * one)


def test_a_parameter_that_a_term_does_not_use_has_zeros_there():
    """A Laplacian knows nothing of the last bias."""
    model, data = network(), batches()
    part, _ = problem_of(optimizer_of(model), data).part.parts[0]
    found = part.linearise(shf.preconditioners.EmpiricalFisher())
    assert found.gradient[-1] == found.diagonal[-1] == 0
    assert found.gradient[:-1].all()
    assert part.curvature()(torch.ones_like(found.gradient))[-1] == 0
    info = optimizer_of(model).step(data)
    assert info.accepted


def test_the_gradients_noise_is_that_of_the_sum():
    model = network()
    data = {name: (x[:4], t[:4]) for name, (x, t) in batches().items()}
    problem = problem_of(optimizer_of(model, noise_every=1, weight_decay=0.0), data)
    found = problem.linearise(shf.preconditioners.Identity())
    halves = []
    for rows in (slice(0, 2), slice(2, 4)):
        dense = {n: Dense(model, term, (data[n][0][rows], data[n][1][rows])) for n, term in terms().items()}
        share = {n: 1 if term.loss.reduction == "sum" else 0.5 for n, term in terms().items()}
        halves.append(sum(term.weight * share[n] * dense[n].gradient for n, term in terms().items()))
    difference, gradient = halves[0] - halves[1], halves[0] + halves[1]
    assert found.noise == pytest.approx((difference.square().sum() / gradient.square().sum()).item(), rel=1e-10)


def test_structural_damping_is_weighted_as_the_terms_are():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), Held(), nn.Linear(3, 1)).double()
    data = {name: pair for name, pair in batches().items() if name != "interior"}
    optimizer = optimizer_of(model, {name: terms()[name] for name in data}, structural_damping=0.3)
    problem, n = problem_of(optimizer, data), len(theta(model))
    problem.linearise(shf.preconditioners.Identity())
    S = 0
    for name, (x, _) in data.items():
        h = model[:3](x).reshape(-1)
        grads = [torch.autograd.grad(e, list(model.parameters()), retain_graph=True, allow_unused=True) for e in h]
        J = torch.stack([flat(g, model) for g in grads])
        S = S + terms()[name].weight * J.T @ J / len(x)
    v = torch.linspace(-1, 1, n, dtype=torch.float64)
    bare, damped = (problem.system(lam) for lam in (0.0, 2.0))
    difference = damped.product(v).clone() - bare.product(v) - 2.0 * v
    assert_close(difference, 2.0 * 0.3 * S @ v, 1e-9)
    assert damped.structural(v) == pytest.approx(0.5 * 2.0 * 0.3 * (v @ S @ v).item(), rel=1e-10)


class Held(nn.Module):
    def forward(self, h):
        return shf.hold_steady(h)


# --- steps --------------------------------------------------------------------------------------------------------------


def run(objective, data, steps=3, dropout=0.0, **options):
    model = network(dropout)
    optimizer = optimizer_of(model, objective, **options)
    infos = [optimizer.step(*data) for _ in range(steps)]
    return theta(model), infos


@pytest.mark.parametrize("options", [{}, {"preconditioner": "jacobi", "curvature_batch": 3}], ids=str)
def test_one_term_is_the_plain_loss(options):
    pair = batches()["boundary"]
    alone = run({"only": MSE}, ({"only": pair},), dropout=0.5, **options)
    plain = run(MSE, pair, dropout=0.5, **options)
    assert identical(alone[0], plain[0])
    assert [info.loss_before for info in alone[1]] == [info.loss_before for info in plain[1]]
    assert all(info.terms is None for info in plain[1])


def test_a_step_says_what_each_term_has():
    model, data = network(), batches()
    before = copy.deepcopy(model)
    info = optimizer_of(model).step({name: data[name] for name in reversed(data)})
    dense = {name: term.weight * Dense(before, term, data[name]).value for name, term in terms().items()}
    assert list(info.terms) == ["interior", "boundary", "data"]
    assert info.terms == pytest.approx(dense, rel=1e-12)
    penalty = 0.5 * (decay_of(before) * theta(before).square()).sum().item()
    assert info.loss_before == pytest.approx(sum(info.terms.values()) + penalty, rel=1e-12)


def test_the_order_in_which_terms_are_given_to_a_step_does_not_matter():
    data = batches()
    found = [run(None, (d,), dropout=0.5) for d in (data, {name: data[name] for name in reversed(data)})]
    assert identical(*(f[0] for f in found))


def test_each_term_has_its_own_draws_the_same_in_every_evaluation():
    """Fails if terms share the seed of their masks, or if a mask is drawn anew in a trial."""
    pair = batches()["interior"]
    objective, data = {"a": MSE, "b": MSE}, {"a": pair, "b": pair}
    _, infos = run(objective, (data,), dropout=0.5, damping=1e9)
    for info in infos:
        assert info.terms["a"] != info.terms["b"]
        assert info.loss_after == pytest.approx(info.loss_before, rel=1e-6)
    assert len({info.loss_before for info in infos}) == 3


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_microbatches_change_nothing(dropout):
    found = [run(None, (batches(),), dropout=dropout, microbatch=size) for size in (None, 4, 1)]
    for other in found[1:]:
        assert_close(other[0], found[0][0], 1e-9)


@pytest.mark.parametrize("options", [{}, {"damping_rule": "held-out"}, {"damping": "auto", "averaging": 0.9}], ids=str)
def test_a_saved_run_continues_bitwise(options):
    optimizer = optimizer_of(network(0.5), curvature_batch=4, **options)
    optimizer.step(batches(0))
    twin = optimizer_of(copy.deepcopy(optimizer.model), curvature_batch=4, **options)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    for o in (optimizer, twin, copied):
        o.next_epoch()
        o.step(batches(1))
    assert identical(snapshot(optimizer), snapshot(twin))
    assert identical(snapshot(optimizer), snapshot(copied))


def test_buffers_are_those_of_the_first_term():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    expected, data = copy.deepcopy(model), batches()
    data = {name: data[name] for name in ("boundary", "data")}
    shf.SHF(model, {"boundary": MSE, "data": MSE}, preconditioner=None).step(data)
    expected(data["boundary"][0])
    assert model[1].num_batches_tracked == 1
    assert_close(model[1].running_mean, expected[1].running_mean)


@pytest.mark.parametrize(
    ("forward", "steps", "loss", "error"), [(laplacian, 20, 1e-3, 0.05), (laplacian_by_func, 10, 0.1, 0.5)]
)
def test_poissons_equation_is_solved(forward, steps, loss, error):
    """-Δu = 2π² sin πx sin πy, u = 0 on the boundary of the unit square."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    objective = {"interior": shf.Term(MSE, forward=forward), "boundary": shf.Term(MSE, weight=100.0)}
    optimizer = shf.SHF(model, objective, preconditioner=None, cg_iterations=50, damping_factor=2 / 3, seed=0)
    solution = lambda x: torch.sin(math.pi * x).prod(1, keepdim=True)  # noqa: E731
    grid = torch.cartesian_prod(*2 * [torch.linspace(0.05, 0.95, 8, dtype=torch.float64)])
    side = torch.linspace(0, 1, 8, dtype=torch.float64)
    walls = [torch.stack(pair, 1) for c in (0.0, 1.0) for pair in ((side, side * 0 + c), (side * 0 + c, side))]
    boundary = torch.cat(walls)
    data = {"interior": (grid, -2 * math.pi**2 * solution(grid)), "boundary": (boundary, torch.zeros(32, 1).double())}
    infos = [optimizer.step(data) for _ in range(steps)]
    assert infos[-1].loss_after < loss * infos[0].loss_before
    with torch.no_grad():
        assert (model(grid) - solution(grid)).norm() < error * solution(grid).norm()


# --- what is refused ----------------------------------------------------------------------------------------------------

X, T = torch.rand(4, 2, dtype=torch.float64), torch.rand(4, 1, dtype=torch.float64)
PAIR = (X, T)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((X, T), TypeError, r"step got inputs and targets, but .* of terms: expected step\(\{'a': \(inputs, targets\)"),
        ((X,), TypeError, r"step got a Tensor, but .* expected step\(\{'a'"),
        ((lambda: 0,), TypeError, "step got a closure that returns int"),
        (([PAIR, PAIR],), TypeError, "step got a list, but"),
        (({"a": PAIR},), ValueError, r"the mapping lacks 'b': expected step\(\{'a': .*, 'b'.*another optimizer"),
        (({"a": PAIR, "b": PAIR, "c": PAIR},), ValueError, r"the mapping has 'c', which is no term: expected step\("),
        (({"a": PAIR, "B": PAIR},), ValueError, "lacks 'b' and has 'B', which is no term"),
        (({},), ValueError, "the mapping lacks 'a', 'b'"),
        (({"a": PAIR, "b": X},), TypeError, r"term 'b' is a Tensor: expected \(inputs, targets\); \(inputs, None\) where"),
        (({"a": PAIR, "b": (X, T, T)},), TypeError, r"term 'b' is 3 things: expected \(inputs, targets\)"),
        (({"a": PAIR, "b": (X[:0], T[:0])},), ValueError, "term 'b' has no rows, expected at least 1; an optimizer"),
        (({"a": (X[:0], T[:0]), "b": PAIR},), ValueError, "term 'a' has no rows"),
        (({"a": PAIR, "b": (X, T[:3])},), ValueError, "inputs have 4 rows but targets have 3.*\nin term 'b'"),
        (({"a": PAIR, "b": (X[:, :1], T)},), RuntimeError, "shapes cannot be multiplied.*\nin term 'b'"),
        (({"a": (X * math.nan, T), "b": PAIR},), shf.NonFiniteError, r"term 'a': loss MSELoss is nan .*not finite: inputs"),
        (({"a": PAIR, "b": (X, T.where(T < 1, 0) / 0)},), shf.NonFiniteError, "term 'b': loss MSELoss is inf"),
    ],
)  # fmt: skip
def test_what_is_no_batch_of_the_terms_changes_nothing(arguments, error, says):
    optimizer = optimizer_of(network(), {"a": MSE, "b": shf.Term(MSE, weight=2.0)})
    optimizer.step({"a": PAIR, "b": PAIR})
    before = snapshot(optimizer)
    with pytest.raises(error, match=says):
        optimizer.step(*arguments)
    assert identical(snapshot(optimizer), before)


def test_a_mapping_to_an_optimizer_with_one_loss():
    optimizer = shf.SHF(network(), MSE)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=r"mapping of pairs \('a', 'b'\).* one loss, MSELoss: .* in place of the loss"):
        optimizer.step({"a": PAIR, "b": PAIR})
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda m: shf.SHF(m, {}), ValueError, r"SHF\(loss=\{\}\): a mapping without terms; expected name → shf.Term"),
        (lambda m: shf.SHF(m, {"a": 3}), TypeError, "term 'a' is a int: expected a shf.Term, or a loss"),
        (lambda m: shf.SHF(m, {0: MSE}), TypeError, "a term is named 0: expected a string"),
        (lambda m: shf.SHF(m, {"a": MSE}, reduction="sum"), ValueError, r"each term has its own; give shf.Term\(loss, red"),
        (lambda m: shf.SHF(m, {"a": MSE}, preconditioner="kronecker"), ValueError,
         r"preconditioner='kronecker'\): it is made in one pass over one batch.* use preconditioner='empirical-fisher'"),
        (lambda m: shf.SHF(m, {"a": MSE}, **shf.presets.fast), ValueError, "preconditioner='kronecker'"),
        (lambda m: shf.HF(m, {"a": MSE}), TypeError, "several terms is for shf.SHF; HF takes one loss"),
        (lambda m: shf.Term(MSE, weight=0.0), ValueError, r"Term\(weight=0.0\): must be a number greater than 0"),
        (lambda m: shf.Term(MSE, weight=-1.0), ValueError, "greater than 0"),
        (lambda m: shf.Term(MSE, weight=math.inf), ValueError, "greater than 0"),
        (lambda m: shf.Term(MSE, weight=True), ValueError, "greater than 0"),
        (lambda m: shf.Term(MSE, forward=3), TypeError, r"forward=3\): expected a callable forward\(model, inputs\)"),
        (lambda m: shf.Term(3), TypeError, "expected a callable loss"),
        (lambda m: shf.Term(MSE, reduction="sum"), ValueError, "contradicts the loss object's own"),
    ],
)  # fmt: skip
def test_what_is_no_objective_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make(network())


def test_a_loss_that_adds_up_names_its_term():
    optimizer = optimizer_of(network(), {"a": MSE, "b": lambda z, t: (z - t).square().sum()})
    with pytest.raises(ValueError, match=r"adds up the rows of a batch.* give reduction='sum'\nin term 'b'"):
        optimizer.step({"a": PAIR, "b": PAIR})


def test_a_batch_that_is_not_finite_is_passed_over():
    optimizer = optimizer_of(network(), nonfinite="skip")
    data = batches()
    before = snapshot(optimizer)
    info = optimizer.step({**data, "boundary": (data["boundary"][0] * math.nan, data["boundary"][1])})
    assert info.skipped.startswith("term 'boundary': loss MSELoss is nan")
    assert info.terms is None
    assert identical(snapshot(optimizer)["model"], before["model"])
    assert optimizer.step(data).accepted


def test_rejected_steps_are_described():
    optimizer = optimizer_of(network(), {"a": MSE, "b": MSE}, max_rejections=1, weight_decay=0.0)
    constant = (X, network()(X).detach())
    with pytest.warns(shf.SHFWarning, match="The batch: 8 rows; inputs 4×2 float64 from .*, 4×2 float64"):
        optimizer.step({"a": constant, "b": constant})


def test_the_optimizers_forward_is_the_terms_default():
    pair, tripled = batches()["data"], shf.Term(MSE, forward=lambda model, x: 3 * model(x))
    doubled = shf.SHF(network(), {"a": MSE, "b": tripled}, forward=lambda model, x: 2 * model(x), seed=0)
    info = doubled.step({"a": pair, "b": pair})
    z = network()(pair[0])
    assert info.terms == pytest.approx({"a": MSE(2 * z, pair[1]).item(), "b": MSE(3 * z, pair[1]).item()})
    assert {name: loss.name for name, loss in doubled.loss.items()} == {"a": "MSELoss", "b": "MSELoss"}


@pytest.mark.parametrize("solver", ["dense", "rows"])
def test_exact_solvers_solve_for_the_sum(solver):
    """As long CG runs do, weights and all."""
    x, t = torch.rand(9, 2, dtype=torch.float64), torch.rand(9, 1, dtype=torch.float64)
    ends = []
    for options in ({"solver": "cg", "cg_iterations": 300, "backtracking": None}, {"solver": solver}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        terms = {"a": shf.Term(nn.MSELoss(), weight=3.0), "b": shf.Term(nn.MSELoss(), forward=lambda m, x: 2 * m(x))}
        optimizer = shf.SHF(model, terms, seed=1, damping=0.05, preconditioner=None, cg_decay=0.0, **options)
        info = optimizer.step({"a": (x, t), "b": (x[:4], t[:4])})
        assert info.terms is not None
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-7, atol=1e-9)


def test_the_residual_preset_solves_a_poisson_problem():
    """-Δu = 2π²u on the square, inside and on the boundary."""

    def laplacian(model, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i : i + 1] for i in range(2))

    torch.manual_seed(0)
    u = lambda x: (math.pi * x[:, :1]).sin() * (math.pi * x[:, 1:]).sin()  # noqa: E731
    inside, side = torch.rand(80, 2, dtype=torch.float64), torch.rand(32, 2, dtype=torch.float64)
    side[::2, 0], side[1::2, 1] = side[::2, 0].round(), side[1::2, 1].round()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    terms = {"inside": shf.Term(nn.MSELoss(), forward=laplacian), "boundary": shf.Term(nn.MSELoss())}
    optimizer = shf.SHF(model, terms, seed=1, **shf.presets.residual)
    batch = {"inside": (inside, -2 * math.pi**2 * u(inside)), "boundary": (side, u(side))}
    for _ in range(40):
        info = optimizer.step(batch)
    assert info.loss_after < 1e-4
    test = torch.rand(200, 2, dtype=torch.float64)
    with torch.no_grad():
        assert (model(test) - u(test)).square().mean().sqrt() < 0.05
