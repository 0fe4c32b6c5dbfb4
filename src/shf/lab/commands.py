"""The commands of ``shf``: they parse, call the laboratory and print.

Results go to standard output, progress to standard error. Exit codes: 0 done; 1 failed, interrupted or diverged; 2 a
command that cannot be right. Heavy imports wait until a command needs them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperGroup

from shf.lab import machine
from shf.lab.experiments import EXPERIMENTS, ExperimentError
from shf.lab.outlet import Outlet

if TYPE_CHECKING:
    from shf.lab.observer import RunResult

DONE, FAILED, WRONG = 0, 1, 2
_TELLING_SECONDS = 20.0
"""A run that trained for less says little about how long epochs take here."""


class Commands(TyperGroup):
    """Turns the laboratory's errors into one line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever reads has enough; nothing is left to flush at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:  # runs hear it themselves, and save
            Outlet(sys.stderr).line("error: interrupted")
            raise typer.Exit(FAILED) from None
        except Exception as error:
            code = exit_code(error)
            if code is None:
                raise
            Outlet(sys.stderr).line(f"error: {_words(error)}")
            raise typer.Exit(code) from None


def exit_code(error: Exception) -> int | None:
    """2 for what the user asked for wrongly, 1 for what went wrong, None for an error of ours: that one gets a traceback."""
    from shf import StepMemoryError
    from shf.errors import RankError
    from shf.lab.checkpoint import CheckpointError, CheckpointMismatchError, CheckpointVersionError
    from shf.lab.choices import ChoicesError
    from shf.lab.data import DataError, NoSuchDataError
    from shf.lab.lock import RunLockedError
    from shf.lab.records import RecordError

    wrong = (ExperimentError, CheckpointVersionError, CheckpointMismatchError, NoSuchDataError)
    of_the_laboratory = (RecordError, CheckpointError, DataError, ChoicesError, RunLockedError)
    if isinstance(error, wrong):
        return WRONG
    if isinstance(error, (*of_the_laboratory, RankError, StepMemoryError, ArithmeticError, OSError)):
        return FAILED
    return None


def _words(error: Exception) -> str:
    """The message; of the system's own errors the place and the reason, without their number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    reason = error.strerror[0].lower() + error.strerror[1:]
    return reason if error.filename is None else f"{error.filename}: {reason}"


app = typer.Typer(
    cls=Commands,
    name="shf",
    help="Stochastic Hessian-free optimization: the paper's experiments, from one command each.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(cls=Commands, help="List the data sets, or get one.", invoke_without_command=True)
app.add_typer(data_app, name="data")


def _experiment_names(incomplete: str) -> Iterator[str]:
    return (name for name in EXPERIMENTS if name.startswith(incomplete))


def _method_names(incomplete: str) -> Iterator[str]:
    from shf.lab.baselines.registry import METHODS

    return (name for name in METHODS if name.startswith(incomplete))


ExperimentName = Annotated[str, typer.Argument(help="See `shf list`.", autocompletion=_experiment_names)]
RunDirectory = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A run's directory.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data are, laid out like mnist/, usps/, reuters/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only warnings.")]
Clock = Annotated[
    Literal["wall", "processor"], typer.Option(help="Count seconds of the wall clock or of the processor.")
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Number of epochs to train for.")]
Minutes = Annotated[float | None, typer.Option(min=1e-3, help="Minutes of training; evaluation is not counted.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of initial weights, batches and masks.")]
Split = Annotated[int | None, typer.Option(help="USPS: which of the five splits.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the run that the directory holds.")]
TakeOver = Annotated[bool, typer.Option("--force", help="Take over a run noted as in use on another host.")]
Tensorboard = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")]
CheckpointSeconds = Annotated[float, typer.Option(min=0.0, help="At most so long between checkpoints.", hidden=True)]


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
) -> None:
    machine.keep_freed_memory()
    if version:
        from shf import __version__

        typer.echo(f"shf {__version__}")
        raise typer.Exit(DONE)


@app.command("list")
def list_experiments(
    as_json: AsJson = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the first iterations of each, here and now.")
    ] = False,
    optimizers: Annotated[bool, typer.Option("--optimizers", help="List the optimizers instead.")] = False,
    data_dir: DataDir = None,
) -> None:
    """The experiments: the paper's setting, its figure, and the time they take here."""
    from shf.lab import measuring
    from shf.lab.baselines.registry import METHODS
    from shf.lab.listing import experiments_table, methods_table

    if optimizers:
        if measure:
            raise ExperimentError("--optimizers --measure: what is timed are experiments; leave one of the two out")
        if as_json:
            typer.echo(json.dumps([{"name": m.name, "summary": m.summary} for m in METHODS.values()], indent=1))
        else:
            Console().print(methods_table(METHODS.values()))
        return
    if measure:  # three iterations of every experiment whose data can be had
        for name, outcome in measuring.measure_all(data_dir):
            typer.echo(f"{name}: {outcome}", err=True)
    known = measuring.recall()
    if as_json:
        rows = [{**e.to_json(), "seconds_per_epoch_here": known.get(e.name)} for e in EXPERIMENTS.values()]
        typer.echo(json.dumps(rows, indent=1))
        return
    Console().print(experiments_table(EXPERIMENTS.values(), known))
    typer.echo("Times marked ≈ are estimates for two cores; `shf list --measure` times the first iterations here.")


