"""`shf.presets.residual`, with nothing set, on equations solved by networks, beside published curves and rerun opponents.

    python benchmarks/physics.py --only residual --seconds 30 --seed 0 1 2    runs that are not yet in results/physics
    python benchmarks/physics.py machine                                      this machine's speed, which scales seconds
    python benchmarks/physics.py published ../shared/data/pinns               the published curves, reduced
    python benchmarks/physics.py page                                         tables and figures, in docs/physics.md

`--problems` chooses some by the beginnings of their names, `--only` chooses methods, of which `levenberg-marquardt` wants
`pip install torch-levenberg-marquardt`. Seconds are those of the processor, of one thread and of updates alone. The
equations are declared in benchmarks/equations.py.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn

import shf
from equations import DEVELOPMENT, PROBLEMS, Problem
from shf.lab import machine
from shf.lab.clock import CLOCKS
from shf.lab.contest import Method, Row, Step, Task, contest, parser, read_contest
from shf.lab.pages import fill, table
from shf.lab.plots import Chart, Series, draw
from shf.lab.records import RunRecord

ROOT = Path(__file__).resolve().parent.parent
RECORDS, PAGE = ROOT / "results" / "physics", ROOT / "docs" / "physics.md"
FIGURES = ROOT / "docs" / "figures"
SPEED, PUBLISHED = RECORDS / "machine.json", RECORDS / "published.json"
REFERENCE = 0.47
"""Seconds of the product JJ', 1020 × 9873, on the machine that seconds are scaled to."""
LEVELS = tuple(10.0**-k for k in range(1, 9))


def task(name: str, problem: Problem) -> Task:
    x, u = problem.unseen()

    def batches(_: int, source: torch.Generator) -> Iterator[tuple[Any, None]]:
        points = problem.points(source)
        while True:
            yield points, None
            if problem.fresh:
                points = problem.points(source)

    def evaluate(model: nn.Module) -> Row:
        return {"l2_error": (model(x) - u).square().mean().sqrt().item()}

    return Task(name, problem.model, batches, evaluate, "l2_error")


def residual(problem: Problem, model: nn.Module, _: float) -> Step:
    optimizer = shf.SHF(model, problem.terms(), **shf.presets.residual)
    return lambda points, _: optimizer.step(points)


def objective(problem: Problem, model: nn.Module, points: Any) -> Tensor:
    terms = problem.terms().items()
    return sum(t.weight * t.loss(t.forward(model, points[k][0]), points[k][1]) for k, t in terms)  # type: ignore[misc, return-value]


def by_gradient(make: Callable[..., Any], problem: Problem, model: nn.Module, rate: float) -> Step:
    optimizer = make(model.parameters(), lr=rate)

    def step(points: Any, _: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = objective(problem, model, points)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)

    return step


def soap(parameters: Any, lr: float) -> Any:
    from pytorch_optimizer import SOAP

    return SOAP(parameters, lr=lr)


def lbfgs(parameters: Any, lr: float) -> Any:
    """Without the tolerances that would end it early."""
    how = {"history_size": 100, "line_search_fn": "strong_wolfe"}
    return torch.optim.LBFGS(parameters, lr=lr, tolerance_grad=0.0, tolerance_change=0.0, **how)


def bfgs(problem: Problem, model: nn.Module, _: float) -> Step:
    """SciPy's, fifty iterations at a time; each begins with the inverse that the last one left."""
    inverse: Any = None
    parameters = list(model.parameters())

    def step(points: Any, _: Any) -> None:
        nonlocal inverse

        def f(theta: Any) -> tuple[float, Any]:
            nn.utils.vector_to_parameters(torch.from_numpy(theta), parameters)
            loss = objective(problem, model, points)
            gradient = torch.autograd.grad(loss, parameters)
            return loss.item(), torch.cat([g.reshape(-1) for g in gradient]).numpy()

        start = nn.utils.parameters_to_vector(parameters).detach().numpy().copy()
        found = scipy.optimize.minimize(
            f, start, jac=True, method="BFGS", options={"maxiter": 50, "gtol": 0.0, "hess_inv0": inverse}
        )
        inverse = (found.hess_inv + found.hess_inv.T) / 2
        nn.utils.vector_to_parameters(torch.from_numpy(found.x), parameters)

    return step


