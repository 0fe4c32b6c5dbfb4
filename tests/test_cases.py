"""Products, gradients and preconditioners of every declared case against dense float64 matrices.

The references use plain autograd: J row by row, L'' by differentiating twice, per-case gradients by running each case
alone. What they share with the code under test is the forward pass and the frozen draws, nothing else.
"""

import copy
import functools

import pytest
import torch
from torch import Tensor

import shf
from cases import CASES, ROWS, Case, positive, without_convexity
from helpers import Objective
from shf.data.batches import Batch
from shf.data.draws import Draws, mix, preserved_global_state
from shf.data.tree import leaves, map_leaves
from shf.losses import Loss, Reduction
from shf.model.network import Network
from shf.preconditioners import EmpiricalFisher, Jacobi
from shf.probing.layout import find_layout
from shf.runtime.context import twice_differentiable_kernels

SUBSET = torch.tensor([4, 5, 0])
SEED = 7
PROBES = 6


class Reference:
    """A case in float64, with dense derivatives."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        self.case = case
        self.model = case.model().double()
        for p in self.model.parameters():
            torch.nn.init.normal_(p, std=0.5)
        inputs, targets = case.data()
        to_double = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
        inputs = inputs.to(torch.float64) if hasattr(inputs, "batch_sizes") else map_leaves(to_double, inputs)
        self.batch = Batch.of(inputs, map_leaves(to_double, targets), **case.handling)
        self.network = Network(self.model, list(self.model.parameters()))
        self.loss = Loss(case.loss)
        with preserved_global_state(), twice_differentiable_kernels(torch.device("cpu")):
            self.layout = find_layout(self.network, self.batch, 3)

    def objective(self, rows: Tensor | None = None, **settings) -> Objective:
        settings = {"preconditioner": EmpiricalFisher(squares="exact")} | settings
        return Objective(
            self.network,
            self.loss,
            self.batch,
            self.layout,
            curvature_rows=rows,
            seed=SEED,
            **settings,
        )

    def outputs(self, rows: Tensor | None, draws: Draws) -> tuple[Tensor, list[Tensor]]:
        """z on some rows with the step's draws, and θ as leaves."""
        theta = self.network.leaves()
        with torch.enable_grad(), draws.over(rows):
            z = self.network(theta, self.batch.take(rows).inputs)
        return z, theta

    def draws(self) -> Draws:
        """The draws that an objective with this seed makes, made by a pass over the whole batch."""
        draws = Draws(mix(SEED, 0), ROWS, minor=any(a is not None and a.minor for a in self.layout.draws))
        self.outputs(None, draws)
        return draws

    def flat_gradient(self, scalar: Tensor, theta: list[Tensor], draws: Draws, rows: Tensor | None) -> Tensor:
        with draws.resumed(rows):
            grads = torch.autograd.grad(scalar, theta, retain_graph=True, allow_unused=True)
        return torch.cat(
            [torch.zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(grads, theta, strict=True)]
        )

    @functools.cache  # noqa: B019
    def jacobian(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        draws = self.draws()
        z, theta = self.outputs(rows, draws)
        return torch.stack([self.flat_gradient(e, theta, draws, rows) for e in z.reshape(-1)]), z.detach()

    @functools.cache  # noqa: B019 - the references live as long as the test run
    def gauss_newton(self, rows: Tensor | None) -> Tensor:
        J, z = self.jacobian(rows)
        targets = self.batch.take_targets(rows)
        H = torch.autograd.functional.hessian(lambda v: self.loss(v.view_as(z), targets), z.reshape(-1))
        if self.case.stands_in is not None:
            H = self.case.stands_in(H, z)
        scale = ROWS / len(rows) if rows is not None and self.loss.reduction is Reduction.SUM else 1.0
        return scale * (J.T @ H @ J)

    def gradient(self) -> Tensor:
        draws = self.draws()
        z, theta = self.outputs(None, draws)
        return self.flat_gradient(self.loss(z, self.batch.targets), theta, draws, None)

    @functools.cache  # noqa: B019
    def sum_of_squares(self) -> Tensor:
        """Σ_j (∇ c_j)² where c_j is the share of case j in the loss: J'(E_j ∂L/∂z), cases run alone where they can be."""
        J, z = self.jacobian(None)
        z = z.clone().requires_grad_()
        (u,) = torch.autograd.grad(self.loss(z, self.batch.targets), z)
        if not self.case.separable:
            return sum((J.T @ _row(u, j).reshape(-1)).square() for j in range(ROWS))
        draws, total = self.draws(), torch.zeros(J.shape[1])
        for j in range(ROWS):
            rows = torch.tensor([j])
            z_j, theta = self.outputs(rows, draws)
            total += self.flat_gradient((z_j * u[rows]).sum(), theta, draws, rows).square()
        return total


def _write(network: Network, theta: Tensor) -> None:
    with torch.no_grad():
        for p, value in zip(network.parameters, network.shapes.split(theta), strict=True):
            p.copy_(value)


def _row(u: Tensor, j: int) -> Tensor:
    masked = torch.zeros_like(u)
    masked[j] = u[j]
    return masked


@functools.cache
def build(case: Case) -> Reference:
    return Reference(case)


@pytest.fixture(params=CASES, ids=lambda case: case.name.replace(" ", "-"))
def reference(request):
    torch.set_default_dtype(torch.float64)
    with preserved_global_state(), twice_differentiable_kernels(torch.device("cpu")), without_convexity(request.param):
        yield build(request.param)
    torch.set_default_dtype(torch.float32)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    scale = expected.abs().max().clamp_min(1e-12)
    return bool(((found - expected).abs().max() / scale) <= tolerance)


@pytest.mark.parametrize("rows", [None, SUBSET], ids=["all-rows", "subset"])
@pytest.mark.parametrize("microbatch", [None, 4], ids=["whole", "microbatch"])
def test_products(reference, rows, microbatch):
    if microbatch and not reference.case.separable:
        with pytest.raises(ValueError, match="batch statistics"):
            reference.objective(rows, microbatch=microbatch)
        return
    objective = reference.objective(rows, microbatch=microbatch)
    objective.expand(1.0)
    B = objective.curvature().product
    dense = reference.gauss_newton(rows)
    vectors = torch.randn(PROBES, len(dense))
    products = torch.stack([B(v).clone() for v in vectors])
    assert close(products, vectors @ dense)
    assert torch.linalg.eigvalsh(dense).min() >= -1e-9 * dense.abs().max()


SOLVERS = {"cg": shf.solvers.CG(iterations=1500), "dense": shf.solvers.Dense(), "rows": shf.solvers.Rows()}


def test_solvers_agree_with_the_dense_solution(reference):
    """With the dense solve of the same system, B column by column: to 1e-10, and what B's own rounding, which its asymmetry
    shows, leaves where λ is small. Below 1e-6 of the largest eigenvalue rounding decides the solution: there by residual and
    the model's value, CG left out."""
    objective = reference.objective()
    downhill = -objective.problem.linearise(shf.preconditioners.Identity()).gradient
    product = objective.curvature().product
    B = torch.stack([product(e).clone() for e in torch.eye(len(downhill))], 1)
    rounding = (torch.linalg.matrix_norm(B - B.T) / torch.linalg.matrix_norm(B)).item()
    largest = torch.linalg.eigvalsh(B)[-1].item()
    held = (
        reference.case.stands_in is positive or reference.case.name == "Huber"
    )  # by λ alone, where a slope is not curved
    for relative in (1.0, 1e-3, 1e-6) if held else (1.0, 1e-3, 1e-6, 1e-12):
        A = 0.5 * (B + B.T) + relative * largest * torch.eye(len(B))
        root = torch.linalg.cholesky(A)
        expected = torch.cholesky_solve(downhill[:, None], root)
        expected = (expected + torch.cholesky_solve(downhill[:, None] - A @ expected, root))[:, 0]  # refined
        for name in SOLVERS if relative >= 1e-6 else ("dense", "rows"):
            tolerance = 1e-10 + 2 * rounding / relative
            system, run = objective.curvature(relative * largest), until(expected, tolerance)
            found = SOLVERS[name].solve(system, downhill.clone(), run).last
            if relative >= 1e-6:
                assert error(found, expected) < tolerance, (name, relative)
            else:
                model = [(0.5 * x @ A @ x - downhill @ x).item() for x in (found, expected)]
                assert error(A @ found, downhill) < 1e-6, name
                assert model[0] == pytest.approx(model[1], rel=1e-6), name


def until(expected: Tensor, tolerance: float) -> shf.solvers.Run:
    """A run that ends where every 25th iterate is looked at and one is near enough: iterations after it show nothing."""
    near = []

    def visit(number, x, *_):
        near.append(error(x, expected) < tolerance)

    return shf.solvers.Run(visit, keep=lambda number: number % 25 == 0, stop=lambda values: any(near))


def error(found: Tensor, expected: Tensor) -> float:
    return (torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)).item()


