"""Runs an experiment and continues it: locks the directory, trains, evaluates every epoch, records, saves, stops in order.

A run killed at any moment and resumed ends with the same ``metrics.jsonl`` (but for fields ending in ``_seconds``) and
bitwise the same parameters as one that was never stopped, given the same versions and number of threads.
"""

import contextlib
import dataclasses
import datetime
import itertools
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shf.lab import machine
from shf.lab.checkpoint import CheckpointStore, Loaded
from shf.lab.clock import Clock
from shf.lab.configure import find_method
from shf.lab.crew import Crew
from shf.lab.data import Dataset
from shf.lab.data.sources import Notify, quiet
from shf.lab.experiments import ExperimentError
from shf.lab.interrupts import StopRequest
from shf.lab.lock import RunLockedError, is_taken, locked
from shf.lab.observer import Observer, RunResult, Status
from shf.lab.pretraining import pretrain_
from shf.lab.problem import build
from shf.lab.recorder import CHECKPOINTS, Recorder, holds_run
from shf.lab.records import RecordError, Seal, read_run_file, read_sealed_run_file
from shf.lab.runconfig import RunConfig
from shf.lab.training import Training

RUNS = Path("runs")
"""Where runs go by default, from the directory the command is started in."""
_ESTIMATE_SECONDS, _ESTIMATE_ITERATIONS = 2.0, 5


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; none of it changes its numbers. `clock` replaces the one that the configuration names."""

    data_dir: Path | None = None
    force: bool = False
    checkpoint_seconds: float = 60.0
    tensorboard: bool = False
    crew: Crew = dataclasses.field(default_factory=Crew)
    clock: Clock | None = None


def fresh_directories(config: RunConfig, below: Path) -> Iterator[Path]:
    """Directories that hold no run and that no process has: runs/<experiment>/<method>-seed<n>, numbered if need be."""
    split = f"-split{config.split}" if config.experiment.data == "usps" else ""
    name = f"{config.method}-seed{config.seed}{split}"
    parent = below / config.experiment.name
    places = (parent / (name if n == 1 else f"{name}-{n}") for n in itertools.count(1))
    return (place for place in places if not holds_run(place) and not is_taken(place))


def fresh_directory(config: RunConfig, below: Path = RUNS) -> Path:
    """The first of `fresh_directories`, as it is now: another process may take it before this one does."""
    return next(fresh_directories(config, below))


def unfinished_directory(config: RunConfig, below: Path = RUNS) -> Path:
    """The directory that `fresh_directory` gave a run of this configuration which has not ended; else a fresh one."""
    for directory in sorted((below / config.experiment.name).glob(f"{config.method}-seed{config.seed}*"), reverse=True):
        with contextlib.suppress(RecordError, ExperimentError):  # another version's, say
            record = read_run_file(directory)
            same = RunConfig.from_json(record.get("config") or {}).fingerprint() == config.fingerprint()
            if same and record.get("status") == Status.RUNNING:
                return directory
    return fresh_directory(config, below)


class OccupiedError(ExperimentError):
    """A directory for a new run holds another."""


class CheckpointsGoneError(RecordError):
    """A record of more than a beginning, and no checkpoint to go on from."""


def start_fresh(
    config: RunConfig, below: Path = RUNS, *, observer: Observer | None = None, options: RunOptions | None = None
) -> RunResult:
    """Run a configuration in a fresh directory; if another process was quicker to take it, in the next."""
    options = dataclasses.replace(options or RunOptions(), force=False)  # there is nothing to replace
    for directory in fresh_directories(config, below):
        with contextlib.suppress(RunLockedError, OccupiedError):
            return start(config, directory, observer=observer, options=options)
    raise AssertionError("numbers do not end")


def start(
    config: RunConfig, directory: Path, *, observer: Observer | None = None, options: RunOptions | None = None
) -> RunResult:
    """Run a configuration in a directory, which must not hold another run (unless `options.force`)."""
    observer, options = observer or Observer(), options or RunOptions()
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory, force=options.force), _computing(config), _watched(observer):
        if holds_run(directory) and not options.force:
            raise OccupiedError(
                f"{directory} holds another run; resume it with `shf resume {shlex.quote(str(directory))}`, "
                "choose another --out, or replace it with --force"
            )
        training = new_training(config, options.data_dir, note=observer.note, clock=options.clock)
        options.crew.lead(training)
        record = _record(config, training.problem.data, options.crew.size)
        recorder = Recorder(
            directory,
            record,
            warn=observer.warn,
            checkpoint_seconds=options.checkpoint_seconds,
            tensorboard=options.tensorboard,
        )
        observer.started(config, directory, 0)
        recorder.row(training.evaluate())
        return _train(training, recorder, directory, observer)


def resume(
    directory: Path,
    *,
    epochs: int | None = None,
    minutes: float | None = None,
    observer: Observer | None = None,
    options: RunOptions | None = None,
) -> RunResult:
    """Continue a run from its last intact checkpoint; `epochs` or `minutes` set a new limit."""
    observer, options = observer or Observer(), options or RunOptions()
    record = read_sealed_run_file(directory)
    if record.get("status") == Status.FINISHED and epochs is None and minutes is None:
        observer.note(f"{directory} has finished; give it more with --epochs or --minutes")
        return RunResult(Status.FINISHED, directory, _config(record), record.get("summary") or {})
    with locked(directory, force=options.force) as stale:
        if stale:
            observer.note(stale)
        record = read_sealed_run_file(directory)  # another process may have gone on with it until now
        config = _config(record)
        if epochs is not None or minutes is not None:
            config = dataclasses.replace(config, epochs=epochs, minutes=minutes)
        store = CheckpointStore(directory / CHECKPOINTS)
        loaded = store.load_latest()
        if loaded is None:
            _refuse_to_start_over(record, directory)
            observer.note("no checkpoint was written yet; the run starts from its beginning")
        with _computing(config), _watched(observer):
            return _continue(config, record, loaded, store, directory, observer, options)


def _refuse_to_start_over(record: Mapping[str, Any], directory: Path) -> None:
    """A run that has recorded something and has no checkpoint now lies on a disk that is not whole, or is a copy of the
    record alone: to begin anew would remove it."""
    if record.get("status") == Status.DIVERGED:
        raise RecordError(f"{directory}: the run diverged before a checkpoint was saved; start it with other settings")
    if Seal.from_json(record.get("metrics")).size > 0:
        raise CheckpointsGoneError(
            f"{directory}: run.json says that checkpoints were saved, but there is none in {CHECKPOINTS}/; "
            "bring them back (is a mount missing?), or start again with `shf run`, there with --force or elsewhere"
        )


def _continue(
    config: RunConfig,
    record: Mapping[str, Any],
    loaded: Loaded | None,
    store: CheckpointStore,
    directory: Path,
    observer: Observer,
    options: RunOptions,
) -> RunResult:
    training = new_training(config, options.data_dir, pretrain=loaded is None, clock=options.clock)
    options.crew.lead(training)
    _check_same_data(record, training.problem.data)
    if loaded is not None:
        training.load_state(loaded.state)
        _refuse_less(training, _config(record))
    recorder = Recorder(
        directory,
        _continued(record, _record(config, training.problem.data, options.crew.size)),
        warn=observer.warn,
        resume_from=None if loaded is None else Seal.from_json(loaded.state.get("metrics")),
        store=store,
        checkpoint_seconds=options.checkpoint_seconds,
        tensorboard=options.tensorboard,
        first_iteration=training.position.iteration,
    )
    for difference in _differences(record, config, options.crew.size):
        recorder.say(difference)
    for text in () if loaded is None else loaded.passed_over:
        recorder.say(f"a damaged checkpoint was passed over, the one before it is used: {text}")
    observer.started(config, directory, training.position.iteration)
    if loaded is None:
        recorder.row(training.evaluate())
    return _train(training, recorder, directory, observer)


def _train(training: Training, recorder: Recorder, directory: Path, observer: Observer) -> RunResult:
    """The loop. Ends at the limit, on a signal after the iteration in progress, or when the objective is not finite."""
    first, estimated, status = training.position.iteration, False, Status.FINISHED
    with StopRequest() as stop:
        for row in training.train():
            if training.position.iteration % training.config.rows_every == 0:
                recorder.row(row)
            observer.iteration(row, training.progress())
            if training.loop.diverged is not None:
                break
            if training.epoch_ended:
                ended = training.end_epoch()
                _record_evaluation(training, recorder, ended)
                observer.epoch(ended, training.progress())
            elif training.evaluation_due:
                _record_evaluation(training, recorder, training.evaluate())
            if not estimated and not training.exhausted and _enough_to_estimate(training, first):
                estimated = True
                observer.estimate(training.summary()["seconds_per_epoch"], training.progress())
            if stop and not training.exhausted:
                status = Status.INTERRUPTED
                break
            if recorder.checkpoint_due:
                recorder.checkpoint(training.position.iteration, training.state())
    if training.loop.diverged is not None:
        status = Status.DIVERGED
        if training.loop.diverged:
            observer.warn(training.loop.diverged)
    return _finish(training, recorder, directory, observer, status)


def _enough_to_estimate(training: Training, first_iteration: int) -> bool:
    """Whether enough was seen since that iteration to speak of the whole."""
    at = training.position
    return at.iteration - first_iteration >= _ESTIMATE_ITERATIONS or at.elapsed >= _ESTIMATE_SECONDS


def _record_evaluation(training: Training, recorder: Recorder, row: Mapping[str, Any]) -> None:
    """The row, and the network if it is the best so far; not at a run's end, which the last checkpoint has."""
    recorder.row(row)
    if training.improves(row):
        with training.evaluated():
            recorder.best({"model": training.problem.model.state_dict(), "epoch": row["epoch"]})


