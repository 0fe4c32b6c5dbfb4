"""``shf demo``: SHF, as in the paper and beyond it, against tuned Adam and NAG in equal time on generated curves.

Nothing is downloaded and nothing is staged: the four run one after the other with the same seconds of training, and the
last line says who won, whoever it was. Adam's and NAG's settings were chosen beforehand by ``shf tune curves-demo``
on held-out rows; the record of that search is in the package's file of tuned settings and in every run's ``run.json``.
The paper's SHF has λ and ζ chosen by hand for this problem, after about twenty tries; ``fast`` is `shf.presets.fast` as
it is.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shf.lab import report
from shf.lab.configure import Request, configure
from shf.lab.experiments import ExperimentError, find
from shf.lab.figures import metric_words
from shf.lab.measuring import fastest_threads
from shf.lab.observer import RunResult, Status
from shf.lab.progress import show
from shf.lab.recorder import holds_run
from shf.lab.records import plain, read_run
from shf.lab.runconfig import RunConfig
from shf.lab.runner import RunOptions, start
from shf.lab.words import duration

EXPERIMENT = "curves-demo"
METHODS = ("fast", "shf", "adam", "nag")


def run_demo(
    out: Path | None,
    *,
    minutes: float = 0.6,
    seed: int = 0,
    force: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Run the four, write the report, print the table and the verdict; 0, or 1 if a run was stopped or not saved."""
    console, errors = Console(), Console(stderr=True)
    place = out if out is not None else Path(tempfile.mkdtemp(prefix="shf-demo-"))
    if not force and (taken := [place / method for method in METHODS if holds_run(place / method)]):
        raise ExperimentError(f"{taken[0]} holds a run; choose another --out, or replace it with --force")
    threads = fastest_threads(find(EXPERIMENT))
    results: list[RunResult] = []
    for method in METHODS:
        config = configure(Request(EXPERIMENT, method, minutes=minutes, seed=seed, threads=threads))
        observer = show(errors, quiet=quiet or as_json)
        result = start(config, place / method, observer=observer, options=RunOptions(force=force))
        results.append(result)
        if result.status is Status.INTERRUPTED:
            return 1
    page = place / "report.html"
    report.write_report([read_run(result.directory) for result in results], page)
    sentence = verdict(results)
    if as_json:
        rows = [{"method": r.config.method, **r.summary} for r in results]
        console.print_json(json.dumps(plain({"runs": rows, "report": str(page), "verdict": sentence})))
    else:
        console.print(_table(results))
        console.print(Text(f"Report: {page}"), soft_wrap=True)
        console.print(Text(sentence, style="bold"))
    return 0 if all(result.saved for result in results) else 1


def _table(results: Sequence[RunResult]) -> Table:
    """What each reached in the same time."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in (
        "optimizer",
        metric_words(results[0].config.experiment.metric),
        "test",
        "epochs",
        "time",
        "settings",
    ):
        table.add_column(heading, justify="left" if heading in ("optimizer", "settings") else "right")
    for result in results:
        summary, last = result.summary, result.summary["last"]
        table.add_row(
            Text(result.config.method),
            _shown(summary["value"], result.status),
            _shown(last["test_squared_error"], result.status),
            str(summary["epochs"]),
            duration(summary["elapsed_seconds"]),
            Text(_settings_words(result.config)),
        )
    return table


def _settings_words(config: RunConfig) -> str:
    """Where the settings come from: a search, or for the paper's SHF a choice for this problem; the preset has none."""
    if config.method == "fast":
        return "no learning rate; nothing chosen"
    if config.method != "shf":
        return str(config.tuning.get("words", "not tuned"))
    settings = config.settings
    return f"no learning rate; λ {settings['damping']:g}, ζ {settings['cg_iterations']} chosen for this problem"


def _shown(value: float | None, status: Status) -> str:
    return "diverged" if status is Status.DIVERGED or value is None else f"{value:.3f}"


def verdict(results: Sequence[RunResult]) -> str:
    """One sentence that says who reached the lowest training error."""
    ranked = sorted(results, key=_score)
    first, second = ranked[0], ranked[1]
    seconds = duration(first.summary["elapsed_seconds"])
    if _score(first) == float("inf"):
        return "All of them diverged: nobody won."
    error = f"training error {_score(first):.3f} in {seconds}"
    if _score(second) == float("inf"):
        return f"{_name(first)} won: {error}; the others diverged."
    if abs(_score(second) - _score(first)) < 0.01 * _score(first):
        return f"{_name(first)} and {_name(second)} ended level (within 1 %): {error}."
    return f"{_name(first)} won: {error}, against {_score(second):.3f} by {_name(second)}."


def _score(result: RunResult) -> float:
    value = result.summary.get("value")
    usable = result.status is not Status.DIVERGED and value is not None and value == value
    return float(value) if usable and value is not None else float("inf")


def _name(result: RunResult) -> str:
    return {"fast": "SHF fast", "shf": "SHF", "adam": "Adam", "nag": "NAG"}.get(
        result.config.method, result.config.method
    )
