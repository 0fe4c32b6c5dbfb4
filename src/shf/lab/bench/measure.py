"""Times of several things that take turns in one process: what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import shf
from shf.lab.clock import Clock, wall

Work = Callable[[], object]


def take_over(optimizer: shf.SHF, first: shf.SHF) -> None:
    """Goes on from the state of an optimizer with other options, on purpose: of that a user would be warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shf.SHFWarning)
        optimizer.load_state_dict(first.state_dict())


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs of one thing."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def over(self, other: Timing) -> float:
        """How many times as long as `other`: the median of the quotients of runs that were neighbours in time."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))

    def record(self) -> dict[str, Any]:
        return {
            "median_seconds": self.median,
            "least_seconds": min(self.seconds),
            "most_seconds": max(self.seconds),
            "repetitions": len(self.seconds),
        }


@dataclass(frozen=True)
class Pace:
    """How thoroughly to measure.

    Attributes:
        repetitions: the fewest rounds of interleaved runs.
        seconds: keep adding rounds until this much time is spent.
        most: the most rounds.
        quick: shrunk shapes and one repetition: shows that everything runs, its numbers mean nothing.
        clock: reads the time.
    """

    repetitions: int = 3
    seconds: float = 10.0
    most: int = 200
    quick: bool = False
    clock: Clock = wall


QUICK = Pace(quick=True, repetitions=1, seconds=0.0)


def interleaved(
    tasks: Mapping[str, Work], pace: Pace, *, before: Mapping[str, Work] | None = None
) -> dict[str, Timing]:
    """Runs the tasks in turns and times each run; `before` a task, outside of its time, what puts back what it changes."""
    before = before or {}

    def timed(name: str) -> float:
        if name in before:
            before[name]()
        start = pace.clock()
        tasks[name]()
        return pace.clock() - start

    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for name in tasks:  # once beforehand: memory is touched, caches are filled
        timed(name)
    gc.collect()
    begun, rounds = pace.clock(), 0
    while rounds < pace.repetitions or (pace.clock() - begun < pace.seconds and rounds < pace.most):
        for name in tasks:
            seconds[name].append(timed(name))
        rounds += 1
    return {name: Timing(found) for name, found in seconds.items()}
