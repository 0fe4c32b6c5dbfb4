"""Losses that are convex in the outputs only in places: what stands for L'', in every way that a step is made.

Products, solvers and gradients of each family are checked against dense matrices by its line in tests/cases.py.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shf
import worlds
from cases import CASES, cauchy, contrastive, cosine, focal, gaussian, mixture, positive
from helpers import assert_close, identical, mlp, snapshot, theta, valued
from shf.hessian.expansion import LossExpansion
from shf.losses import Loss

PLACES = [case for case in CASES if case.stands_in is not None]
each_family = pytest.mark.parametrize("case", PLACES, ids=lambda case: case.name.replace(" ", "-"))
ignored = pytest.mark.filterwarnings("ignore::shf.NonConvexLossWarning")


def of(case, rows=18):
    """A network of that case's, and its data for so many rows, in double precision."""
    torch.manual_seed(1)
    model = case.model().double()
    parts = [case.data() for _ in range(rows // 6)]
    inputs, targets = (torch.cat([part[k] for part in parts]) for k in (0, 1))
    return model, inputs.double(), targets.double() if targets.is_floating_point() else targets


def dense(loss, z, t):
    """L'' over all entries of the outputs, one after the other."""
    sizes = [u.numel() for u in z]

    def flat(x):
        return loss([part.view_as(u) for part, u in zip(x.split(sizes), z, strict=True)], t)

    return torch.autograd.functional.hessian(flat, torch.cat([u.reshape(-1) for u in z]))


def columns(function, z):
    """A linear map of tensors like the outputs as a matrix."""
    sizes, found = [u.numel() for u in z], []
    for e in torch.eye(sum(sizes), dtype=torch.float64):
        pieces = [part.view_as(u) for part, u in zip(e.split(sizes), z, strict=True)]
        found.append(torch.cat([u.reshape(-1) for u in function(pieces)]))
    return torch.stack(found, 1)


# --- training -----------------------------------------------------------------------------------------------------------


@ignored
@each_family
@pytest.mark.parametrize("preset", ["paper", "fast", "residual"])
def test_no_step_fails_and_the_objective_falls(case, preset):
    model, x, t = of(case)
    optimizer = shf.SHF(model, case.loss, seed=1, **getattr(shf.presets, preset, {}))
    infos = [optimizer.step(x, t) for _ in range(8)]
    assert sum(info.accepted for info in infos) > 6
    assert infos[-1].loss_after < infos[0].loss_before - 0.01 * abs(infos[0].loss_before)


@ignored
@pytest.mark.parametrize("case", [case for case in PLACES if case.stands_in is positive], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "options",
    [
        {"curvature_batch": 7},
        {"microbatch": 8},
        {"preconditioner": "jacobi"},
        {"preconditioner": "kronecker", "microbatch": 8, "curvature_batch": 7},
        {"averaging": 0.9},
        {"solver": "auto", "preconditioner": None},
    ],
    ids=str,
)
def test_with_every_part_that_looks_at_curvature(case, options):
    model, x, t = of(case)
    optimizer = shf.SHF(model, case.loss, seed=1, **options)
    infos = [optimizer.step(x, t) for _ in range(4)]
    assert infos[-1].loss_after < infos[0].loss_before
    with optimizer.averaged() if "averaging" in options else torch.no_grad():
        assert theta(model).isfinite().all()


@ignored
@pytest.mark.parametrize("solver", ["cg", "dense"])
def test_terms_add_what_stands_for_each(solver):
    """B = Σ w_k J'P+(L_k'')J, with a convex term beside."""
    torch.manual_seed(0)
    model, x, t = nn.Linear(4, 3).double(), *valued()
    terms = {"cauchy": shf.Term(cauchy, weight=2.0), "mse": nn.MSELoss()}
    alone = {"preconditioner": None, "cg_iterations": 200, "cg_decay": 0.0, "line_search_steps": 0, "damping": 0.1}
    one = copy.deepcopy(model)
    shf.SHF(model, terms, solver=solver, backtracking=None, **alone).step({"cauchy": (x, t), "mse": (x, t)})
    z = one(x).detach()
    H = 2 * positive(dense(lambda u, t: cauchy(u[0], t), [z], t), z) + dense(lambda u, t: F.mse_loss(u[0], t), [z], t)
    J = torch.cat([torch.kron(torch.eye(3), x), torch.eye(3).repeat_interleave(len(x), 0)], 1).double()
    J = J.view(3, len(x), -1).transpose(0, 1).reshape(z.numel(), -1)
    u = one(x).detach().requires_grad_()
    (slope,) = torch.autograd.grad(2 * cauchy(u, t) + F.mse_loss(u, t), u)
    expected = torch.linalg.solve(J.T @ H @ J + 0.1 * torch.eye(15), -J.T @ slope.reshape(-1))
    assert_close(theta(model) - theta(one), expected, 1e-6)


@ignored
def test_all_batches_and_closures():
    case = PLACES[2]
    model, x, t = of(case)
    twin, batches = copy.deepcopy(model), [(x[:12], t[:12]), (x[12:], t[12:])]
    hf = shf.HF(copy.deepcopy(model), case.loss, cg_iterations=10)
    assert [hf.step(batches, curvature=batches[0]) for _ in range(3)][-1].loss_after < case.loss(model(x), t)
    optimizers = [shf.SHF(m, case.loss, seed=1, **shf.presets.fast) for m in (model, twin)]
    for _ in range(3):
        optimizers[0].step(x, t)
        optimizers[1].step(lambda: shf.evaluate(twin(x), t))
    assert_close(theta(model), theta(twin), 1e-8)


@ignored
def test_a_loaded_run_goes_on_bitwise():
    """What stands for L'' is found anew in each step, and not remembered."""
    case = PLACES[2]
    model, x, t = of(case)
    one = shf.SHF(model, case.loss, seed=1, **shf.presets.fast)
    one.step(x, t)
    other = copy.deepcopy(model)
    two = shf.SHF(other, case.loss, seed=1, **shf.presets.fast)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer in (one, two):
        optimizer.step(x, t)
    assert identical(theta(model), theta(other))


def of_a_rank(rank, share):
    warnings.simplefilter("ignore", shf.NonConvexLossWarning)
    model, x, t = of(PLACES[2])
    optimizer = shf.SHF(model, PLACES[2].loss, seed=1, **shf.presets.fast)
    for _ in range(3):
        optimizer.step(x[share[rank]], t[share[rank]])
    return theta(model)


def test_several_processes_are_one():
    alone = of_a_rank(0, [slice(None)])
    for found in worlds.run(2, of_a_rank, [slice(0, 11), slice(11, None)]):
        assert_close(found, alone, 1e-8)


# --- what stands for L'' ------------------------------------------------------------------------------------------------


def apart(z, t):
    """Mean and log-variance as two outputs."""
    return F.gaussian_nll_loss(z[0], t, z[1].exp()) - 3 * z[0].square().mean()


def by_hand(z, t):
    return gaussian(torch.cat([z[0].flatten(1), z[1].flatten(1)], 1), t.flatten(1))


@pytest.mark.parametrize(
    ("loss", "shapes", "blocks"),
    [
        (lambda z, t: cauchy(z[0], t), [(4, 5)], (20, 1)),
        (lambda z, t: gaussian(z[0], t), [(4, 10)], (20, 2)),
        (lambda z, t: gaussian(z[0].unflatten(1, (5, 2)).mT.flatten(1), t), [(4, 10)], (20, 2)),
        (by_hand, [(4, 5), (4, 5)], (20, 2)),
        (by_hand, [(4, 5), (4, 1, 5)], (20, 2)),
        (lambda z, t: focal(z[0].movedim(1, -1).flatten(0, -2), (t > 0).long().flatten()), [(4, 3, 5)], (20, 3)),
        (lambda z, t: focal(z[0].flatten(0, -2), (t > 0).long().flatten()), [(4, 5, 3)], (20, 3)),
        (lambda z, t: cosine(z[0], t), [(4, 5)], (4, 5)),
        (lambda z, t: contrastive(z[0], t), [(4, 5)], (1, 20)),
        (apart, [(4, 5), (4, 5)], (20, 2)),
    ],
)
def test_the_finest_blocks_are_found_and_their_roots(loss, shapes, blocks):
    """P+ and S with SS' = P+, read off column by column, against the positive part of the whole dense L''."""
    torch.manual_seed(0)
    z, t = [3 * torch.randn(shape, dtype=torch.float64) for shape in shapes], torch.randn(4, 5, dtype=torch.float64)
    expansion = LossExpansion(Loss(loss), z, t)
    with pytest.warns(shf.NonConvexLossWarning):
        P = columns(expansion.hessian(), z)
    S = columns(lambda xi: expansion.hessian_root(lambda like, number, draw: xi[number]), z)
    assert expansion._positive.arrangement.size == blocks
    if loss is not apart:  # of which a Fisher information is part
        assert_close(P, positive(dense(loss, z, t), None), 1e-9)
    assert torch.linalg.eigvalsh(P).min() > -1e-12
    assert_close(S @ S.T, P, 1e-9)


def test_numbers_that_all_but_underflow_spoil_no_root():
    """Of a mixture in single precision in which one component has all of a row. LAPACK makes nan of them."""
    logits, means = [-1.3428545, 2.3925555, -1.1955658], [0.50833535, -0.65311283, 0.5308643]
    z, t = torch.tensor([[*logits, *means, -3.1736908, -1.7767605, -2.3399079]]), torch.tensor([[-0.8284042]])
    with pytest.warns(shf.NonConvexLossWarning):
        S = LossExpansion(Loss(lambda z, t: mixture(z, t) / 400), z, t).row_roots()[0]
    H = dense(lambda u, t: mixture(u[0], t) / 400, [z.double()], t)
    assert_close(S @ S.T, positive(H, z), 1e-5)


@each_family
def test_roots_by_rows(case):
    """For solvers that factorise."""
    model, x, t = of(case, 6)
    z = 3 * model(x).detach()
    H = dense(lambda u, t: case.loss(u[0], t), [z], t)
    with pytest.warns(shf.NonConvexLossWarning):
        S = LossExpansion(Loss(case.loss), z, t).row_roots()
    S = torch.block_diag(*(torch.diag(s) if s.ndim == 1 else s for s in S))
    assert_close(S @ S.T, case.stands_in(H, z), 1e-9)


def test_the_fisher_information_is_that_of_the_arguments_of_torchs_function():
    """With constant variances it is L'' itself; broadcast, reduced and clamped as torch's."""
    z, t = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    variance = torch.rand(4, dtype=torch.float64) + 0.1
    for v in (variance, variance[:, None], 0.3, 0.01):
        for reduction in ("mean", "sum"):

            def loss(z, t, v=v, reduction=reduction):
                beside = -20 * z.sum(0).square().sum()  # not convex: the Gaussian is looked for
                return F.gaussian_nll_loss(z, t, v, eps=0.05, reduction=reduction) + beside

            expansion = LossExpansion(Loss(loss), z, t)
            assert expansion._curved is not expansion._slope
            assert_close(columns(expansion._product, [z]), dense(lambda u, t: loss(u[0], t), [z], t), 1e-9)


class MeanAndVariance(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.raw = mlp(), mlp()

    def forward(self, x):
        return self.mean(x), F.softplus(self.raw(x)) + 0.1


def test_torchs_gaussian_loss_takes_a_pair():
    model = MeanAndVariance()
    optimizer = shf.SHF(model, nn.GaussianNLLLoss(), **shf.presets.fast)
    with pytest.warns(shf.NonConvexLossWarning, match="the Fisher information of its Gaussian stands for L''"):
        first = optimizer.step(*valued())
    x, t = valued()
    assert first.loss_before == pytest.approx(nn.GaussianNLLLoss()(model.mean(x), t, model(x)[1]).item(), abs=1)
    assert [optimizer.step(x, t) for _ in range(5)][-1].loss_after < first.loss_before
    with pytest.raises(TypeError, match=r"returns the pair \(mean, variance\)"):
        shf.SHF(mlp(), nn.GaussianNLLLoss()).step(x, t)


# --- convex losses ------------------------------------------------------------------------------------------------------


def logistic(z, t):
    return (F.softplus(z) - z * F.one_hot(t, 3)).sum(1).mean()


def joint(z, t):
    """Convex, and all rows at once."""
    return z.logsumexp(0).sum() + F.cross_entropy(z, t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("loss", [logistic, joint, lambda z, t: 3 * F.cross_entropy(z, t), nn.CrossEntropyLoss()])
def test_of_a_convex_loss_nothing_is_said_and_products_are_its_own(loss, scale, dtype):
    """Bit by bit what differentiating twice gives; fails by the warning, which is an error in these tests."""
    source = torch.Generator().manual_seed(0)
    for _ in range(10):
        z, t = scale * torch.randn(50, 3, generator=source, dtype=dtype), torch.arange(50) % 3
        u = torch.randn(50, 3, generator=source, dtype=dtype)
        expansion = LossExpansion(Loss(loss), z, t)
        found = expansion.hessian()([u])[0]
        if not isinstance(loss, nn.Module):
            leaf = z.clone().requires_grad_()
            (g,) = torch.autograd.grad(loss(leaf, t), leaf, create_graph=True)
            assert torch.equal(found, torch.autograd.grad(g, leaf, u)[0])


def test_looking_costs_two_products_of_the_loss_alone(monkeypatch):
    asked = []
    genuine = LossExpansion._product
    monkeypatch.setattr(LossExpansion, "_product", lambda *given: asked.append(1) or genuine(*given))
    product = LossExpansion(Loss(logistic), torch.randn(50, 3), torch.arange(50) % 3).hessian()
    for _ in range(5):
        product([torch.randn(50, 3)])
    assert len(asked) == 2 + 5


# --- what is said, and what is refused ----------------------------------------------------------------------------------


def test_it_is_said_once_and_can_be_silenced():
    optimizer = shf.SHF(mlp(), cosine, **shf.presets.fast)
    with pytest.warns(shf.NonConvexLossWarning, match=r"loss cosine is not convex .* \(blocks of 3\) stands") as said:
        optimizer.step(*valued())
    assert said[0].filename == __file__
    optimizer.step(*valued())  # else an error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", shf.NonConvexLossWarning)
        assert shf.SHF(mlp(), cosine).step(*valued()).accepted


@ignored
def test_a_concave_one_is_without_curvature():
    """-softplus(D), of a GAN's generator; softplus(-D) is convex."""
    with pytest.warns(shf.SHFWarning, match="has no curvature in the outputs"):
        assert shf.SHF(mlp(), lambda z, t: -F.softplus(z).mean()).step(*valued()).accepted


def test_the_generator_that_does_not_saturate_is_convex():
    assert shf.SHF(mlp(), lambda z, t: F.softplus(-z).mean()).step(*valued()).accepted


class Table(nn.Module):
    """Similarities of two views, all with all."""

    def __init__(self):
        super().__init__()
        self.embedding = mlp()

    def forward(self, x, y):
        return F.normalize(self.embedding(x), dim=1) @ F.normalize(self.embedding(y), dim=1).T / 0.5


def test_rows_that_are_compared_are_one_block_if_that_is_small_enough():
    x, t = valued(400)
    optimizer = shf.SHF(mlp(), contrastive)
    before = snapshot(optimizer)
    with pytest.raises(
        ValueError, match=r"not convex .* all rows together have 1200 outputs, expected at most 1024 .* table"
    ):
        optimizer.step(x, t)
    assert identical(snapshot(optimizer), before)
    infos = [shf.SHF(Table(), nn.CrossEntropyLoss()).step((x, x + 0.1), torch.arange(400)) for _ in range(2)]
    assert all(info.accepted for info in infos)
