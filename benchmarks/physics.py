"""`shf.presets.residual`, with nothing set, on equations solved by networks, beside published curves and rerun opponents.

    python benchmarks/physics.py --seconds 100 --seed 0 1 2     the runs that are not yet in results/physics
    python benchmarks/physics.py machine                        this machine's speed, by which seconds are scaled
    python benchmarks/physics.py page                           tables and figure, in docs/physics.md

`--problems` chooses some by the beginnings of their names, `--only` chooses methods. Seconds are those of the processor, of
one thread and of updates alone. The problems are declared in benchmarks/equations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shf
from equations import PROBLEMS, Problem
from shf.lab.contest import Method, Row, Step, Task, contest, parser

ROOT = Path(__file__).resolve().parent.parent
RECORDS, PAGE = ROOT / "results" / "physics", ROOT / "docs" / "physics.md"


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


def residual(problem: Problem, model: nn.Module, _: float, **options: Any) -> Step:
    optimizer = shf.SHF(model, problem.terms(), **{**shf.presets.residual, **options})
    return lambda points, _: optimizer.step(points)


def objective(problem: Problem, model: nn.Module) -> Callable[[Any], torch.Tensor]:
    terms = problem.terms()

    def value(points: Any) -> torch.Tensor:
        return sum(t.weight * t.loss(t.forward(model, points[name][0]), points[name][1]) for name, t in terms.items())  # type: ignore[misc]

    return value


def by_gradient(make: Callable[..., Any], problem: Problem, model: nn.Module, rate: float) -> Step:
    optimizer, value = make(model.parameters(), lr=rate), objective(problem, model)

    def step(points: Any, _: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = value(points)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)

    return step


def soap(parameters: Any, lr: float) -> Any:
    from pytorch_optimizer import SOAP

    return SOAP(parameters, lr=lr)


def lbfgs(parameters: Any, lr: float) -> Any:
    return torch.optim.LBFGS(parameters, lr=lr, history_size=100, line_search_fn="strong_wolfe")


def methods(problem: Problem) -> list[Method]:
    return [
        Method("residual", 0, partial(residual, problem), settings=dict(shf.presets.residual)),
        Method("adam", 0, partial(by_gradient, torch.optim.Adam, problem), (1e-3, 3e-3, 1e-2)),
        Method("soap", 0, partial(by_gradient, soap, problem), (1e-3, 3e-3, 1e-2)),
        Method("lbfgs", 0, partial(by_gradient, lbfgs, problem), (1.0,)),
    ]


def main() -> None:
    options = parser(__doc__, seconds=100)
    options.set_defaults(out=RECORDS, points=200)
    options.add_argument("--problems", nargs="+", default=[""], help="beginnings of names")
    chosen = options.parse_args()
    torch.set_default_dtype(torch.float64)
    for name, problem in PROBLEMS.items():
        if name.startswith(tuple(chosen.problems)):
            contest([task(name, problem)], methods(problem), chosen)


if __name__ == "__main__":
    main()