@data_app.callback()
def list_data(ctx: typer.Context, as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """The data sets: which are here, where, and how large. `shf data get NAME` fetches one."""
    if ctx.invoked_subcommand is not None:
        if as_json or data_dir is not None:
            raise ExperimentError(f"options of `shf data {ctx.invoked_subcommand}` come after its name")
        return
    from shf.lab.data import available
    from shf.lab.listing import data_table

    found = available(data_dir)
    if as_json:
        rows = [{**vars(status), "where": None if status.where is None else str(status.where)} for status in found]
        typer.echo(json.dumps(rows, indent=1))
        return
    Console().print(data_table(found))


@data_app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(help="See `shf data`.")],
    original: Annotated[
        bool, typer.Option("--original", help="curves: the original file from its public home, not generated images.")
    ] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Fetch a data set into the user cache, verified."""
    from shf.lab.data import fetch, fetch_original

    say = (lambda _: None) if quiet else (lambda line: typer.echo(line, err=True))
    if original:
        if name != "curves":
            raise ExperimentError(f"--original is for curves; {name} is always fetched from where it was published")
        fetch_original(say)
    status = fetch(name, data_dir, say)
    typer.echo(f"{status.name}: {status.bytes / 1e6:.1f} MB in {status.where}")


@app.command()
def tune(
    experiment: ExperimentName,
    optimizer: Annotated[str, typer.Argument(autocompletion=_method_names, help="See `shf list --optimizers`.")],
    minutes: Annotated[float, typer.Option(min=1e-3, help="Minutes of training for the whole search.")] = 10.0,
    dropout: Annotated[bool, typer.Option("--dropout", help="Choose the amount of input dropout too.")] = False,
    seed: Seed = 0,
    split: Split = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; `SHF_TUNED=FILE shf run` reads it. By default the user's own."),
    ] = None,
    clock: Clock = "wall",
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search a method's settings on held-out training rows and write the choice where the experiments read it."""
    from shf.lab.choices import Trial, read_choices, user_file, write_choice
    from shf.lab.configure import check_fit, find_method, provenance
    from shf.lab.experiments import find
    from shf.lab.subjects import tune_experiment
    from shf.lab.tuning import Budget

    chosen, spec = find(experiment), find_method(optimizer)
    check_fit(chosen, spec, split)
    if not math.isfinite(minutes):
        raise ExperimentError(f"--minutes {minutes:g}: must be a finite number")
    if not spec.grid and not dropout:
        advice = "; --dropout searches the amount of input dropout" if chosen.input_dropout else ""
        raise ExperimentError(f"{spec.name} has nothing to tune{advice}")
    place = out or user_file()  # what cannot be added to is refused before the search
    if place.is_dir():
        raise ExperimentError(f"--out {place}: a directory; expected a file, such as {place / 'tuned.json'}")
    read_choices(place)
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
    if not place.parent.is_dir() or not os.access(place.parent, os.W_OK):
        raise ExperimentError(f"{place}: its directory cannot be written to; choose another --out")

    errors = Outlet(sys.stderr)

    def report(rung: int, size: int, trial: Trial) -> None:
        if not quiet:
            last = trial.scores[-1]
            shown = "diverged" if last is None else f"{last:.4g}"
            amount = {} if trial.input_dropout is None else {"input_dropout": trial.input_dropout}
            settings = ", ".join(f"{name}={value}" for name, value in {**trial.settings, **amount}.items())
            errors.line(f"rung {rung}, with {size} trials: {settings}: {shown}")

    choice = tune_experiment(
        chosen,
        spec,
        budget=Budget(seconds=60 * minutes, clock=clock),
        search_dropout=dropout,
        seed=seed,
        split=split or 1,
        data_dir=data_dir,
        report=report,
    )
    if as_json:
        typer.echo(json.dumps(choice.to_json(), indent=1))
    else:
        typer.echo(f"{spec.name} on {chosen.name}: {provenance(choice)['words']}, {choice.metric} {choice.score:.4g}")
    for name in choice.edge:
        errors.line(f"{name} lies at the end of its grid: a wider one might do better")
    path = write_choice(choice, out)  # after what a disk that refuses it must not lose
    if not as_json:
        typer.echo(f"written to {path}")