class Residuals(nn.Module):
    """An equation's terms as outputs of one batch, of which half the sum of squares is the objective: for methods that
    know only that. A row is (x, target, number of its term, scale)."""

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        super().__init__()
        self.model, self.terms = model, problem.terms()

    def rows(self, points: Any) -> Tensor:
        found = []
        for k, (name, term) in enumerate(self.terms.items()):
            x, target = points[name]
            scale = (2 * term.weight / len(x)) ** 0.5
            found.append(torch.cat([x, target, torch.tensor([[k, scale]], dtype=x.dtype).expand(len(x), 2)], 1))
        return torch.cat(found)

    def forward(self, rows: Tensor) -> Tensor:
        x, target, number, scale = rows[:, :-3], rows[:, -3:-2], rows[:, -2:-1], rows[:, -1:]
        outputs = [term.forward(self.model, x) for term in self.terms.values()]  # type: ignore[misc]
        return scale * (torch.where(number == 0, *outputs) - target)


def least_squares(problem: Problem, model: nn.Module, _: float) -> Step:
    """SciPy's trust region for sums of squares, at most 25 evaluations at a time; J case by case, by torch.func."""
    residuals = Residuals(problem, model)
    names, parameters = zip(*residuals.named_parameters(), strict=True)
    shapes = [p.shape for p in parameters]

    def outputs(theta: Tensor, rows: Tensor) -> Tensor:
        pieces = theta.split([shape.numel() for shape in shapes])
        named = {name: t.view(shape) for name, t, shape in zip(names, pieces, shapes, strict=True)}
        return torch.func.functional_call(residuals, named, (rows,))  # type: ignore[no-any-return]

    def of_case(theta: Tensor, row: Tensor) -> Tensor:
        return outputs(theta, row[None]).squeeze()

    by_case = torch.func.vmap(torch.func.grad(of_case), (None, 0))

    def step(points: Any, _: Any) -> None:
        rows, start = residuals.rows(points), nn.utils.parameters_to_vector(parameters).detach().numpy().copy()
        found = scipy.optimize.least_squares(
            lambda theta: outputs(torch.from_numpy(theta), rows).detach().squeeze(1).numpy(),
            start,
            lambda theta: by_case(torch.from_numpy(theta), rows).detach().numpy(),
            x_scale="jac",
            max_nfev=25,
            ftol=None,
            xtol=None,
            gtol=1e-15,
        )
        nn.utils.vector_to_parameters(torch.from_numpy(found.x), parameters)

    return step


def levenberg_marquardt(problem: Problem, model: nn.Module, _: float) -> Step:
    """The package torch-levenberg-marquardt, at its defaults."""
    from torch_levenberg_marquardt.training import LevenbergMarquardtModule

    residuals = Residuals(problem, model)
    trained = LevenbergMarquardtModule(residuals)

    def step(points: Any, _: Any) -> None:
        rows = residuals.rows(points)
        trained.training_step(rows, torch.zeros(len(rows), 1, dtype=rows.dtype))

    return step


RATES = (1e-3, 3e-3, 1e-2)


def methods(problem: Problem) -> list[Method]:
    return [
        Method("residual", 0, partial(residual, problem), settings=dict(shf.presets.residual)),
        Method("adam", 0, partial(by_gradient, torch.optim.Adam, problem), RATES),
        Method("soap", 0, partial(by_gradient, soap, problem), RATES),
        Method("lbfgs", 0, partial(by_gradient, lbfgs, problem), (1.0,)),
        Method("bfgs", 0, partial(bfgs, problem)),
        Method("least-squares", 0, partial(least_squares, problem)),
        Method("levenberg-marquardt", 0, partial(levenberg_marquardt, problem)),
    ]