def _finish(training: Training, recorder: Recorder, directory: Path, observer: Observer, status: Status) -> RunResult:
    """Save, and unless interrupted evaluate what an unfinished epoch has reached.

    The last checkpoint comes before that evaluation: a run that is given more time continues as if it had it from the
    start, without the extra row (but for what `_differences` warns about). If it cannot be written, the record
    does not call the run finished: its parameters would never be saved; `shf resume` does the rest again.
    """
    kept = status is Status.DIVERGED or recorder.checkpoint(training.position.iteration, training.state())
    if status is not Status.INTERRUPTED and training.position.index > 0:
        row = training.evaluate()
        recorder.row(row)
        observer.epoch(row, training.progress())
    summary = training.summary()
    with training.evaluated():
        samples = training.problem.samples() if status is Status.FINISHED else {}
    saved = recorder.finish(status if kept else Status.INTERRUPTED, summary, samples) and kept
    result = RunResult(status, directory, training.config, summary, tuple(recorder.warnings), saved)
    observer.finished(result)
    return result


def new_training(
    config: RunConfig,
    data_dir: Path | None,
    *,
    pretrain: bool = True,
    note: Notify = quiet,
    clock: Clock | None = None,
) -> Training:
    """Data, network (pretrained if asked for) and method, at iteration 0; `note` hears where data are fetched from."""
    how: dict[str, Any] = {"seed": config.seed, "split": config.split, "dropout_layers": config.dropout_layers}
    problem = build(config.experiment, data_dir=data_dir, progress=note, **how)
    if (asked := config.pretraining) is not None and pretrain:
        note(f"pretraining ({asked.method}, {asked.epochs} epochs per layer)")
        generator, inputs = torch.Generator().manual_seed(config.seed), problem.data.train_inputs
        pretrain_(problem.model, inputs, method=asked.method, epochs=asked.epochs, generator=generator)
    spec = find_method(config.method)
    try:
        method = spec.build(problem.model, problem.loss, _settings(config, problem.data.train_targets.shape[0]))
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{spec.name} refuses its settings: {error}") from error
    return Training(config, problem, method, whole_data=spec.reads_batches, clock=clock)


