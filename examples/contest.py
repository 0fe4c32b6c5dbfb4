"""What the examples share: every method with the same processor time, a record of every run.

A run that is recorded already, with the same budget and settings, is not made again: a contest can be broken off and
started again, or be given further seeds, and keeps the rates that it chose.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from methods import Method, Row, Step, Task, by_gradient, choose_rate, stochastic, train
from shf.lab import machine
from shf.lab.records import METRICS_FILE, RUN_FILE, MetricsFile, read_run, write_run

__all__ = ["Method", "Row", "Step", "Task", "by_gradient", "contest", "parser", "stochastic"]


def recorded(directory: Path, method: Method, options: Any) -> Mapping[str, Any] | None:
    """The configuration of a finished run that is there, if it is of this contest."""
    if not (directory / RUN_FILE).exists():
        return None
    config: Mapping[str, Any] = read_run(directory).config
    settings = {name: value for name, value in config["settings"].items() if name != "rate"}
    same = (config["seconds"], config["rows"], settings) == (options.seconds, method.rows, dict(method.settings))
    return config if same else None


def record(
    directory: Path, task: Task, method: Method, rate: float, tuning: Mapping[str, Any], seed: int, options: Any
) -> None:
    """One run, written to its directory as it goes."""
    directory.mkdir(parents=True, exist_ok=True)
    metrics = MetricsFile(directory / METRICS_FILE)
    for row in train(task, method, rate, seed=seed, seconds=options.seconds, evaluations=options.points):
        metrics.append({"row": "epoch", **row})
        metrics.flush()
    config = {"task": task.name, "method": method.name, "seed": seed, "seconds": options.seconds, "rows": method.rows}
    chosen = {} if math.isnan(rate) else {"rate": rate}
    config |= {"settings": {**method.settings, **chosen}, "tuning": dict(tuning), "tuned_on": task.tuned_on}
    about = {"versions": machine.versions(), "machine": machine.description(), "status": "finished"}
    write_run(directory / RUN_FILE, {"config": config, **about, "metrics": metrics.seal().to_json()})
    words = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
    print(f"{task.name}, {method.name}, seed {seed}: {words}", flush=True)


def contest(tasks: Sequence[Task], methods: Sequence[Method], options: Any) -> None:
    """Every method on every task with every seed; rates are chosen once, on the first seed."""
    torch.set_num_threads(1)
    for task in tasks:
        for method in methods:
            if options.only and method.name not in options.only:
                continue
            if options.rates and method.rates:
                method = replace(method, rates=options.rates)
            places = {seed: Path(options.out) / task.name / f"{method.name}-{seed}" for seed in options.seed}
            there = {seed: recorded(directory, method, options) for seed, directory in places.items()}
            if None not in there.values():
                continue
            rate, tuning = rate_of(task, method, next(filter(None, there.values()), None), options)
            for seed in (seed for seed, config in there.items() if config is None):
                record(places[seed], task, method, rate, tuning, seed, options)


def rate_of(
    task: Task, method: Method, earlier: Mapping[str, Any] | None, options: Any
) -> tuple[float, Mapping[str, Any]]:
    """The rate and how it was chosen: as in an earlier run of the contest, or by trials on the first seed."""
    if earlier is not None:
        return earlier["settings"].get("rate", math.nan), earlier["tuning"]
    trial = options.tune if options.tune is not None else options.seconds / 4
    rate, found = choose_rate(task, method, seed=options.seed[0], seconds=trial)
    return rate, {"seconds_each": trial, "seed": options.seed[0], "found": found} if found else {}


def parser(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options that all examples have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    found.add_argument("--seconds", type=float, default=seconds, help="processor seconds of every run")
    found.add_argument("--tune", type=float, help="processor seconds for every rate that is tried (default: a quarter)")
    found.add_argument("--seed", type=int, nargs="+", default=[0], help="one or more")
    found.add_argument("--rates", type=float, nargs="+", help="to try instead of each method's own; one: no choice")
    found.add_argument("--points", type=int, default=30, help="evaluations along each run")
    found.add_argument("--only", nargs="+", help="names of methods; by default all")
    found.add_argument("--out", default="runs/examples", help="directory of the records")
    return found
