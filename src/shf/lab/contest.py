"""A contest: every method gets the same processor time on a task, and every run is recorded. The examples are contests.

Time is processor time of the updates alone (on one thread), so that a busy machine does not decide
who wins; making batches and evaluating are not counted. A run that is recorded already, with the same budget, settings
and search for a rate, is not made again: a contest can be broken off and started again, or be given further seeds, and
keeps the rates that it chose.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shf
from shf.lab import machine
from shf.lab.clock import CLOCKS, Clock
from shf.lab.loop import Loop, Report, evaluating, judged
from shf.lab.records import METRICS_FILE, RUN_FILE, MetricsFile, RunRecord, read_run, write_run
from shf.model.network import call_model

Step = Callable[[Any, Any], object]
"""One update from a batch of inputs and targets. Where it has an attribute `averaged`, a context, the network is measured
in that."""
Row = dict[str, float]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: of the directory of its records.
        model: a fresh network, drawn from torch's generator.
        batches: endless batches of so many rows, drawn from a generator.
        evaluate: measures of the network as it is.
        tuned_on: the measure by which a rate is chosen, on held-out data where the test is another; less is better.
        solved: whether these measures say that the task is solved; a run of whichever method then ends.
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[int, torch.Generator], Iterator[tuple[Any, Any]]]
    evaluate: Callable[[nn.Module], Row]
    tuned_on: str
    solved: Callable[[Row], bool] = lambda row: False


@dataclass(frozen=True)
class Method:
    """A contestant: how many rows it wants, how it is made for a model and a rate, and the rates that are tried."""

    name: str
    rows: int
    build: Callable[[nn.Module, float], Step]
    rates: Sequence[float] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def stochastic(model: nn.Module, loss: Any, epoch: int, **options: Any) -> Step:
    """SHF with an epoch of so many updates, measured at its average where it keeps one."""
    optimizer = shf.SHF(model, loss, **options)
    return in_epochs(optimizer, epoch, optimizer.averaged if optimizer.config.averaging else nullcontext)


def in_epochs(optimizer: Any, epoch: int, averaged: Callable[[], AbstractContextManager[None]] = nullcontext) -> Step:
    """An optimizer that is told when an epoch, so many updates, is over; measured in the given context."""
    updates = 0

    def step(inputs: Any, targets: Any) -> None:
        nonlocal updates
        optimizer.step(inputs, targets)
        updates += 1
        if updates % epoch == 0:
            optimizer.next_epoch()

    step.averaged = averaged  # type: ignore[attr-defined]
    return step


def by_gradient(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, clip: float = math.inf) -> Step:
    """A torch optimizer, with the gradient's norm clipped where that is wanted."""

    def step(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        loss(call_model(model, inputs), targets).backward()
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


def train(
    task: Task,
    method: Method,
    rate: float,
    *,
    seed: int,
    seconds: float,
    evaluations: int,
    clock: Clock | None = None,
) -> Iterator[Row]:
    """A row of measures at the start and at equal distances until the processor time is spent or the task solved."""
    torch.manual_seed(seed)
    model = task.model()
    step, batches = method.build(model, rate), task.batches(method.rows, torch.Generator().manual_seed(seed))
    batch = next(batches)

    def one() -> Report:
        step(*batch)
        return {}

    loop = Loop(one, clock or CLOCKS["processor"])
    for k in range(evaluations + 1):
        for _ in loop.until(lambda spent, k=k: spent.elapsed >= seconds * k / evaluations):  # type: ignore[misc]
            batch = next(batches)
        with judged(step), evaluating(model):
            row = {"processor_seconds": loop.spent.elapsed, "updates": loop.spent.iteration, **task.evaluate(model)}
        yield row
        lost = loop.diverged is not None or not math.isfinite(row[task.tuned_on])
        if lost or task.solved(row):  # a run that diverged does not come back
            return


def choose_rate(task: Task, method: Method, *, seed: int, seconds: float) -> tuple[float, Row]:
    """The rate with the best measure after so much time each, and what every one of them reached."""
    if len(method.rates) < 2:
        return next(iter(method.rates), math.nan), {}
    found = {}
    for rate in method.rates:
        *_, last = train(task, method, rate, seed=seed, seconds=seconds, evaluations=1)
        found[rate] = last[task.tuned_on] if math.isfinite(last[task.tuned_on]) else math.inf
        print(f"{task.name}, {method.name}, rate {rate:g}: {task.tuned_on} {found[rate]:.4g}", flush=True)
    return min(found, key=lambda rate: found[rate]), {f"{rate:g}": value for rate, value in found.items()}


def recorded(directory: Path, method: Method, options: Any) -> Mapping[str, Any] | None:
    """The configuration of a finished run that is there, if it is of this contest."""
    if not (directory / RUN_FILE).exists():
        return None
    record = read_run(directory)
    config: Mapping[str, Any] = record.config
    settings = {name: value for name, value in config["settings"].items() if name != "rate"}
    same = (config["seconds"], config["rows"], settings) == (options.seconds, method.rows, dict(method.settings))
    return config if same and not record.problems and same_search(config, method, options) else None


def same_search(config: Mapping[str, Any], method: Method, options: Any) -> bool:
    """Whether a recorded run's rate comes from the search that is asked for now."""
    if len(method.rates) < 2:
        return bool(config["settings"].get("rate") == next(iter(method.rates), None))
    tuning = config["tuning"]
    tried = {f"{rate:g}" for rate in method.rates}
    return bool(tuning.get("found", {}).keys() == tried and tuning["seconds_each"] == trial_seconds(options))


def trial_seconds(options: Any) -> float:
    """What each rate of a search is given."""
    return float(options.tune if options.tune is not None else options.seconds / 4)


def record(
    directory: Path, task: Task, method: Method, rate: float, tuning: Mapping[str, Any], seed: int, options: Any
) -> None:
    """One run, written to its directory as it goes."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (RUN_FILE, METRICS_FILE):  # of another contest, or of a run that was broken off
        (directory / name).unlink(missing_ok=True)
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
    known = [method.name for method in methods]
    if unknown := set(options.only or ()) - set(known):
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: the methods are {', '.join(known)}")
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


def read_contest(directory: Path) -> dict[str, dict[int, RunRecord]]:
    """The finished runs of one task, by method and seed; one that was changed by hand is refused."""
    found: dict[str, dict[int, RunRecord]] = {}
    for place in sorted(path.parent for path in directory.glob(f"*/{RUN_FILE}")):
        record = read_run(place)
        if record.problems:
            raise ValueError(f"{place}: {'; '.join(record.problems)}")
        found.setdefault(str(record.config["method"]), {})[int(record.config["seed"])] = record
    return found


def rate_of(
    task: Task, method: Method, earlier: Mapping[str, Any] | None, options: Any
) -> tuple[float, Mapping[str, Any]]:
    """The rate and how it was chosen: as in an earlier run of the contest, or by trials on the first seed."""
    if earlier is not None:
        return earlier["settings"].get("rate", math.nan), earlier["tuning"]
    trial = trial_seconds(options)
    rate, found = choose_rate(task, method, seed=options.seed[0], seconds=trial)
    return rate, {"seconds_each": trial, "seed": options.seed[0], "found": found} if found else {}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def parser(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options that all contests have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    found.add_argument("--seconds", type=float, default=seconds, help="processor seconds of every run")
    quarter = "processor seconds for every rate that is tried; a quarter of --seconds unless given"
    found.add_argument("--tune", type=float, default=None, help=quarter)
    found.add_argument("--seed", type=int, nargs="+", default=[0], help="one or more")
    found.add_argument("--rates", type=float, nargs="+", help="to try instead of each method's own; one: no choice")
    found.add_argument("--points", type=_positive, default=30, help="evaluations along each run")
    found.add_argument("--only", nargs="+", help="names of methods; by default all")
    found.add_argument("--out", default="runs/examples", help="directory of the records")
    return found
