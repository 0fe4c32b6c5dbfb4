"""Two runs that are one run until γ is shut off: the second begins at a checkpoint of the first, which saves its hours.

Nothing else is given away: the second ends with the same metrics (but for the clock) and bitwise the same parameters as
if it had been run from its start.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from shf.lab.checkpoint import CheckpointStore
from shf.lab.lock import locked
from shf.lab.observer import Status
from shf.lab.recorder import CHECKPOINTS, holds_run
from shf.lab.records import METRICS_FILE, RUN_FILE, MetricsFile, RecordError, Seal, read_run_file, write_run
from shf.lab.runconfig import RunConfig

SHUT_OFF = "momentum_off_on_divergence"


def begin_as(first: Path, second: Path, config: RunConfig) -> int:
    """Makes `second` an unfinished run of `config` that stands where the run in `first` has its last checkpoint.

    Returns:
        The iteration from which it goes on.

    Raises:
        RecordError: if the two differ in more than the shut-off of γ, if γ was shut off before that checkpoint, if there
            is none, or if `second` holds a run.
    """
    record = read_run_file(first)
    theirs = RunConfig.from_json(record.get("config") or {})
    if _but_for_the_shut_off(theirs) != _but_for_the_shut_off(config):
        raise RecordError(f"{first} is a run of other settings; only {SHUT_OFF} may differ")
    loaded = CheckpointStore(first / CHECKPOINTS).load_latest()
    if loaded is None:
        raise RecordError(f"{first} has no checkpoint")
    if not loaded.state["method"]["param_groups"][0]["shf"]["momentum"]:
        raise RecordError(f"{loaded.path}: γ is off there already; the runs parted before it")
    iteration, seal = loaded.state["position"]["iteration"], Seal.from_json(loaded.state["metrics"])
    second.mkdir(parents=True, exist_ok=True)
    with locked(second):
        if holds_run(second):
            raise RecordError(f"{second} holds a run; remove it, or let the queue go on with it")
        (second / METRICS_FILE).write_bytes((first / METRICS_FILE).read_bytes())
        MetricsFile.resume(second / METRICS_FILE, seal)
        state = {**loaded.state, "fingerprint": config.fingerprint()}
        CheckpointStore(second / CHECKPOINTS).save(iteration, state)
        changed = {"status": Status.RUNNING.value, "config": config.to_json(), "command": config.command()}
        origin = {"begins_as": {"run": first.name, "iteration": iteration}}
        write_run(second / RUN_FILE, {**record, **changed, **origin, "metrics": seal.to_json()})
    return int(iteration)


def _but_for_the_shut_off(config: RunConfig) -> str:
    """A fingerprint of the rest."""
    options = tuple(option for option in config.options if not option.startswith(f"{SHUT_OFF}="))
    return dataclasses.replace(config, options=options, settings={**config.settings, SHUT_OFF: None}).fingerprint()
