"""Works on the queue: what is finished is passed over, what was interrupted or is given more time now is resumed, what
another process has is left.

Nothing here decides what is run; see `entries`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shf.lab import runner
from shf.lab.choices import read_choices, write_choice
from shf.lab.clock import wall
from shf.lab.configure import configure, find_method, parse_options
from shf.lab.experiments import find
from shf.lab.lock import RunLockedError
from shf.lab.observer import Observer, Status
from shf.lab.recorder import CHECKPOINTS, holds_run
from shf.lab.records import read_run_file
from shf.lab.rerun.entries import Run, Tuning
from shf.lab.subjects import tune_experiment
from shf.lab.tuning import Budget

CHOICES = "tuned.json"
"""What the searches of the queue found, beside its runs."""
CHECKPOINT_SECONDS = 120.0
OVER = (Status.FINISHED.value, Status.DIVERGED.value)

Say = Callable[[str], object]


def work(
    entries: Sequence[Run | Tuning],
    root: Path,
    *,
    minutes: float | None = None,
    data_dir: Path | None = None,
    observer: Observer | None = None,
    say: Say = print,
) -> bool:
    """Goes through the entries in order, whose runs lie below the root; returns whether all of them are done.

    A signal ends the run at hand after its iteration, saved, and the queue with it. After `minutes` no further entry is
    begun. Two processes may work on one queue: each takes what the other does not hold.
    """
    began, complete = wall(), True
    for entry in entries:
        if is_done(entry, root):
            continue
        if minutes is not None and wall() - began >= 60 * minutes:
            say(f"the {minutes:g} minutes are over before {entry.name}")
            return False
        say(entry.name)
        try:
            if isinstance(entry, Tuning):
                _tune(entry, root, data_dir)
            elif _run(entry, root, data_dir, observer) is Status.INTERRUPTED:
                say(f"{entry.name} was interrupted and saved; the same command takes it up again")
                return False
        except RunLockedError as error:
            say(f"{entry.name} is left to the process that has it: {error}")
            complete = False
        except runner.CheckpointsGoneError:
            say(f"{entry.name} is left as it is: its record is here and its checkpoints are not")
            complete = False
    return complete


def is_done(entry: Run | Tuning, root: Path) -> bool:
    """Whether there is nothing left to do: a search has its choice, a run its end, and that not sooner than asked for."""
    if isinstance(entry, Tuning):
        return entry.method in read_choices(root / CHOICES).get(entry.experiment, {})
    if not holds_run(root / entry.name):
        return False
    record = read_run_file(root / entry.name)
    return record.get("status") in OVER and not _more(entry, record)


def lacking_checkpoints(entries: Sequence[Run | Tuning], root: Path) -> list[str]:
    """The entries that have a record and are to go on, and cannot: their checkpoints are on another machine."""
    left = [entry for entry in entries if isinstance(entry, Run) and not is_done(entry, root)]
    there = [entry.name for entry in left if holds_run(root / entry.name)]
    return [name for name in there if not (root / name / CHECKPOINTS).is_dir()]


def _more(entry: Run, record: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that the entry has now, where its run was given less; a run of minutes was given the epochs it made."""
    config, asked = record.get("config") or {}, entry.request
    made = config.get("epochs") or (record.get("summary") or {}).get("epochs", 0)
    short = asked.epochs is not None and made < asked.epochs
    hasty = asked.minutes is not None and (config.get("minutes") or asked.minutes) < asked.minutes
    if record.get("status") == Status.DIVERGED or not (short or hasty):
        return {}
    return {"epochs": asked.epochs, "minutes": asked.minutes}


def _run(entry: Run, root: Path, data_dir: Path | None, observer: Observer | None) -> Status:
    directory = root / entry.name
    options = runner.RunOptions(data_dir, checkpoint_seconds=CHECKPOINT_SECONDS)
    if holds_run(directory):
        more = _more(entry, read_run_file(directory))
        return runner.resume(directory, **more, observer=observer, options=options).status
    config = configure(entry.request, choices=root / CHOICES)
    return runner.start(config, directory, observer=observer, options=options).status


def _tune(entry: Tuning, root: Path, data_dir: Path | None) -> None:
    spec, keep = find_method(entry.method), 3
    if entry.steps is None:
        budget = Budget(seconds=60 * entry.minutes, clock="processor")
    else:  # one rung, in which every trial trains in full
        spec = replace(spec, grid=entry.grid or spec.grid)
        keep = math.prod(map(len, spec.grid.values()))
        budget = Budget(iterations=keep * entry.steps)
    experiment = find(entry.experiment).with_options(parse_options(entry.options))
    write_choice(tune_experiment(experiment, spec, budget=budget, data_dir=data_dir, keep=keep), root / CHOICES)
