"""`shf.presets.fast`, with nothing set, against optimizers at their packages' defaults and tuned ones, in equal time.

    python benchmarks/suite.py --seconds 60 --seed 0 1 2     the runs that are not yet in results/suite
    python benchmarks/suite.py page                          their table, in docs/fast.md

`--problems` chooses some, by the beginnings of their names or as `development` or `test` (the default); `--only` chooses
methods by name. The problems are in benchmarks/problems.py. Seconds are those of the processor, of one thread and of updates
alone.

Tuned methods have seven trials, each of a whole run's length and with a cosine that brings the rate to zero at its end
(Schedule-Free has no use for one). Every trial is a run like any other, and so is the default: for every measure and seed
the best of the eight is what stands in the tables, as though the search had known the held-out data.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # the development set has networks of the examples

import shf  # noqa: E402
from problems import DEVELOPMENT, TEST, Problem, Rows  # noqa: E402
from shf.data.batches import count_rows, select_rows  # noqa: E402
from shf.lab.baselines.objective import TrainingObjective  # noqa: E402
from shf.lab.baselines.registry import find  # noqa: E402
from shf.lab.clock import CLOCKS  # noqa: E402
from shf.lab.contest import Method, Row, Step, Task, contest, in_epochs, parser, read_contest  # noqa: E402
from shf.lab.pages import fill, spread, table  # noqa: E402
from shf.lab.records import RunRecord  # noqa: E402
from shf.model.network import call_model  # noqa: E402

RECORDS, PAGE = ROOT / "results" / "suite", ROOT / "docs" / "fast.md"
MEASURED = 2000
"""Cases of either set that are measured, evenly spread."""
ROWS, FAST_ROWS = 200, 500
"""In a batch; of few cases, at most a third of them."""


def task(name: str, problem: Problem) -> Task:
    def part(rows: Rows) -> Rows:
        cases = count_rows(rows[0])
        chosen = torch.linspace(0, cases - 1, min(cases, MEASURED)).long()
        return select_rows(rows[0], chosen), select_rows(rows[1], chosen)

    train, held_out = part(problem.train), part(problem.held_out)

    def batches(size: int, source: torch.Generator) -> Iterator[Rows]:
        while True:
            for rows in torch.randperm(problem.cases, generator=source).split(size):
                yield select_rows(problem.train[0], rows), select_rows(problem.train[1], rows)

    def evaluate(model: nn.Module) -> Row:
        """With one and the same noise where a network draws any. Statistics of BatchNorm are taken anew: those that training
        left are not of a method's average, where it has one."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
                model = copy.deepcopy(model)
                update_bn([train[0]], model)
                model.eval()
            seen, unseen = (call_model(model, x) for x, _ in (train, held_out))
        penalty = (
            0.5
            * problem.weight_decay
            * sum(p.square().sum().item() for p in model.parameters() if p.ndim >= 2 and p.requires_grad)
        )
        return {
            "train_loss": problem.loss(seen, train[1]).item() + penalty,
            "held_out_loss": problem.loss(unseen, held_out[1]).item(),
            "train_error": problem.error(seen, train[1]),
            "held_out_error": problem.error(unseen, held_out[1]),
        }

    return Task(name, problem.model, batches, evaluate, "held_out_loss")


