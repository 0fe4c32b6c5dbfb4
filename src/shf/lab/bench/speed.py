"""The sections that measure time: a step against its floor, products against gradients, cost against size, sparse inputs."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

import shf
from shf.lab.bench.cases import REUTERS, FeedForward, Other, Workload
from shf.lab.bench.floor import Floor
from shf.lab.bench.measure import Pace, Timing, Work, interleaved, take_over

_WARM_ITERATIONS = 2
"""CG iterations of the step that comes before the measured ones, which start from its solution."""


class RepeatedStep:
    """The second step of training, again and again: model and optimizer are put back before each run."""

    def __init__(self, case: FeedForward, problem: Workload) -> None:
        first = case.optimizer(problem, cg_iterations=min(_WARM_ITERATIONS, case.cg_iterations))
        self.info = first.step(problem.inputs, problem.targets)
        self._problem = problem
        self._optimizer = case.optimizer(problem)
        take_over(self._optimizer, first)
        self._start = copy.deepcopy((problem.model.state_dict(), self._optimizer.state_dict()))

    def rewind(self) -> None:
        model, optimizer = self._start
        self._problem.model.load_state_dict(model)
        self._optimizer.load_state_dict(copy.deepcopy(optimizer))

    def __call__(self) -> None:
        self.info = self._optimizer.step(self._problem.inputs, self._problem.targets)


def step_against_floor(case: FeedForward, pace: Pace) -> dict[str, Any]:
    """Seconds of a step and of the matrix products it cannot do without, for the counts that this step had."""
    case = case.shrunk() if pace.quick else case
    info, step, floor = _with_floor(case, pace)
    return {
        "network": case.name,
        "parameters": case.parameters,
        "rows": case.rows,
        "curvature_rows": case.curvature_rows or case.rows,
        "cg_iterations": info.cg_steps,
        "products": info.products,
        "evaluations": info.evaluations,
        "step": step.record(),
        "floor": floor.record(),
        "step_over_floor": step.over(floor),
    }


def _with_floor(case: FeedForward, pace: Pace) -> tuple[shf.StepInfo, Timing, Timing]:
    """A step and its floor in turns. Both have run before: their memory has been touched."""
    step = RepeatedStep(case, case.problem())
    floor = Floor(case.units, case.rows, case.curvature_rows or case.rows)

    def run_floor() -> None:
        floor.step(step.info.products, step.info.evaluations)

    found = interleaved({"step": step, "floor": run_floor}, pace, before={"step": step.rewind})
    return step.info, found["step"], found["floor"]


def product_against_gradient(case: FeedForward | Other, pace: Pace) -> dict[str, Any]:
    """Seconds of one Gauss-Newton product and of one gradient on the same rows, graphs of the products already built."""
    case = case.shrunk() if pace.quick else case
    problem = case.problem()
    found = interleaved({"product": _product(case), "gradient": problem.gradient}, pace)
    return {
        "network": case.name,
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "rows": case.rows,
        "feed_forward": isinstance(case, FeedForward),
        "product": found["product"].record(),
        "gradient": found["gradient"].record(),
        "product_over_gradient": found["product"].over(found["gradient"]),
    }


def _square(width: int, rows: int, cg_iterations: int) -> FeedForward:
    """A network of two square layers whose step always takes ζ + 1 products and ζ evaluations."""
    return FeedForward("square", (width, width, width, 10), False, rows, None, cg_iterations, line_search_steps=0)


Sweeps = dict[str, tuple[Sequence[int], Callable[[int], FeedForward]]]

SWEEPS: Sweeps = {
    "parameters": (
        (10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7),
        lambda n: _square(round(math.sqrt(n / 2)), 250, 3),
    ),
    "batch": ((100, 300, 1000, 3000, 10_000), lambda rows: _square(700, rows, 3)),
    "cg-iterations": ((1, 2, 5, 10, 20, 50), lambda zeta: _square(700, 500, zeta)),
}
"""What grows, over which values, and the step that is measured at each."""
_QUICK_SWEEPS: Sweeps = {
    "parameters": ((200, 800, 3200), lambda n: _square(round(math.sqrt(n / 2)), 16, 1)),
    "batch": ((20, 40, 80), lambda rows: _square(8, rows, 1)),
    "cg-iterations": ((1, 2, 4), lambda zeta: _square(8, 16, zeta)),
}


def cost_against_size(what: str, pace: Pace) -> dict[str, Any]:
    """Seconds of a step and of its floor as one size grows, and the exponent k of a + b·size^k fitted to each.

    The constant a is what does not depend on that size: beside ζ it is the gradient pass. The exponent of the parameters
    is the slope at the large end instead, where everything is a matrix product or a pass over a vector.
    """
    values, make = (_QUICK_SWEEPS if pace.quick else SWEEPS)[what]
    cases = [make(value) for value in values]
    points = [_one_size(case, value, pace) for case, value in zip(cases, values, strict=True)]
    sizes = [p["parameters"] if what == "parameters" else p["value"] for p in points]

    def fit(name: str) -> dict[str, Any]:
        seconds = [p[name] for p in points]
        return _slope(sizes[-3:], seconds[-3:]) if what == "parameters" else _fit(sizes, seconds)

    return {"what": what, "points": points, **fit("seconds"), "floor_exponent": fit("floor_seconds")["exponent"]}


def _one_size(case: FeedForward, value: int, pace: Pace) -> dict[str, Any]:
    info, step, floor = _with_floor(case, pace)
    return {
        "value": value,
        "parameters": case.parameters,
        "seconds": step.median,
        "floor_seconds": floor.median,
        "step_over_floor": step.over(floor),
        "products": info.products,
        "evaluations": info.evaluations,
    }


def _slope(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    exponent = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
    return {"exponent": exponent, "constant_seconds": 0.0, "fitted": "slope at the three largest sizes"}


def _fit(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """a, b, k of seconds ≈ a + b·size^k by least squares of the relative errors."""
    s, t = np.asarray(sizes, float) / max(sizes), np.asarray(seconds, float)

    def errors(x: Any) -> Any:
        a, b, k = x
        return (a + b * s**k) / t - 1

    found = least_squares(errors, x0=(0.5 * t.min(), t.max(), 1.0), bounds=((0, 0, 0.1), (t.min(), np.inf, 3)))
    a, _, k = found.x
    return {"exponent": float(k), "constant_seconds": float(a), "fitted": "a + b·size^k over all sizes"}


def sparse_against_dense(pace: Pace) -> dict[str, Any]:
    """Reuters' shape: the same numbers as a CSR matrix and as a dense one. Products on the gradient batch's rows, and on
    the few of the curvature batch, where passes over the vectors themselves are most of it."""
    dense = REUTERS.shrunk() if pace.quick else REUTERS
    cases = {"dense": dense, "sparse": replace(dense, sparse=True)}
    few = {name: replace(case, rows=case.curvature_rows or case.rows) for name, case in cases.items()}
    steps = {name: RepeatedStep(case, case.problem()) for name, case in cases.items()}
    found = {
        "product": interleaved({name: _product(case) for name, case in cases.items()}, pace),
        "product_few": interleaved({name: _product(case) for name, case in few.items()}, pace),
        "step": interleaved(steps, pace, before={name: step.rewind for name, step in steps.items()}),
    }
    return {
        "network": dense.name,
        "density": dense.density,
        "rows": dense.rows,
        "curvature_rows": dense.curvature_rows,
        **{what: {name: timing.record() for name, timing in times.items()} for what, times in found.items()},
        **{f"{what}_speedup": times["dense"].over(times["sparse"]) for what, times in found.items()},
    }


def _product(case: FeedForward | Other) -> Work:
    """One Gauss-Newton product, its graphs already built."""
    problem = case.problem()
    product = shf.gauss_newton_product(problem.model, problem.loss, problem.inputs, problem.targets)
    size = sum(p.numel() for p in problem.model.parameters())
    vector = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return lambda: product(vector)