@app.command()
def run(
    experiment: ExperimentName,
    optimizer: Annotated[
        str, typer.Option("--optimizer", "-o", autocompletion=_method_names, help="shf list --optimizers shows them.")
    ] = "shf",
    epochs: Epochs = None,
    minutes: Minutes = None,
    seed: Seed = 0,
    split: Split = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="option=value of the experiment or the optimizer; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory; by default a fresh one below runs/.")] = None,
    force: Force = False,
    pretrain: Annotated[
        str | None, typer.Option(help="Layerwise pretraining first, its time not counted: denoising or rbm.")
    ] = None,
    pretrain_epochs: Annotated[int | None, typer.Option(min=1, help="Epochs per layer; 10 by default.")] = None,
    untuned: Annotated[bool, typer.Option("--untuned", help="Ignore the file of tuned settings.")] = False,
    rows_every: Annotated[int, typer.Option(min=1, help="Record every Nth iteration; epochs are always recorded.")] = 1,
    evaluate_seconds: Annotated[
        float | None, typer.Option(help="Also evaluate after every so many seconds of training.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads of torch (default: torch's own choice).")
    ] = None,
    clock: Clock = "wall",
    tensorboard: Tensorboard = False,
    checkpoint_seconds: CheckpointSeconds = 60.0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment. Ctrl-C saves; `shf resume` goes on exactly."""
    from shf.lab import crew, runner
    from shf.lab.configure import Request, configure, pretraining
    from shf.lab.progress import show
    from shf.lab.recorder import holds_run

    _refuse_both(epochs, minutes)
    _refuse_file("--out", out)
    request = Request(
        experiment=experiment,
        method=optimizer,
        epochs=epochs,
        minutes=minutes,
        seed=seed,
        split=split,
        options=tuple(options or ()),
        pretraining=pretraining(pretrain, pretrain_epochs),
        rows_every=rows_every,
        evaluate_seconds=evaluate_seconds,
        threads=threads,
        untuned=untuned,
        clock=clock,
    )
    with crew.joined() as team:
        if team.follows:
            return team.follow()
        config = configure(request)
        how = runner.RunOptions(data_dir, force, checkpoint_seconds, tensorboard, team)
        observer = show(Console(stderr=True), quiet=quiet or as_json)
        directory = out or (runner.unfinished_directory(config) if team.restarted else None)
        if directory is None:
            result = runner.start_fresh(config, observer=observer, options=how)
        elif team.restarted and holds_run(directory):
            result = runner.resume(directory, observer=observer, options=how)
        else:
            result = runner.start(config, directory, observer=observer, options=how)
    return _conclude(result, as_json)


@app.command()
def resume(
    directory: RunDirectory,
    epochs: Epochs = None,
    minutes: Minutes = None,
    force: TakeOver = False,
    tensorboard: Tensorboard = False,
    checkpoint_seconds: CheckpointSeconds = 60.0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run, exactly, from its last checkpoint; --epochs or --minutes give it a new limit."""
    from shf.lab import crew, runner
    from shf.lab.progress import show

    _refuse_both(epochs, minutes)
    with crew.joined() as team:
        if team.follows:
            return team.follow()
        how = runner.RunOptions(data_dir, force, checkpoint_seconds, tensorboard, team)
        observer = show(Console(stderr=True), quiet=quiet or as_json)
        result = runner.resume(directory, epochs=epochs, minutes=minutes, observer=observer, options=how)
    return _conclude(result, as_json)


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(exists=True, help="Runs, or directories with runs in them.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Write every chart as SVG into this directory too.")] = None,
    unverified: Annotated[bool, typer.Option("--unverified", help="Show records that were changed, marked.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """One self-contained HTML page about runs, from their records alone."""
    from shf.lab import report as reporting

    if out.is_dir():
        raise ExperimentError(f"--out {out}: a directory; expected the page's file, such as {out / 'report.html'}")
    _refuse_file("--figures", figures)
    places = [place for place in directories if place.is_dir()] or directories
    for place in directories:
        if place not in places:  # dir/* has the last report in it, say
            typer.echo(f"passed over {place}: it is no directory", err=True)
    found = reporting.read_verified(reporting.find_runs(places), unverified=unverified)
    records = list(filter(reporting.is_of_experiment, found))
    for record in found if records else ():
        if not reporting.is_of_experiment(record):
            typer.echo(f"passed over {record.directory}: it is no run of an experiment", err=True)
    records = records or found
    reporting.write_report(records, out)
    drawn = reporting.write_figures(records, figures) if figures is not None else []
    if as_json:
        typer.echo(json.dumps({"report": str(out), "runs": len(records), "figures": [str(path) for path in drawn]}))
    elif not quiet:
        runs = f"{len(records)} run{'' if len(records) == 1 else 's'}"
        typer.echo(f"{out}: {runs}" + (f", {len(drawn)} figures in {figures}" if drawn else ""))


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Where the runs and the report go; by default runs/demo.")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of the processor, for each of the three.")] = 0.6,
    seed: Seed = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the runs that --out holds.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """SHF against tuned Adam and Schedule-Free in equal time, on a map that is here already: two minutes, and a report."""
    from shf.lab.demo import run_demo

    _refuse_file("--out", out)
    raise typer.Exit(run_demo(out, minutes=minutes, seed=seed, force=force, as_json=as_json, quiet=quiet))


@app.command()
def bench(
    out: Annotated[Path | None, typer.Option(help="Where the figures go.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this case or section, such as step or step/usps; an unknown name lists all."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shrunk shapes, once each.")] = False,
) -> None:
    """What a step costs: against its matrix products, with size, in memory, and beside its peers."""
    from shf.lab import bench as benchmarks

    _refuse_file("--out", out)
    raise typer.Exit(benchmarks.run(out, case, quick))


def _refuse_both(epochs: int | None, minutes: float | None) -> None:
    if epochs is not None and minutes is not None:
        raise ExperimentError(f"--epochs {epochs} and --minutes {minutes:g} contradict each other: give one of the two")


def _refuse_file(option: str, place: Path | None) -> None:
    if place is not None and place.exists() and not place.is_dir():
        raise ExperimentError(f"{option} {place}: a file; expected a directory, or the name of a new one")


def _conclude(result: RunResult, as_json: bool) -> None:
    """Print what a run ended with, remember how long its epochs took, and end with its exit code."""
    from shf.lab import measuring
    from shf.lab.observer import Status
    from shf.lab.records import plain

    summary, config = result.summary, result.config
    long_enough = summary.get("elapsed_seconds", 0.0) >= _TELLING_SECONDS
    if config.method == "shf" and not config.options and config.clock == "wall" and long_enough:
        measuring.remember(config.experiment.name, float(summary["seconds_per_epoch"]))
    if as_json:
        shown = {"status": result.status.value, "directory": str(result.directory), "warnings": list(result.warnings)}
        typer.echo(json.dumps(plain({**shown, "summary": summary}), indent=1))
    else:
        typer.echo(str(result.directory))
    if result.status is not Status.FINISHED or not result.saved:
        raise typer.Exit(FAILED)