Make = Callable[[nn.Module, Mapping[str, float]], list[Any]]
"""From a network and settings to optimizers that share its parameters."""


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def muon(model: nn.Module, settings: Mapping[str, float]) -> list[Any]:
    """Matrices of hidden layers; AdamW has the rest: embeddings, the last matrix, biases, convolutions. A rate that is given
    is that of both, with updates of equal size."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in trained(model) if p.ndim == 2 and id(p) not in embeddings][:-1]
    hidden = {id(p) for p in matrices}
    others = [p for p in trained(model) if id(p) not in hidden]
    same = {"adjust_lr_fn": "match_rms_adamw"} if settings else {}
    return [
        *([torch.optim.Muon(matrices, **settings, **same)] if matrices else []),
        torch.optim.AdamW(others, **settings),
    ]


def schedule_free(model: nn.Module, settings: Mapping[str, float]) -> list[Any]:
    from schedulefree import AdamWScheduleFree

    return [AdamWScheduleFree(trained(model), **settings)]


def prodigy(model: nn.Module, settings: Mapping[str, float]) -> list[Any]:
    from prodigyopt import Prodigy

    return [Prodigy(trained(model), **settings)]


def soap(model: nn.Module, settings: Mapping[str, float]) -> list[Any]:
    from pytorch_optimizer import SOAP

    return [SOAP(trained(model), **settings)]


DEFAULTS: Mapping[str, Make] = {
    "adam": lambda model, settings: [torch.optim.Adam(trained(model), **settings)],
    "adamw": lambda model, settings: [torch.optim.AdamW(trained(model), **settings)],
    "schedule-free": schedule_free,
    "prodigy": prodigy,
    "soap": soap,
    "muon": muon,
}
"""As their packages set them."""

TRIALS: Mapping[str, tuple[tuple[float, int], ...]] = {
    "adam": ((3e-4, 200), (1e-3, 200), (3e-3, 200), (1e-2, 200), (1e-3, 50), (3e-3, 50), (3e-3, 1000)),
    "schedule-free": ((1e-3, 200), (5e-3, 200), (1e-2, 200), (3e-2, 200), (2.5e-3, 50), (5e-3, 50), (5e-3, 1000)),
    "soap": ((3e-4, 200), (1e-3, 200), (3e-3, 200), (1e-2, 200), (3e-3, 50), (3e-3, 1000), (1e-2, 1000)),
    "muon": ((1e-3, 200), (3e-3, 200), (1e-2, 200), (3e-2, 200), (1e-3, 50), (3e-3, 50), (1e-2, 1000)),
}
"""Rates and rows of tuned methods."""


def first_order(
    make: Make, settings: Mapping[str, float], problem: Problem, seconds: float, model: nn.Module, _: float
) -> Step:
    """A step of torch optimizers, their rates on a cosine from their own to 0 after so many seconds (∞: constant)."""
    objective = TrainingObjective(model, problem.loss, weight_decay=problem.weight_decay)
    optimizers = make(model, settings)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    averaging = [optimizer for optimizer in optimizers if hasattr(optimizer, "eval")]
    for optimizer in averaging:
        optimizer.train()
    clock, spent = CLOCKS["processor"], 0.0

    def step(inputs: Any, targets: Any) -> None:
        nonlocal spent
        started = clock()
        objective.backward(inputs, targets)
        factor = 0.5 + 0.5 * math.cos(math.pi * min(spent / seconds, 1.0))
        for optimizer, initial in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, initial, strict=True):
                if seconds < math.inf:
                    group["lr"] = factor * rate
            optimizer.step()
        spent += clock() - started

    @contextlib.contextmanager
    def averaged() -> Iterator[None]:
        for optimizer in averaging:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in averaging:
                optimizer.train()

    step.averaged = averaged  # type: ignore[attr-defined]
    return step


def methods(problem: Problem, seconds: float) -> list[Method]:
    def most(rows: int) -> int:
        return min(rows, math.ceil(problem.cases / 3))

    def fast(model: nn.Module, _: float) -> Step:
        optimizer = find("fast").build(model, problem.loss, {"weight_decay": problem.weight_decay})
        return in_epochs(optimizer, math.ceil(problem.cases / most(FAST_ROWS)), optimizer.averaged)  # type: ignore[attr-defined]

    found = [Method("fast", most(FAST_ROWS), fast, settings=dict(shf.presets.fast))]
    for name, make in DEFAULTS.items():
        found.append(Method(name, most(ROWS), partial(first_order, make, {}, problem, math.inf)))
    for name, trials in TRIALS.items():
        length = math.inf if name == "schedule-free" else seconds
        for rate, rows in trials:
            build = partial(first_order, DEFAULTS[name], {"lr": rate}, problem, length)
            settings = {"lr": rate, "cosine": name != "schedule-free"}
            found.append(Method(f"{name}-{rate:g}-{rows}", most(rows), build, settings=settings))
    return found


MEASURES = {"held_out_loss": "held-out", "train_loss": "training"}


def page() -> None:
    """The test set's table: where methods end, and when `fast` has what the best of the others ends with."""
    found = {name: read_contest(RECORDS / name) for name in TEST if (RECORDS / name).exists()}
    others = [name for name in DEFAULTS if any(name in runs for runs in found.values())]
    heads = ["problem", *("fast", *others), *(f"`fast` has their best, {words}, after" for words in MEASURES.values())]
    rows, ahead = [], dict.fromkeys(MEASURES, 0)
    for name, runs in found.items():
        best = {m: min(least_end(runs[o], m) for o in others if o in runs) for m in MEASURES}
        when = {m: spread_of([r.reached(m, best[m], CLOCK) for r in runs["fast"].values()]) for m in MEASURES}
        for m in MEASURES:
            ahead[m] += least_end(runs["fast"], m) <= best[m]
        rows.append([TEST[name][0], *(ends(runs.get(o, {})) for o in ("fast", *others)), *when.values()])
    words = ", ".join(f"{ahead[m]} of {len(rows)} by {MEASURES[m]} loss" for m in MEASURES)
    fill(PAGE, {"suite": f"{table(heads, rows)}\n\n`fast` ends at or below the best of the others on {words}."})


CLOCK = "processor_seconds"


def least_end(runs: Mapping[int, RunRecord], measure: str) -> float:
    """The end of a method's best seed; infinite where it is not a number."""
    return min((end for r in runs.values() if math.isfinite(end := float(r.column(measure)[-1]))), default=math.inf)


def ends(runs: Mapping[int, RunRecord]) -> str:
    """Held-out and training loss at the end, means over seeds."""
    if not runs:
        return ""
    means = [sum(float(r.column(m)[-1]) for r in runs.values()) / len(runs) for m in MEASURES]
    return " / ".join(f"{mean:.3g}" if math.isfinite(mean) else "diverged" for mean in means)


def spread_of(seconds: list[float]) -> str:
    return spread(seconds, ".2g") + " s" if all(map(math.isfinite, seconds)) else "never"


def main() -> None:
    if sys.argv[1:] == ["page"]:
        page()
        return
    options = parser(__doc__, seconds=60)
    options.set_defaults(out=RECORDS, points=15)
    options.add_argument("--problems", nargs="+", default=["test"], help="beginnings of names, development, test")
    chosen = options.parse_args()
    words = chosen.problems
    if unknown := [w for w in words if w not in SETS and not any(n.startswith(w) for n in {**DEVELOPMENT, **TEST})]:
        raise SystemExit(f"--problems {' '.join(unknown)}: the problems are {', '.join((*SETS, *DEVELOPMENT, *TEST))}")
    for part, problems in SETS.items():
        for name, (_, make) in problems.items():
            if part in words or name.startswith(tuple(words)):
                problem = make()
                contest([task(name, problem)], methods(problem, chosen.seconds), chosen)


SETS = {"development": DEVELOPMENT, "test": TEST}

if __name__ == "__main__":
    main()