def speed() -> None:
    """How long the product JJ' takes: the median of seven, in processor seconds of one thread."""
    torch.set_num_threads(1)
    J, clock, found = torch.randn(1020, 9873, dtype=torch.float64), CLOCKS["processor"], []
    for _ in range(7):
        started = clock()
        J @ J.t()
        found.append(clock() - started)
    about = {"product_seconds": statistics.median(found), "all": found, "machine": machine.description()}
    SPEED.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def reduce_published(directory: Path) -> None:
    """Of each published curve the best error, and when it first was at each power of ten."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob("*.csv")):
        with path.open(encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        for method, own in groupby(rows, lambda row: row["method"]):
            curve = [(float(r["seconds"]), float(r["l2_error"])) for r in own if r["l2_error"] not in ("", "nan")]
            reached = {f"{level:g}": next((s for s, e in curve if e <= level), None) for level in LEVELS}
            about = {"best": min(e for _, e in curve), "seconds": curve[-1][0], "start": curve[0][1]}
            found.setdefault(path.stem, {})[method] = {
                **about,
                "reached": {k: v for k, v in reached.items() if v is not None},
            }
    PUBLISHED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def scale() -> float:
    return REFERENCE / float(json.loads(SPEED.read_text(encoding="utf-8"))["product_seconds"])


def runs(name: str) -> Mapping[str, list[RunRecord]]:
    return {method: list(by_seed.values()) for method, by_seed in read_contest(RECORDS / name).items()}


def of_runs(records: list[RunRecord]) -> tuple[str, ...]:
    """Seeds, seconds, error at the end and the lowest, and when it was first at 1e-4, 1e-5, 1e-6: medians."""
    factor = scale()

    def reached(level: float) -> str:
        at = statistics.median(factor * r.reached("l2_error", level, "processor_seconds") for r in records)
        return f"{at:.3g}" if math.isfinite(at) else "-"

    end = statistics.median(r.column("l2_error")[-1].item() for r in records)
    spent = factor * statistics.median(r.column("processor_seconds")[-1].item() for r in records)
    lowest = statistics.median(r.column("l2_error").min().item() for r in records)
    return (
        str(len(records)),
        f"{spent:.0f}",
        f"{end:.1e}",
        f"{lowest:.1e}",
        *(reached(level) for level in (1e-4, 1e-5, 1e-6)),
    )


def against_published(published: Mapping[str, Any]) -> str:
    heads = ("", "seeds", "seconds", "error", "lowest", "to 1e-4", "to 1e-5", "to 1e-6", "lowest published", "its 1e-4")
    rows = []
    for name in PROBLEMS:
        if "residual" not in (found := runs(name)):
            continue
        curves = published.get("poisson2d-116865" if "cos" in name else name, {})
        if name == "poisson2d-cos-116865":  # one record is of this solution
            curves = {k: v for k, v in curves.items() if k == "HessianFree"}
        elif name in COSINE_RECORDS:
            curves = {k: v for k, v in curves.items() if k != "HessianFree"}
        best = min(curves.items(), key=lambda item: item[1]["best"], default=None)
        times = [(v["reached"]["0.0001"], k) for k, v in curves.items() if "0.0001" in v["reached"]]
        rows.append(
            (
                name + (" (development)" if name in DEVELOPMENT else ""),
                *of_runs(found["residual"]),
                f"{best[1]['best']:.1e} ({best[0]})" if best else "",
                f"{min(times)[0]:.0f} ({min(times)[1]})" if times else "-" if curves else "",
            )
        )
    return table(heads, rows)


COSINE_RECORDS = ("poisson2d-9873", "poisson2d-116865")
"""Whose published record of HessianFree is of another solution."""


def against_rerun() -> str:
    """Each opponent's longest run, and how much sooner the preset is where it ends best: there, and over all seeds."""
    heads = ("", "method", "seconds", "its best error", "at", "`residual` there at", "sooner by", "median of seeds")
    rows = []
    for name in PROBLEMS:
        found = read_contest(RECORDS / name)
        for method in (m for m in found if m != "residual"):
            both = {seed: theirs for seed, theirs in found[method].items() if seed in found["residual"]}
            duels = {seed: duel(theirs, found["residual"][seed]) for seed, theirs in both.items()}
            longest = max(both.values(), key=lambda r: r.column("processor_seconds")[-1])
            best, theirs, ours = duels[longest.config["seed"]]
            rate = longest.config["settings"].get("rate")
            said = method if rate is None or method == "lbfgs" else f"{method}, rate {rate:g}"
            spent = f"{scale() * longest.column('processor_seconds')[-1]:.0f}"
            there = f"{scale() * ours:.3g}" if math.isfinite(ours) else "-"
            ratios = [sooner(t, o) for _, t, o in duels.values()]
            middle = f"{times(statistics.median(ratios))} ({len(ratios)})"
            at = f"{scale() * theirs:.3g}"
            rows.append((name, said, spent, f"{best:.1e}", at, there, times(sooner(theirs, ours)), middle))
    return table(heads, rows)


