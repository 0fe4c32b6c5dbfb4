"""Choosing a method's settings by successive halving, under a budget that is equal for all methods.

Every combination of the grid trains for a while on a part of the training data; the better third goes on with three times
as long each, and so on (Jamieson & Talwalkar 2016). Scores come from training rows that were held out, never from the
test set.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shf.data.batches import count_rows, select_rows
from shf.lab.baselines.protocol import Loss, Method, MethodSpec
from shf.lab.batches import Batches, batch_rows
from shf.lab.choices import Choice, Trial
from shf.lab.clock import CLOCKS, Clock
from shf.lab.loop import Loop, Report, Spent, evaluating, judged


@dataclass(frozen=True)
class Budget:
    """What a whole search may use: seconds of training (evaluation is not counted), or steps. One of the two. Seconds are
    of the wall's clock or the processor's."""

    seconds: float | None = None
    iterations: int | None = None
    clock: str = "wall"

    def __post_init__(self) -> None:
        given = [value for value in (self.seconds, self.iterations) if value is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise ValueError(
                f"Budget(seconds={self.seconds}, iterations={self.iterations}): give one of the two, above 0 and finite"
            )
        if self.clock not in CLOCKS:
            raise ValueError(f"Budget(clock={self.clock!r}): must be one of {', '.join(CLOCKS)}")

    def share(self, parts: int) -> "Budget":
        """One of so many equal parts; at least one step."""
        if self.iterations is not None:
            return Budget(iterations=max(1, self.iterations // parts))
        assert self.seconds is not None
        return replace(self, seconds=self.seconds / parts)

    def covers(self, seconds: float, iterations: int) -> bool:
        """Whether there is some left after this use."""
        return iterations < self.iterations if self.iterations is not None else seconds < (self.seconds or 0.0)

    def to_json(self) -> dict[str, float]:
        if self.iterations is not None:
            return {"iterations": self.iterations}
        return {"seconds" if self.clock == "wall" else f"{self.clock}_seconds": self.seconds or 0.0}


@dataclass(frozen=True)
class Subject:
    """What a trial trains: a freshly initialised network and the whole training part of the data.

    Attributes:
        model: the network.
        loss: mean over rows.
        inputs: training rows; a tensor, dense or CSR.
        targets: of these rows.
        batch: the experiment's gradient batch.
        score: of the network on held-out rows, in evaluation mode; smaller is better.
        metric: the score's name.
    """

    model: nn.Module
    loss: Loss
    inputs: Any
    targets: Any
    batch: int
    score: Callable[[nn.Module, Any, Any], float]
    metric: str


Build = Callable[[float | None], Subject]
"""A subject with this amount of input dropout (None: the experiment's own). Equal calls must give equal subjects."""
Tell = Callable[[int, int, Trial], None]
"""Told after each part of a trial: the rung (from 1), how many trials the rung has, and the trial so far."""


def tune(
    experiment: str,
    spec: MethodSpec,
    build: Build,
    *,
    budget: Budget,
    fixed: Mapping[str, Any] | None = None,
    input_dropout: Sequence[float] = (),
    held_out: float = 1 / 6,
    keep: int = 3,
    seed: int = 0,
    report: Tell | None = None,
    clock: Clock | None = None,
) -> Choice:
    """Searches the method's grid, and amounts of input dropout.

    Args:
        experiment: its name, for the record.
        spec: the method.
        build: makes what a trial trains.
        budget: of the whole search.
        fixed: settings of the method that are not searched but not its defaults either (weight decay).
        input_dropout: amounts to try; empty to keep the experiment's own.
        held_out: the share of training rows that score the trials.
        keep: one in so many trials goes on to the next rung.
        seed: of batches, held-out rows and the methods' random draws.
        report: see `Tell`.
        clock: in place of the one that the budget names.

    Raises:
        ValueError: if there is nothing to choose between, or an argument is out of range.
        ArithmeticError: if every combination diverged.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"tune(held_out={held_out}): must be in (0, 1)")
    if keep < 2:
        raise ValueError(f"tune(keep={keep}): must be at least 2")
    combinations = list(_combinations(spec, input_dropout))
    if len(combinations) < 2:
        raise ValueError(
            f"{spec.name} has nothing to tune: its grid is empty and no amounts of input dropout were given"
        )
    rows = _split(count_rows(build(combinations[0][1]).inputs), held_out, seed)
    given = {**(fixed or {}), **({"seed": seed} if "seed" in spec.defaults else {})}
    now = clock or CLOCKS[budget.clock]
    runs = [_Run(spec, build, rows, {**given, **settings}, settings, p, seed, now) for settings, p in combinations]
    survivors = _halve(runs, budget, keep, report)
    best = min(survivors, key=lambda run: run.score)
    if not math.isfinite(best.score):
        raise ArithmeticError(f"{spec.name} on {experiment}: every combination of settings diverged; widen the grid")
    return Choice(
        experiment=experiment,
        method=spec.name,
        settings=best.settings,
        input_dropout=best.input_dropout,
        score=best.score,
        metric=best.metric,
        budget=budget.to_json(),
        held_out=len(rows[1]),
        seed=seed,
        edge=_edges(spec, best.settings),
        trials=tuple(run.trial() for run in runs),
    )


def _halve(runs: Sequence["_Run"], budget: Budget, keep: int, report: Tell | None) -> Sequence["_Run"]:
    """Runs all rungs; returns those of the last, with their scores."""
    sizes = _rungs(len(runs), keep)
    for rung, size in enumerate(sizes, start=1):
        ranked = sorted(runs, key=lambda run: run.score)
        runs = ranked[:size]
        for run in ranked[size:]:
            run.release()
        share = budget.share(len(sizes) * size)
        for run in runs:
            run.advance(share)
            if report is not None:
                report(rung, size, run.trial())
    return runs


def _rungs(count: int, keep: int) -> list[int]:
    """How many trials each rung has: n, n/keep, … as long as there is something to choose between."""
    sizes = [count]
    while (following := math.ceil(sizes[-1] / keep)) > 1:
        sizes.append(following)
    return sizes


def _combinations(spec: MethodSpec, dropout: Sequence[float]) -> Iterator[tuple[dict[str, Any], float | None]]:
    amounts: Sequence[float | None] = dropout or (None,)
    for values in itertools.product(*spec.grid.values()):
        for amount in amounts:
            yield dict(zip(spec.grid, values, strict=True)), amount


def _split(rows: int, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on, and rows that are held out."""
    count = round(rows * held_out)
    if not 0 < count < rows:
        raise ValueError(f"tune(held_out={held_out}): of {rows} training rows this holds out {count}")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return order[count:].sort().values, order[:count].sort().values


def _edges(spec: MethodSpec, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings at an end of an ordered grid with something between its ends."""
    return tuple(n for n, values in spec.grid.items() if len(values) > 2 and settings[n] in (values[0], values[-1]))


@dataclass
class _Run:
    """A trial at work: it trains in portions and is scored after each."""

    spec: MethodSpec
    build: Build
    rows: tuple[Tensor, Tensor]
    complete: Mapping[str, Any]
    settings: Mapping[str, Any]
    input_dropout: float | None
    seed: int
    clock: Clock
    scores: list[float | None] = field(default_factory=list)
    score: float = math.inf
    metric: str = ""
    spent: Spent = field(default_factory=Spent)
    training: tuple[Subject, Method, Loop] | None = None

    def advance(self, share: Budget) -> None:
        """Trains for one more share of the budget, then scores the network on the held-out rows."""
        self.training = self.training or self._begin()
        subject, method, loop = self.training
        was = replace(self.spent)
        for _ in loop.until(lambda at: not share.covers(at.elapsed - was.elapsed, at.iteration - was.iteration)):
            pass
        self.score = math.inf if loop.diverged is not None else self._evaluate(subject, method)
        self.scores.append(self.score if math.isfinite(self.score) else None)

    def release(self) -> None:
        """Gives up network and method: the trial is over."""
        self.training = None

    def trial(self) -> Trial:
        return Trial(
            dict(self.settings), self.input_dropout, tuple(self.scores), self.spent.iteration, self.spent.elapsed
        )

    def _begin(self) -> tuple[Subject, Method, Loop]:
        subject = self.build(self.input_dropout)
        self.metric = subject.metric
        method = self.spec.build(subject.model, subject.loss, self.complete)
        return subject, method, Loop(partial(next, self._steps(subject, method)), self.clock, self.spent)

    def _steps(self, subject: Subject, method: Method) -> Iterator[Report]:
        """Without end, each yielding its report."""
        size = subject.batch if self.spec.batch == "experiment" else int(self.spec.batch)
        rows = self.rows[0]
        parts = batch_rows(len(rows), size, seed=self.seed, epoch=0)
        batches = Batches([rows[part] for part in parts], subject.inputs, subject.targets)
        steps: Iterable[tuple[Any, Any]] = [(batches, None)] if self.spec.reads_batches else batches
        subject.model.train()
        while True:
            for inputs, targets in steps:
                yield method.step(inputs, targets)
            method.next_epoch()

    def _evaluate(self, subject: Subject, method: Method) -> float:
        """For a method that averages its iterates, the average is scored."""
        rows = self.rows[1]
        with evaluating(subject.model), judged(method):
            score = subject.score(subject.model, select_rows(subject.inputs, rows), select_rows(subject.targets, rows))
        return score if math.isfinite(score) else math.inf