def _settings(config: RunConfig, cases: int) -> dict[str, Any]:
    """The method's settings; a schedule that ends with the run is told the run's number of updates, if it is known."""
    settings = dict(config.settings)
    if settings.get("total_updates", 0) is None and config.epochs is not None:
        settings["total_updates"] = config.epochs * math.ceil(cases / (config.batch or cases))
    return settings


@contextmanager
def _watched(observer: Observer) -> Iterator[None]:
    try:
        yield
    finally:
        observer.closed()


@contextmanager
def _computing(config: RunConfig) -> Iterator[None]:
    """The run's number of threads and its global generator, and the caller's again afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _record(config: RunConfig, data: Dataset, processes: int) -> dict[str, Any]:
    """``run.json`` of a run that starts now; the number of processes is told where there are several."""
    several = {"processes": processes} if processes > 1 else {}
    # as many on one host compute the same as on several, whose addresses nobody else has
    launcher = f"torchrun --nproc-per-node {processes} -m " if several else ""
    return {
        "status": Status.RUNNING.value,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": launcher + config.command(),
        "config": config.to_json(),
        "data": {"name": data.name, "checksums": dict(data.checksums), "note": data.note},
        "versions": machine.versions(),
        "machine": {**machine.description(), **several},
    }


def _continued(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """``run.json`` of a run that goes on: when it was created, its warnings, and with what its earlier parts were computed
    where that was something else."""
    same = all(before.get(key) == now[key] for key in ("versions", "machine"))
    earlier = [] if same else [{key: before.get(key) for key in ("versions", "machine")}]
    kept = {key: before[key] for key in ("created", "warnings") if key in before}
    return {**now, **kept, "earlier": [*before.get("earlier", ()), *earlier]}


def _config(record: Mapping[str, Any]) -> RunConfig:
    return RunConfig.from_json(record.get("config") or {})


def _refuse_less(training: Training, before: RunConfig) -> None:
    """A new limit that lies behind where the run is: its record would claim to be that of a shorter one."""
    config, at, part = training.config, training.position, training.position.index > 0
    if config.epochs != before.epochs and config.epochs is not None and config.epochs < at.epoch + part:
        done = f"{at.epoch}" + " and a part" * part
        raise ExperimentError(f"--epochs {config.epochs}: the run has gone through {done} already; give more")
    if config.minutes != before.minutes and config.minutes is not None and 60 * config.minutes < at.elapsed:
        spent = at.elapsed / 60
        raise ExperimentError(f"--minutes {config.minutes:g}: the run has trained for {spent:.3g} already; give more")


def _check_same_data(record: Mapping[str, Any], data: Dataset) -> None:
    recorded = (record.get("data") or {}).get("checksums")
    if recorded != dict(data.checksums):
        raise RecordError(
            f"the run was started on other data: it recorded {recorded}, found {dict(data.checksums)}; "
            "give the same data with --data-dir"
        )


def _differences(record: Mapping[str, Any], now: RunConfig, processes: int) -> Iterator[str]:
    """In words: what makes a run that goes on another than one that was never stopped.

    Sums over the rows of a batch are rounded in another order where these are shared out otherwise; a schedule that is
    spread over the epochs of a run (see `_settings`) is another where these change.
    """
    perhaps = "it continues, but perhaps not bitwise as it would have"
    versions, before = record.get("versions") or {}, _config(record)
    for name, version in machine.versions().items():
        if versions.get(name, version) != version:
            yield f"{name} {version} is installed, the run was started with {versions[name]}: {perhaps}"
    earlier = (record.get("machine") or {}).get("processes", 1)
    if earlier != processes:
        several = f"{processes} process{'' if processes == 1 else 'es'}"
        yield f"the run goes on with {several}, its earlier part had {earlier}: {perhaps}"
    if before.epochs != now.epochs and before.settings.get("total_updates", 0) is None:
        limits = [f"{c.epochs} epochs" if c.epochs is not None else f"{c.minutes:g} minutes" for c in (before, now)]
        yield (
            f"the schedule of {now.method} is spread over the run, which was begun for {limits[0]} and now has {limits[1]}: "
            "it continues, but not as if it had had these from its start"
        )