def duel(theirs: RunRecord, ours: RunRecord) -> tuple[float, float, float]:
    """An opponent's least error in its run, when it had it, and when the preset had it with the same seed."""
    best = theirs.column("l2_error").min().item()
    return best, *(r.reached("l2_error", best, "processor_seconds") for r in (theirs, ours))  # type: ignore[return-value]


def sooner(theirs: float, ours: float) -> float:
    """How many times; without end where they never were better than at the start."""
    return theirs / ours if theirs > 0 else math.inf


def times(ratio: float) -> str:
    if not math.isfinite(ratio):
        return "never below its start"
    return f"{ratio:.0f} ×" if ratio >= 9.95 else f"{ratio:.1f} ×" if ratio > 0 else "not reached"


def charts(published: Mapping[str, Any]) -> Iterator[Chart]:
    for name in DRAWN:
        series: list[Series] = []
        for colour, (method, records) in enumerate(sorted(runs(name).items(), key=lambda item: item[0] != "residual")):
            for k, r in enumerate(records):
                x, y = scale() * r.column("processor_seconds")[1:], r.column("l2_error")[1:]
                series.append(Series(method if k == 0 else "", x, y, colour))
        for colour, method in enumerate(("KFAC-auto", "ENGD-full", "LBFGS", "Adam"), 4):
            curve = published.get(name, {}).get(method)
            if curve and curve["reached"]:
                levels = [(s, float(e)) for e, s in curve["reached"].items()]
                levels.append((curve["seconds"], curve["best"]))
                x, y = np.array(levels).T
                series.append(Series(f"{method}, GPU", x, y, colour, dashed=True))
        title = f"{name}: L2 error"
        yield Chart(f"physics-{name}", title, "seconds", tuple(series), log_x=True, log_y=True)


DRAWN = ("poisson2d-257", "heat1d-257", "poisson2d-9873", "poisson2d-116865", "poisson5d-449", "poisson5d-10065")


def page() -> None:
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    shown = []
    for chart in charts(published):
        (FIGURES / f"{chart.name}.svg").write_text(draw(chart, standalone=True), encoding="utf-8")
        shown.append(f"![{chart.title}](figures/{chart.name}.svg)")
    factor = f"The product takes {REFERENCE / scale():.2f} s here; all seconds below are multiplied by {scale():.2f}."
    parts = {"published": against_published(published), "rerun": against_rerun()}
    fill(PAGE, {**parts, "charts": "\n\n".join(shown), "scale": factor})


def main() -> None:
    match sys.argv[1:]:
        case ["page"]:
            return page()
        case ["machine"]:
            return speed()
        case ["published", directory]:
            return reduce_published(Path(directory))
    options = parser(__doc__, seconds=30)
    options.set_defaults(out=RECORDS, points=100)
    options.add_argument("--problems", nargs="+", default=[""], help="beginnings of names")
    chosen = options.parse_args()
    for name, problem in PROBLEMS.items():
        if name.startswith(tuple(chosen.problems)):
            contest([task(name, problem)], methods(problem), chosen)
    return None


if __name__ == "__main__":
    main()
