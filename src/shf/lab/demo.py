"""``shf demo``: SHF's preset against tuned Adam and Schedule-Free, in equal processor time and on real data.

Elevation is learned at 20,000 places of a map, and asked for at others. The problem was chosen because the errors on both
go down together; the preset's constants were not chosen on it. Nothing is downloaded and nothing is staged: the last
sentence says who is ahead on what was seen and on what was not, whoever it is. Adam's rate was chosen beforehand by
``shf tune terrain-demo`` on held-out rows; the record of that search is in the package's file of tuned settings and in the
run's ``run.json``. Schedule-Free has its package's rate; `fast` is `shf.presets.fast` as it is.
"""

import itertools
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shf.lab import report
from shf.lab.experiments import ExperimentError
from shf.lab.observer import Status
from shf.lab.outlet import Outlet
from shf.lab.recorder import holds_run
from shf.lab.records import RunRecord, number, plain, read_run
from shf.lab.words import duration

EXPERIMENT = "terrain-demo"
NAMES = {"fast": "SHF fast", "adam": "Adam", "schedule-free": "Schedule-Free"}
"""The contestants, in the order in which they start: where there are two cores, an opponent has the machine for itself."""
SEEN, UNSEEN = "train_rms_error", "test_rms_error"


def run_demo(
    out: Path | None,
    *,
    minutes: float = 0.6,
    seed: int = 0,
    force: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Run the three, write the report, print the table and the verdict; 0, or 1 if a run was stopped or not saved."""
    place = out if out is not None else _fresh(Path("runs"))
    if not force and (taken := [place / method for method in NAMES if holds_run(place / method)]):
        raise ExperimentError(f"{taken[0]} holds a run; choose another --out, or replace it with --force")
    words = ["--minutes", f"{minutes:.12g}", "--seed", str(seed), *(["--force"] if force else [])]
    codes = _side_by_side(
        {method: _command(method, place / method, words) for method in NAMES},
        min(_cores(), len(NAMES)),
        (lambda line: None) if quiet or as_json else Outlet(sys.stderr).line,
    )
    records = [read_run(place / method) for method in NAMES if holds_run(place / method)]
    if len(records) < len(NAMES) or any(record.status == Status.INTERRUPTED for record in records):
        return 1
    page = place / "report.html"
    report.write_report(records, page)
    console = Console()
    if as_json:
        rows = [{"method": record.config["method"], **record.run["summary"]} for record in records]
        console.print_json(json.dumps(plain({"runs": rows, "report": str(page), "verdict": verdict(records)})))
    else:
        console.print(_table(records))
        console.print(Text(verdict(records), style="bold"), soft_wrap=True)
        console.print(
            Text(f"Report: {page}, to open in a browser: {_opener()} {shlex.quote(str(page))}"), soft_wrap=True
        )
    return (
        1 if any(code and record.status != Status.DIVERGED for code, record in zip(codes, records, strict=True)) else 0
    )


def _fresh(below: Path) -> Path:
    """The first of runs/demo, runs/demo-2, … that is not there or empty."""
    places = (below / (f"demo-{n}" if n > 1 else "demo") for n in itertools.count(1))
    return next(place for place in places if not place.exists() or not any(place.iterdir()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _command(method: str, directory: Path, words: Sequence[str]) -> list[str]:
    """The run as anybody would start it, on one thread, with a row per epoch."""
    run = [sys.executable, "-m", "shf", "run", EXPERIMENT, "--optimizer", method, "--out", str(directory)]
    return [*run, *words, "--clock", "processor", "--threads", "1", "--rows-every", "1000000"]


def _side_by_side(commands: Mapping[str, list[str]], at_once: int, say: Callable[[str], object]) -> list[int]:
    """Run the commands, so many at a time, and pass on what they say; their exit codes. After Ctrl-C, of which they hear
    themselves, no further one is started."""

    def run(name: str) -> int:
        with subprocess.Popen(commands[name], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr or ():
                say(f"{name}: {line.rstrip()}")
        return process.returncode

    pool = ThreadPoolExecutor(at_once)
    try:
        return list(pool.map(run, commands))
    finally:
        pool.shutdown(cancel_futures=True)


def _opener() -> str:
    return {"darwin": "open", "win32": "start"}.get(sys.platform, "xdg-open")


def _table(records: Sequence[RunRecord]) -> Table:
    """What each reached in the same time."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    headings = (
        "optimizer",
        "training error, m",
        "error on unseen data, m",
        "epochs",
        "processor time",
        "set beforehand",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("optimizer", "set beforehand") else "right")
    for record in records:
        errors = (_error(record, part) for part in (SEEN, UNSEEN))
        shown = ("diverged" if error == math.inf else f"{error:.1f}" for error in errors)
        last = record.epochs[-1]
        row = (NAMES[record.config["method"]], *shown, f"{last['epoch']:.0f}", duration(last["elapsed_seconds"]))
        table.add_row(*map(Text, (*row, str(record.config["tuning"].get("words", "nothing")))))
    return table


def verdict(records: Sequence[RunRecord]) -> str:
    """One sentence that says who is ahead where it was trained, and on data that it has not seen."""
    if all(_error(record, SEEN) == math.inf for record in records):
        return "All of them diverged: nobody won."
    seconds = duration(max(record.epochs[-1]["elapsed_seconds"] for record in records))
    seen, unseen = _standing(records, SEEN, "training error"), _standing(records, UNSEEN, "error on unseen data")
    return f"After {seconds} of processor time each, {seen}, and {unseen}."


def _standing(records: Sequence[RunRecord], part: str, words: str) -> str:
    first, second = sorted(records, key=lambda record: _error(record, part))[:2]
    lowest, next_one = _error(first, part), _error(second, part)
    ahead, behind = (NAMES[record.config["method"]] for record in (first, second))
    if next_one == math.inf:
        return f"{ahead} has the lowest {words}, {lowest:.1f} m (the others diverged)"
    if next_one - lowest < 0.01 * lowest:
        return f"{ahead} and {behind} are level in {words} (within 1 %), {lowest:.1f} m"
    return f"{ahead} has the lowest {words}, {lowest:.1f} m (then {behind}, {next_one:.1f} m)"


def _error(record: RunRecord, part: str) -> float:
    """At the end; ∞ for a run that diverged."""
    value = number(record.epochs[-1].get(part)) if record.epochs else math.nan
    return value if math.isfinite(value) and record.status != Status.DIVERGED else math.inf
