"""CG against LSMR inside a step, at equal products: what arXiv 2504.13302 trains autoencoders with, beside what we do.

    python benchmarks/solvers.py --seconds 60 --seed 0 1 2      the runs, below results/fast/solvers
    python benchmarks/solvers.py page                           their table and figure, in docs/fast.md

Both solve min ½‖S'Jδ + S⁻¹∇L‖² + ½λ‖δ‖², SS' = L'', from zero and without preconditioner, with one product by J and one
by J' in each iteration. CG sees its normal equations, LSMR the least squares problem itself. All the rest of the step, the
line search and the rule for λ, is the same. The network is the small autoencoder `curves-demo` on generated curves.
"""

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor, nn

from shf.damping.levenberg import adapt_damping, reduction_ratio
from shf.damping.rule import DAMPING_MAX, DAMPING_MIN
from shf.data.batches import Batch
from shf.data.draws import Draws
from shf.hessian.expansion import LossExpansion
from shf.lab.contest import Method, Row, Step, Task, contest, parser, read_contest
from shf.lab.evaluation import evaluate
from shf.lab.experiments import find
from shf.lab.pages import fill, spread, table
from shf.lab.plots import Chart, Series, draw
from shf.lab.problem import build_loss, build_model, load_data
from shf.linear.cg import conjugate_gradient, keep_last
from shf.losses import Loss
from shf.model.jacobian import Jacobian
from shf.model.network import Network
from shf.selection import line_search

ROOT = Path(__file__).resolve().parent.parent
RECORDS, PAGE, FIGURE = (
    ROOT / "results" / "fast",
    ROOT / "docs" / "fast.md",
    ROOT / "docs" / "figures" / "fast-solvers.svg",
)
EXPERIMENT, ROWS, DAMPING, FACTOR = find("curves-demo"), 800, 1.0, 0.95
ITERATIONS = (10, 30)
METRIC = "train_squared_error"

Solve = Callable[[Jacobian, Tensor, Tensor, float, int], Tensor]
"""δ from J, the diagonal of L'', ∂L/∂z, λ and the number of iterations."""


def by_cg(J: Jacobian, d: Tensor, residual: Tensor, damping: float, iterations: int) -> Tensor:
    def product(v: Tensor) -> Tensor:
        return J.vjp([d * J.jvp(v)[0]]).add_(v, alpha=damping)

    return conjugate_gradient(product, J.vjp([residual]).neg_(), iterations=iterations, keep=keep_last).last


def by_lsmr(J: Jacobian, d: Tensor, residual: Tensor, damping: float, iterations: int) -> Tensor:
    root = d.sqrt()

    def forwards(v: np.ndarray) -> np.ndarray:
        return (root * J.jvp(torch.from_numpy(v).to(root))[0]).flatten().numpy()

    def backwards(u: np.ndarray) -> np.ndarray:
        return J.vjp([root * torch.from_numpy(u).to(root).view_as(root)]).numpy()

    size = sum(J.network.shapes.sizes)
    A = LinearOperator((root.numel(), size), matvec=forwards, rmatvec=backwards, dtype=np.float64)
    b = (-residual / root).double().flatten().numpy()
    found = lsmr(A, b, damp=math.sqrt(damping), maxiter=iterations, atol=0, btol=0, conlim=0)
    return torch.from_numpy(found[0]).to(root)