@pytest.mark.parametrize("microbatch", [None, 4], ids=["whole", "microbatch"])
def test_gradient_and_empirical_fisher(reference, microbatch):
    if microbatch and not reference.case.separable:
        pytest.skip("refused: see test_products")
    value, gradient, diagonal = reference.objective(microbatch=microbatch).data_terms()
    assert close(gradient, reference.gradient())
    factor = ROWS if reference.loss.reduction is Reduction.MEAN else 1
    assert close(diagonal, factor * reference.sum_of_squares())
    z, _ = reference.outputs(None, reference.draws())
    assert value == pytest.approx(reference.loss(z, reference.batch.targets).item(), rel=1e-12)


def test_value_elsewhere(reference):
    """f(θ + δ) through the functional call equals f after writing θ + δ into the model."""
    objective = reference.objective()
    objective.expand(1.0)
    before = reference.network.theta()
    found = objective.value(before + 0.01)
    _write(reference.network, before + 0.01)
    z, _ = reference.outputs(None, reference.draws())
    _write(reference.network, before)
    assert found == pytest.approx(reference.loss(z, reference.batch.targets).item(), rel=1e-12)


def test_layer_formulas_are_used_where_declared(reference, monkeypatch):
    called = []
    original = shf.model.percase._case_by_case

    def watched(*args, **kwargs):
        called.append(True)
        return original(*args, **kwargs)

    monkeypatch.setattr(shf.model.percase, "_case_by_case", watched)
    reference.objective().data_terms()
    assert bool(called) != reference.case.layers


