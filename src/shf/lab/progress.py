"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere.

Nothing here fails where it cannot be written: a run does not depend on who watches it (see `Outlet`).
"""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from shf.lab import observer
from shf.lab.clock import wall
from shf.lab.observer import Observer, RunResult, Status
from shf.lab.outlet import Outlet
from shf.lab.runconfig import RunConfig
from shf.lab.words import duration

_LINE_SECONDS = 10.0
_REFRESH_SECONDS = 0.1


def show(console: Console, *, quiet: bool = False) -> Observer:
    """The observer that suits the console: a bar if it is a terminal, lines if not, warnings alone if `quiet`."""
    if quiet:
        return QuietObserver()
    return BarObserver(console) if console.is_terminal else LineObserver(console.file)


def measures(row: Mapping[str, Any], metric: str) -> str:
    """Loss, judged error, λ and ρ of a row, as far as it has them."""
    parts = []
    if "objective" in row:
        parts.append(f"loss {float(row['objective']):.4g}")
    if metric in row:
        parts.append(f"{metric.replace('_', ' ')} {float(row[metric]):.4g}")
    if "damping" in row:
        parts.append(f"λ {float(row['damping']):.3g}")
    if "reduction_ratio" in row:
        parts.append(f"ρ {float(row['reduction_ratio']):.2f}")
    return "  ".join(parts)


class QuietObserver(Observer):
    """Warnings only, to standard error."""

    def __init__(self) -> None:
        self._errors = Outlet(sys.stderr)

    def warn(self, text: str) -> None:
        self._errors.line(f"warning: {text}")


class LineObserver(QuietObserver):
    """A line now and then, for logs and pipes."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._line = Outlet(stream).line
        self._last = 0.0
        self._metric = ""

    def started(self, config: RunConfig, directory: Path, resumed_at: int) -> None:
        self._metric = config.experiment.metric
        begins = f"continues after iteration {resumed_at}" if resumed_at else "starts"
        self._line(f"{config.experiment.name} with {config.method} {begins} in {directory}")

    def estimate(self, seconds_per_epoch: float, progress: observer.Progress) -> None:
        left = f", about {duration(progress.left)} of training to go" if progress.left is not None else ""
        self._line(f"an epoch takes {seconds_per_epoch:.2g} s here{left}")

    def epoch(self, row: Mapping[str, Any], progress: observer.Progress) -> None:
        if wall() - self._last < _LINE_SECONDS and progress.fraction < 1.0:
            return
        self._last = wall()
        left = f"  {duration(progress.left)} left" if progress.left is not None else ""
        self._line(f"epoch {row['epoch']:g}  {measures(row, self._metric)}  {duration(progress.elapsed)}{left}")

    def note(self, text: str) -> None:
        self._line(text)

    def finished(self, result: RunResult) -> None:
        self._line(closing(result))


class BarObserver(Observer):
    """A live bar: epoch, loss, error, λ, ρ and the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        console.file = cast(IO[str], Outlet(console.file))
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[measures]}"),
            TextColumn("[dim]{task.fields[left]}"),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._task: TaskID | None = None
        self._metric = ""
        self._latest: dict[str, Any] = {}
        self._last = 0.0

    def started(self, config: RunConfig, directory: Path, resumed_at: int) -> None:
        self._metric = config.experiment.metric
        begins = f"continues after iteration {resumed_at} in" if resumed_at else "→"
        self._console.print(
            f"[bold]{escape(config.experiment.name)}[/] with [bold]{escape(config.method)}[/] {begins} "
            f"{escape(str(directory))}",
            highlight=False,
        )
        self._task = self._bar.add_task(escape(config.method), total=1.0, measures="", left="")
        self._bar.start()

    def estimate(self, seconds_per_epoch: float, progress: observer.Progress) -> None:
        if progress.left is not None:
            words = f"about {duration(progress.left)} of training ({seconds_per_epoch:.2g} s per epoch here)"
            self._console.print(Text(words, style="dim"))

    def iteration(self, row: Mapping[str, Any], progress: observer.Progress) -> None:
        self._latest |= row
        self._update(progress)

    def epoch(self, row: Mapping[str, Any], progress: observer.Progress) -> None:
        self._latest[self._metric] = row[self._metric]
        self._update(progress)
        if wall() - self._last > _REFRESH_SECONDS:
            self._last = wall()
            self._bar.refresh()

    def _update(self, progress: observer.Progress) -> None:
        if self._task is None:
            return
        left = f"{duration(progress.left)} left" if progress.left is not None else ""
        of = f"/{progress.epochs}" if progress.epochs is not None else ""
        shown = f"epoch {progress.epoch}{of}  {measures(self._latest, self._metric)}"
        self._bar.update(self._task, completed=progress.fraction, measures=escape(shown), left=left)

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def warn(self, text: str) -> None:
        self._console.print(Text(f"warning: {text}", style="yellow"))

    def finished(self, result: RunResult) -> None:
        self._bar.stop()
        self._console.print(Text(closing(result)))

    def closed(self) -> None:
        self._bar.stop()


def closing(result: RunResult) -> str:
    """The last line of a run: what it reached and how to go on."""
    summary = result.summary
    value = summary.get("value")
    reached = "" if value is None else f"{summary['metric'].replace('_', ' ')} {float(value):.4g}"
    spent = duration(float(summary.get("elapsed_seconds", 0.0)))
    epochs = summary.get("epochs")
    where = f"after {epochs} epoch{'' if epochs == 1 else 's'}, {spent} of training"
    go_on = f"shf resume {shlex.quote(str(result.directory))}"
    if not result.saved:
        return f"ended {where}, and could not be saved; from the last checkpoint: {go_on}"
    if result.status is Status.INTERRUPTED:
        return f"stopped {where}; saved. Go on with: {go_on}"
    if result.status is Status.DIVERGED:
        return f"diverged {where}: the objective is not finite any more"
    return f"finished {where}: {reached}"