def gauss_newton(solve: Solve, iterations: int, model: nn.Module, _: float) -> Step:
    """Damped Gauss-Newton steps for the squared error or the cross-entropy of logistic units: L'' is diagonal."""
    network, loss, damping = Network(model, list(model.parameters())), Loss(build_loss(EXPERIMENT)), DAMPING

    def step(inputs: Tensor, targets: Tensor) -> None:
        nonlocal damping
        batch, theta = Batch.of(inputs, targets), network.theta()
        with torch.enable_grad():
            J = Jacobian(network, batch, Draws(0, batch.rows))
            here = LossExpansion(loss, J.outputs, targets)
        d = here.hessian()([torch.ones_like(J.outputs)])[0].clamp_min(1e-12)
        delta = solve(J, d, here.gradient[0], damping, iterations)
        Jd = J.jvp(delta)[0]
        slope = torch.dot(Jd.flatten(), here.gradient[0].flatten()).item()
        promised = slope + 0.5 * (d * Jd.square()).sum().item()

        @torch.no_grad()
        def f(rate: float) -> float:
            return loss(network(network.shapes.split(theta + rate * delta), inputs), targets).item()

        before, after = here.value.item(), f(1.0)
        damping = adapt_damping(damping, reduction_ratio(after, before, promised), FACTOR)
        damping = min(max(damping, DAMPING_MIN), DAMPING_MAX)
        rate = line_search(f, before, after, slope, steps=60).alpha
        with torch.no_grad():
            for p, value in zip(network.parameters, network.shapes.split(theta + rate * delta), strict=True):
                p.copy_(value)

    return step


def curves() -> Task:
    data, loss = load_data(EXPERIMENT), build_loss(EXPERIMENT)

    def batches(size: int, source: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for rows in torch.randperm(len(data.train_inputs), generator=source).split(size):
                yield data.train_inputs[rows], data.train_targets[rows]

    def measure(model: nn.Module) -> Row:
        parts = {"train": (data.train_inputs, data.train_targets), "test": (data.test_inputs, data.test_targets)}
        found = {part: evaluate(model, loss, EXPERIMENT.task, *rows) for part, rows in parts.items()}
        return {f"{part}_squared_error": row["squared_error"] for part, row in found.items()}

    def model() -> nn.Module:
        return build_model(EXPERIMENT, seed=torch.initial_seed())

    return Task("solvers", model, batches, measure, METRIC)


METHODS = [
    Method(
        f"{name}-{iterations}",
        ROWS,
        partial(gauss_newton, solve, iterations),
        settings={"iterations": iterations, "damping": DAMPING, "damping_factor": FACTOR},
    )
    for iterations in ITERATIONS
    for name, solve in (("cg", by_cg), ("lsmr", by_lsmr))
]


def page() -> None:
    """For each ζ: the error of both after as many products as the slowest of its runs made."""
    records = {name: list(by_seed.values()) for name, by_seed in read_contest(RECORDS / "solvers").items()}
    rows: list[tuple[str, ...]] = []
    series: list[Series] = []
    for colour, method in enumerate(METHODS):
        label = method.name.replace("-", ", ζ = ")
        zeta, own = method.settings["iterations"], records.get(method.name, [])
        rivals = [r for m in METHODS if m.settings["iterations"] == zeta for r in records.get(m.name, [])]
        most = min((r.column("updates")[-1].item() for r in rivals), default=0)
        ends = [float(np.interp(most, r.column("updates"), r.column(METRIC))) for r in own]
        if ends:
            rows.append((f"{label}, {len(ends)} runs", spread(ends), f"{most * zeta:.0f}"))
        for k, r in enumerate(own):
            series.append(Series(label if k == 0 else "", zeta * r.column("updates")[1:], r.column(METRIC)[1:], colour))
    chart = Chart("fast-solvers", "training error ‖x-x̂‖² per case", "Gauss-Newton products", tuple(series), log_y=True)
    shown = table(("", "training error ‖x-x̂‖² per case", "after products"), rows)
    fill(PAGE, {"solvers": f"![CG and LSMR](figures/fast-solvers.svg)\n\n{shown}"})
    FIGURE.write_text(draw(chart, standalone=True), encoding="utf-8")


def main() -> None:
    if sys.argv[1:] == ["page"]:
        page()
        return
    options = parser(__doc__, seconds=60)
    options.set_defaults(out=RECORDS)
    contest([curves()], METHODS, options.parse_args())


if __name__ == "__main__":
    main()
