"""Who watches a run: the runner tells an `Observer` what happens; the observer decides how to show it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from shf.lab.runconfig import RunConfig


class Status(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Progress:
    """How far a run is: the fraction of its budget, and the seconds of training spent and still to come."""

    fraction: float
    elapsed: float
    left: float | None
    epoch: int
    epochs: int | None
    iteration: int


@dataclass(frozen=True)
class RunResult:
    """What a run ended with; `saved` is False if its record could not be written."""

    status: Status
    directory: Path
    config: RunConfig
    summary: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    saved: bool = True


class Observer:
    """Sees a run and shows nothing; subclasses override what they care about."""

    def started(self, config: RunConfig, directory: Path, resumed_at: int) -> None:
        """Training is about to start; `resumed_at` is the iteration it continues after, 0 for a new run."""

    def estimate(self, seconds_per_epoch: float, progress: Progress) -> None:
        """After the first iterations: what an epoch takes here, and with it the whole run."""

    def iteration(self, row: Mapping[str, Any], progress: Progress) -> None:
        """An iteration was done."""

    def epoch(self, row: Mapping[str, Any], progress: Progress) -> None:
        """An epoch was done and evaluated."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def warn(self, text: str) -> None:
        """Something is wrong, and the run goes on."""

    def finished(self, result: RunResult) -> None:
        """The run ended in one way or another."""

    def closed(self) -> None:
        """Nothing more will come, be it after an error: leave the screen in order."""