def test_rows_and_draws_are_found(reference):
    assert reference.layout.obstacle is None
    assert reference.layout.separable == reference.case.separable
    draws = reference.draws()
    assert len(reference.layout.draws) == len(draws.drawn)


def test_a_step_lowers_the_loss_and_changes_buffers_by_one_pass(reference):
    """Whole steps with a curvature batch; buffers are those of one pass over the batch at the old parameters."""
    case, batch = reference.case, reference.batch
    model = copy.deepcopy(reference.model)
    expected = reference.network.buffers()
    with reference.draws().over():
        reference.network(reference.network.leaves(), batch.inputs, expected)
    info = shf.SHF(model, case.loss, curvature_batch=3, seed=SEED, **case.handling).step(batch.inputs, batch.targets)
    assert info.accepted
    assert info.loss_after < info.loss_before
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], value) for name, value in expected.items())


def test_jacobi_estimates_the_diagonal(reference):
    """The mean of many estimates approaches diag(J'L''J), within the spread of the estimates."""
    if reference.case.kind not in ("losses", "feed-forward") or len(leaves(reference.batch.targets)[0].shape) > 2:
        pytest.skip("the estimate is built from the same per-case squares: the loss is what varies")
    dense = reference.gauss_newton(None).diagonal()
    estimates = []
    for seed in range(150):
        objective = Objective(
            reference.network,
            reference.loss,
            reference.batch,
            reference.layout,
            seed=seed,
            preconditioner=Jacobi(),
        )
        estimates.append(objective.data_terms()[2])
    stack = torch.stack(estimates)
    error = (stack.mean(0) - dense).abs()
    spread = stack.std(0) / len(estimates) ** 0.5
    assert (error <= 5 * spread + 1e-9).all()
