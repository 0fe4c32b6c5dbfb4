"""The only writer of a run directory. A disk that fails is warned about, and never stops the training.

Order of a checkpoint: metrics are flushed and synced, the best one is renamed into place, then the checkpoint, then
``run.json``. A kill between any two of them leaves a state from which the run continues exactly.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from shf.lab.checkpoint import CheckpointStore
from shf.lab.clock import wall
from shf.lab.files import write_atomically
from shf.lab.npz import write_npz
from shf.lab.observer import Status
from shf.lab.records import METRICS_FILE, RUN_FILE, SAMPLES_FILE, MetricsFile, Seal, write_run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

CHECKPOINTS = "checkpoints"
EVENTS = "events"

Warn = Callable[[str], None]


def holds_run(directory: Path) -> bool:
    """Whether a directory holds the record of a run, also an unfinished one."""
    return any((directory / name).exists() for name in (RUN_FILE, METRICS_FILE, CHECKPOINTS))


class Recorder:
    """Writes rows, checkpoints and the summary of one run."""

    def __init__(
        self,
        directory: Path,
        record: Mapping[str, Any],
        *,
        warn: Warn,
        resume_from: Seal | None = None,
        store: CheckpointStore | None = None,
        checkpoint_seconds: float = 60.0,
        tensorboard: bool = False,
        first_iteration: int = 0,
    ) -> None:
        self._directory = directory
        self._record = dict(record)
        self._warn = warn
        self._store = store or CheckpointStore(directory / CHECKPOINTS)
        self._every = checkpoint_seconds
        self._last = wall()
        self._failing: set[str] = set()
        self._best: dict[str, Any] | None = None
        self.warnings: list[str] = list(record.get("warnings") or ())
        path = directory / METRICS_FILE
        if resume_from is None:
            self._clear()
            self._metrics = MetricsFile(path)
            self._write_record(self._metrics.seal())
        else:
            self._metrics = MetricsFile.resume(path, resume_from)  # refuses before anything is written
            # run.json first: its seal must never be ahead of the metrics that are cut back next
            self._write_record(resume_from)
            self._metrics.cut()
        self._events: SummaryWriter | None = None
        if tensorboard:
            self._guard_events(lambda: self._open_events(first_iteration))

    def row(self, row: Mapping[str, Any]) -> None:
        """Append a row; epochs go to disk at once, iterations when enough of them wait."""
        self._metrics.append(row)
        if row.get("row") == "epoch" or self._metrics.crowded:
            self._guarded("metrics.jsonl", self._metrics.flush)
        if (events := self._events) is not None:
            self._guard_events(lambda: _add_scalars(events, row))

    @property
    def checkpoint_due(self) -> bool:
        return wall() - self._last >= self._every

    def checkpoint(self, iteration: int, state: Mapping[str, Any]) -> bool:
        """Save the state beside the position of the metrics; False, and a warning, if the disk refuses."""
        seal = self._metrics.seal()

        def save() -> None:
            self._metrics.flush(sync=True)
            self._save_best()
            self._store.save(iteration, {**state, "metrics": seal.to_json()})
            self._write_record(seal)

        saved = self._guarded("the checkpoint", save)
        self._last = wall()
        return saved

    def best(self, state: Mapping[str, Any]) -> None:
        """Keep this as the best so far; it is written with the next checkpoint.

        A kill before that loses nothing: the run goes back behind it and finds it again.
        """
        self._best = copy.deepcopy(dict(state))

    def _save_best(self) -> None:
        if self._best is not None:
            self._store.save_best(self._best)
            self._best = None

    def finish(self, status: Status, summary: Mapping[str, Any], samples: Mapping[str, NDArray[Any]]) -> bool:
        """Write the last rows, the samples and the summary; False, and a warning, if the disk refuses."""
        if self._events is not None:
            self._guard_events(self._events.close)  # first, for its warning to be in the record
        self._record |= {"status": status.value, "summary": dict(summary), "warnings": list(self.warnings)}
        self._record["ended"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

        def write() -> None:
            self._metrics.flush(sync=True)
            self._save_best()
            if samples:
                content = write_npz(samples)
                write_atomically(self._directory / SAMPLES_FILE, content)
                self._record["samples"] = Seal.of(content).to_json()
            self._write_record(self._metrics.seal())

        return self._guarded("the record", write)

    def _write_record(self, seal: Seal) -> None:
        self._record["metrics"] = seal.to_json()
        write_run(self._directory / RUN_FILE, self._record)

    def _open_events(self, first_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(self._directory / EVENTS), purge_step=first_iteration + 1)

    def _guard_events(self, action: Callable[[], object]) -> None:
        """Do it; if the disk refuses, go on without events: their writer does not recover."""
        if not self._guarded("the TensorBoard events", action, "training goes on without them"):
            self._events = None

    def _guarded(
        self,
        what: str,
        action: Callable[[], object],
        then: str = "training goes on, the last good one stays valid",
    ) -> bool:
        """Do it; if the disk refuses, say so once per series of failures, and what comes `then`, and go on."""
        try:
            action()
        except OSError as error:
            if what not in self._failing:
                self._failing.add(what)
                self.say(f"{what} could not be written ({error}); {then}")
            return False
        if what in self._failing:
            self._failing.discard(what)
            self.say(f"{what} can be written again")
        return True

    def say(self, text: str) -> None:
        """A warning, to the person who watches and to the record."""
        self.warnings.append(text)
        with contextlib.suppress(OSError, ValueError):  # whoever watches may be gone
            self._warn(text)

    def _clear(self) -> None:
        """Remove what another run left, for a run that was told to replace it."""
        self._store.clear()
        for name in (METRICS_FILE, SAMPLES_FILE):
            (self._directory / name).unlink(missing_ok=True)
        for events in (self._directory / EVENTS).glob("events.out.tfevents.*"):
            with contextlib.suppress(OSError):
                events.unlink()


def _add_scalars(events: SummaryWriter, row: Mapping[str, Any]) -> None:
    """Every number of a row under its name, against the iterations."""
    kind = str(row.get("row"))
    for name, value in row.items():
        if isinstance(value, int | float) and name not in ("row", "iteration"):
            events.add_scalar(f"{kind}/{name}", value, int(row["iteration"]))
