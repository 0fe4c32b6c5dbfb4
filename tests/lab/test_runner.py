"""Runs: recorded, interrupted, killed and continued exactly; a failing disk does not stop them."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_helpers import (
    assert_same_run,
    files,
    final_state,
    rows_without_clock,
    tiny_config,
    tiny_experiment,
)

from helpers import ticking
from realdata import real
from shf.lab import checkpoint, machine, runner
from shf.lab.baselines import registry
from shf.lab.baselines.protocol import MethodSpec
from shf.lab.baselines.registry import METHODS
from shf.lab.batches import batch_rows
from shf.lab.checkpoint import CheckpointMismatchError, read
from shf.lab.crew import Crew
from shf.lab.experiments import EXPERIMENTS, Experiment, ExperimentError, Task
from shf.lab.observer import Observer, Progress, Status
from shf.lab.records import RUN_FILE, RecordError, read_run, write_run
from shf.lab.runconfig import Pretraining

OFTEN = runner.RunOptions(checkpoint_seconds=0.0)


class Watcher(Observer):
    """Remembers what it is told, and does something at a given iteration."""

    def __init__(self, at: int = -1, action: Any = None) -> None:
        self.at, self.action = at, action
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.iterations: list[int] = []
        self.was_closed = False

    def iteration(self, row: Mapping[str, Any], progress: Progress) -> None:
        self.iterations.append(progress.iteration)
        if progress.iteration == self.at:
            self.action()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def closed(self) -> None:
        self.was_closed = True


def die() -> None:
    raise RuntimeError("killed")


# batches


def test_batches_are_a_pure_function_of_seed_and_epoch() -> None:
    first = batch_rows(10, 4, seed=3, epoch=0)
    assert [len(rows) for rows in first] == [4, 4, 2]
    assert torch.cat(first).sort().values.tolist() == list(range(10))
    for epoch in (0, 1, 7):
        assert all(map(torch.equal, first, batch_rows(10, 4, seed=3, epoch=epoch)))
    assert not all(map(torch.equal, first, batch_rows(10, 4, seed=4, epoch=0)))


def test_reshuffling_cuts_every_epoch_anew() -> None:
    orders = [torch.cat(batch_rows(50, 8, seed=0, epoch=e, reshuffle=True)).tolist() for e in range(5)]
    assert len({tuple(order) for order in orders}) == 5
    assert orders[3] == torch.cat(batch_rows(50, 8, seed=0, epoch=3, reshuffle=True)).tolist()


def test_batches_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        batch_rows(10, 0, seed=0, epoch=0)


# what a run leaves


def test_the_best_is_over_all_evaluations(tmp_path: Path) -> None:
    """Fails if only whole epochs count: of a run that ends inside its first there would be no best."""
    timed = dataclasses.replace(tiny_config("adam", batch=1), epochs=None, minutes=1)
    summary = runner.start(timed, tmp_path / "run", options=runner.RunOptions(clock=ticking(30.0))).summary
    assert summary["iterations"] == 2
    assert summary["epochs"] == 0
    assert summary["best"] == summary["value"]


def test_a_run_tells_by_which_source_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.start(tiny_config(epochs=1), tmp_path / "run")
    found = machine.versions()
    assert read_run(tmp_path / "run").run["versions"] == found
    assert re.fullmatch("[0-9a-f]{12}", found["shf's source"])
    monkeypatch.setattr(machine, "_source", lambda: "0" * 12)
    watcher = Watcher()
    runner.resume(tmp_path / "run", epochs=2, observer=watcher)
    assert "shf's source 000000000000 is installed, the run was started with" in watcher.warnings[0]


def test_a_run_leaves_a_complete_record(tmp_path: Path) -> None:
    result = runner.start(tiny_config(), tmp_path / "run")
    assert result.status is Status.FINISHED
    assert result.saved
    found = read_run(tmp_path / "run")
    assert found.problems == ()
    assert [row["epoch"] for row in found.epochs] == [0, 1, 2, 3]
    assert [row["iteration"] for row in found.iterations] == list(range(1, 10))
    last = found.epochs[-1]
    assert last["train_squared_error"] == pytest.approx(2 * last["train_half_squared_error"], rel=1e-6)
    assert last["train_squared_error"] < found.epochs[0]["train_squared_error"]
    for field in ("objective", "damping", "reduction_ratio", "cg_decay", "update_scale", "step_size", "chosen_iterate"):
        assert field in found.iterations[0]
        assert field in last
    assert found.samples["originals"].shape == (12, 28, 28)
    assert found.samples["reconstructions"].dtype == "uint8"
    run = found.run
    assert run["versions"]["torch"] == torch.__version__
    assert run["data"]["checksums"]
    assert run["command"] == "shf run tiny --optimizer shf --epochs 3 --seed 0 --threads 1 --untuned"
    assert run["summary"]["value"] == pytest.approx(last["train_squared_error"], rel=1e-6)
    assert run["config"]["settings"]["damping"] == 1.0


def test_costs_add_up_to_passes_over_the_data(tmp_path: Path) -> None:
    """One gradient, evaluations at 1/3 and products at 4/3, products on 8 of 16 rows counting half."""
    runner.start(tiny_config(epochs=1), tmp_path)
    found = read_run(tmp_path)
    total = sum(r["gradients"] + r["evaluations"] / 3 + r["products"] * 4 / 3 for r in found.iterations)
    assert found.epochs[-1]["passes"] == pytest.approx(total * 16 / 48, rel=1e-5)
    assert found.epochs[-1]["gradients"] == 3


def test_the_best_epoch_is_kept(tmp_path: Path) -> None:
    result = runner.start(tiny_config(epochs=4), tmp_path)
    best = read(tmp_path / "checkpoints" / "best.ckpt")
    assert best["epoch"] == result.summary["best_epoch"]
    errors = read_run(tmp_path).column("train_squared_error")[1:]
    assert result.summary["best"] == pytest.approx(errors.min(), rel=1e-6)


def test_rows_can_be_thinned_but_epochs_stay(tmp_path: Path) -> None:
    runner.start(tiny_config(rows_every=4), tmp_path)
    found = read_run(tmp_path)
    assert [row["iteration"] for row in found.iterations] == [4, 8]
    assert len(found.epochs) == 4


def test_rows_between_epochs_where_they_are_asked_for(tmp_path: Path) -> None:
    """Three steps of one second in an epoch, and a row every two seconds."""
    config = dataclasses.replace(tiny_config(), evaluate_seconds=2.0)
    result = runner.start(config, tmp_path, options=runner.RunOptions(clock=ticking()))
    found = read_run(tmp_path)
    assert found.column("elapsed_seconds").tolist() == [0, 2, 3, 4, 6, 8, 9]
    assert found.column("epoch").tolist() == pytest.approx([0, 2 / 3, 1, 4 / 3, 2, 8 / 3, 3])
    plain = runner.start(tiny_config(), tmp_path / "plain")
    assert result.summary["best"] == plain.summary["best"]


def test_the_callers_generator_and_threads_are_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    runner.start(dataclasses.replace(tiny_config(epochs=1), threads=2), tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == 1


def test_tensorboard_events_hold_the_epochs(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runner.start(tiny_config(), tmp_path, options=runner.RunOptions(tensorboard=True))
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    values = [event.value for event in events.Scalars("epoch/train_squared_error")]
    assert values == pytest.approx(read_run(tmp_path).column("train_squared_error").tolist(), rel=1e-5)


def test_minutes_end_a_run_inside_an_epoch(tmp_path: Path) -> None:
    config = dataclasses.replace(tiny_config("adam", batch=1), epochs=None, minutes=30.0 / 60)
    runner.start(config, tmp_path, options=runner.RunOptions(clock=ticking(0.5)))
    last = read_run(tmp_path).epochs[-1]
    assert last["elapsed_seconds"] == 30.0
    assert last["iteration"] == 60
    assert last["epoch"] == pytest.approx(60 / 48)


def test_a_signal_in_the_last_iteration_interrupts_nothing(tmp_path: Path) -> None:
    class Last(Observer):
        def iteration(self, row: Mapping[str, Any], progress: Progress) -> None:
            if progress.iteration == 9:
                os.kill(os.getpid(), signal.SIGTERM)

    assert runner.start(tiny_config(), tmp_path, observer=Last()).status is Status.FINISHED


def test_a_record_keeps_what_its_earlier_parts_were_computed_with(tmp_path: Path) -> None:
    runner.start(tiny_config(epochs=1), tmp_path)
    record = tmp_path / "run.json"
    content = json.loads(record.read_text())
    content["versions"]["torch"], content["warnings"] = "1.0", ["the disk was full"]
    write_run(record, content)
    runner.resume(tmp_path, epochs=2)
    found = json.loads(record.read_text())
    assert found["earlier"] == [{"versions": content["versions"], "machine": content["machine"]}]
    assert found["warnings"][0] == "the disk was full"
    assert "the run was started with 1.0" in found["warnings"][1]
    runner.resume(tmp_path, epochs=3)
    assert len(json.loads(record.read_text())["earlier"]) == 1


def test_a_record_tells_how_many_processes_there_were(tmp_path: Path) -> None:
    """A record of one process says nothing about it, as before."""

    class Two(Crew):
        size = 2  # type: ignore[assignment]

    two, watcher = runner.RunOptions(crew=Two()), Watcher()
    runner.start(tiny_config(epochs=1), tmp_path, options=two)
    started = read_run(tmp_path).run
    assert started["machine"] == {**machine.description(), "processes": 2}
    assert started["command"].startswith("torchrun --nproc-per-node 2 -m shf run tiny ")
    runner.resume(tmp_path, epochs=2, options=two, observer=watcher)
    assert watcher.warnings == []
    runner.resume(tmp_path, epochs=3, observer=watcher)
    (warning,) = watcher.warnings
    assert "goes on with 1 process, its earlier part had 2" in warning
    ended = read_run(tmp_path).run
    assert ended["warnings"] == [warning]
    assert ended["machine"] == machine.description()
    assert [part["machine"] for part in ended["earlier"]] == [started["machine"]]
    assert ended["command"].startswith("shf run tiny ")


def test_seconds_per_epoch_are_those_of_batches_that_grew(tmp_path: Path) -> None:
    training = runner.new_training(tiny_config(epochs=2), None, clock=ticking())
    for size in (16, 48):
        training.position.batch = size
        while not training.epoch_ended:
            training.iterate()
        training.end_epoch()
    assert training.summary()["seconds_per_epoch"] == 2.0  # three steps of a second, then one


def test_an_objective_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    config = tiny_config("sgd", options=("learning_rate=1e38",))
    result = runner.start(config, tmp_path)
    assert result.status is Status.DIVERGED
    found = read_run(tmp_path)
    assert found.status == "diverged"
    assert found.problems == ()


@pytest.mark.parametrize("method", ["shf", "hf"])
def test_a_loss_that_is_not_finite_ends_the_run_too(tmp_path: Path, method: str) -> None:
    """SHF refuses such a batch by an error. Fails where that leaves the run as if it were still going on."""
    config = tiny_config(method, options=("initialisation_scale=1e30",))
    assert runner.start(config, tmp_path).status is Status.DIVERGED
    assert read_run(tmp_path).status == "diverged"


def test_settings_that_only_a_batch_can_refute_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"shf: .* named no tensor to hold steady"):
        runner.start(tiny_config(options=("structural_damping=1",)), tmp_path)


def test_pretraining_moves_the_start(tmp_path: Path) -> None:
    config = tiny_config(epochs=1)
    runner.start(config, tmp_path / "plain")
    pretrained = dataclasses.replace(config, pretraining=Pretraining("denoising", 2))
    runner.start(pretrained, tmp_path / "pretrained")
    start = [rows_without_clock(tmp_path / name)[0]["train_loss"] for name in ("plain", "pretrained")]
    assert start[0] != start[1]


# going on exactly


@pytest.mark.parametrize("method", METHODS)
def test_every_optimizer_runs_and_continues_exactly(tmp_path: Path, method: str) -> None:
    """Interrupted in the middle of an epoch and resumed: the same rows and bitwise the same state."""
    config = tiny_config(method, experiment=_experiment_for(method), epochs=2)
    runner.start(config, tmp_path / "whole")
    steps = 2 if METHODS[method].reads_batches else 6
    stop = Watcher(steps - 1 if steps == 2 else 4, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = runner.start(config, tmp_path / "parts", observer=stop)
    assert result.status is Status.INTERRUPTED
    assert read_run(tmp_path / "parts").status == "interrupted"
    assert read_run(tmp_path / "parts").problems == ()
    result = runner.resume(tmp_path / "parts")
    assert result.status is Status.FINISHED
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert read_run(tmp_path / "parts").problems == ()


def _experiment_for(method: str) -> Experiment:
    """CURVES for all; the dropout methods need something with dropout, so that their masks must continue too."""
    if METHODS[method].dropout is None:
        return tiny_experiment()
    return tiny_experiment(
        task=Task.CLASSIFIER,
        data="curves-as-classes",
        sizes=(784, 6, 4, 10),
        metric="test_errors",
        input_dropout=0.2,
        hidden_dropout=0.5,
    )


@pytest.fixture(autouse=True)
def _classes_of_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A classification problem without files: tell in which of ten columns a curve has most ink."""
    from shf.lab import problem

    genuine = problem.load

    def load(name: str, **options: Any) -> Any:
        if name != "curves-as-classes":
            return genuine(name, **options)
        options.pop("standardise", None)
        data = genuine("curves", **options)

        def classes(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 28, 28).sum(1)[:, 4:24].reshape(-1, 10, 2).sum(2).argmax(1)

        targets = {"train_targets": classes(data.train_inputs), "test_targets": classes(data.test_inputs)}
        return dataclasses.replace(data, name=name, classes=10, **targets)

    monkeypatch.setattr(problem, "load", load)


def test_dropout_masks_of_shf_continue_exactly(tmp_path: Path) -> None:
    config = tiny_config(experiment=_experiment_for("dropout-sgd-all"), epochs=2)
    runner.start(config, tmp_path / "whole")
    runner.start(config, tmp_path / "parts", observer=Watcher(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    runner.resume(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    found = read_run(tmp_path / "parts")
    wrong = int(found.epochs[-1]["test_errors"])
    assert found.samples["images"].shape == (wrong, 28, 28)
    assert (found.samples["labels"] != found.samples["predictions"]).all()


class Noisy:
    """A method that draws from torch's global generator, as a careless one would."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameter = next(model.parameters())

    def step(self, inputs: Any, targets: Any) -> dict[str, float]:
        with torch.no_grad():
            self.parameter.add_(0.01 * torch.rand(()))
        return {"objective": float(torch.rand(())), "gradients": 1.0}

    def next_epoch(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_the_global_generator_continues_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MethodSpec("noisy", "draws from the global generator", lambda model, *_: Noisy(model), {})
    monkeypatch.setattr(registry, "METHODS", {**METHODS, "noisy": spec})
    config = dataclasses.replace(tiny_config(), method="noisy", settings={})
    runner.start(config, tmp_path / "whole")
    runner.start(config, tmp_path / "parts", observer=Watcher(5, lambda: os.kill(os.getpid(), signal.SIGINT)))
    runner.resume(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_reshuffled_batches_continue_exactly(tmp_path: Path) -> None:
    config = tiny_config("nag", experiment=tiny_experiment(reshuffle=True))
    runner.start(config, tmp_path / "whole")
    runner.start(config, tmp_path / "parts", observer=Watcher(5, lambda: os.kill(os.getpid(), signal.SIGINT)))
    runner.resume(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    watcher, before = Watcher(2, twice), signal.getsignal(signal.SIGINT)  # ignored where started in the background
    with pytest.raises(KeyboardInterrupt):
        runner.start(tiny_config(), tmp_path, observer=watcher)
    assert watcher.was_closed
    assert signal.getsignal(signal.SIGINT) is before


def test_more_epochs_continue_as_if_they_had_been_asked_for(tmp_path: Path) -> None:
    runner.start(tiny_config(epochs=5), tmp_path / "whole")
    runner.start(tiny_config(epochs=2), tmp_path / "parts")
    assert runner.resume(tmp_path / "parts").summary["epochs"] == 2  # finished: nothing to do
    result = runner.resume(tmp_path / "parts", epochs=5)
    assert result.summary["epochs"] == 5
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert read_run(tmp_path / "parts").run["config"]["epochs"] == 5


@pytest.mark.parametrize(("epochs", "says"), [(1, "gone through 2 and a part already"), (2, "2 and a part")])
def test_a_killed_run_is_not_made_one_of_fewer_epochs(tmp_path: Path, epochs: int, says: str) -> None:
    """Three iterations an epoch. Fails if the limit is compared with the summary, which a killed run does not have."""
    with pytest.raises(RuntimeError, match="killed"):
        runner.start(tiny_config(epochs=5), tmp_path / "run", observer=Watcher(8, die), options=OFTEN)
    before = files(tmp_path / "run")
    with pytest.raises(ExperimentError, match=says):
        runner.resume(tmp_path / "run", epochs=epochs)
    assert files(tmp_path / "run") == before
    assert runner.resume(tmp_path / "run", epochs=3).summary["epochs"] == 3


def test_a_record_that_is_refused_stays_as_it_is(tmp_path: Path) -> None:
    """Fails if run.json is written before the metrics were verified: a finished run would become an unfinished one."""
    runner.start(tiny_config(epochs=2), tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"epoch":1,', '"epoch":7,', 1))
    before = files(tmp_path / "run")
    with pytest.raises(RecordError, match="cannot be continued"):
        runner.resume(tmp_path / "run", epochs=5)
    assert files(tmp_path / "run") == before


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "created": lambda record: record.update(created="2001-01-01T00:00:00+00:00"),
    "machine": lambda record: record["machine"].update(processor="an abacus"),
    "versions": lambda record: record["versions"].update(torch="9.9"),
    "config.tuning": lambda record: record["config"]["tuning"].update(words="tuned: 0.1 (best of 99)"),
    "config.method": lambda record: record["config"].update(method="nonsense"),
    "config.threads": lambda record: record["config"].update(threads="two"),
    "warnings": lambda record: record.update(warnings=5),
    "earlier": lambda record: record.update(earlier=5),
    "summary": lambda record: record.update(summary=[1]),
    "its seal": lambda record: record.pop("record_sha256"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("killed", [False, True])
def test_an_edited_record_is_not_continued(tmp_path: Path, edit: str, killed: bool) -> None:
    """Fails if `resume` does not look at the record's own seal: the change would come under a new one, and be believed."""
    config, path = tiny_config(epochs=2), tmp_path / "run.json"
    if killed:
        with pytest.raises(RuntimeError, match="killed"):
            runner.start(config, tmp_path, observer=Watcher(4, die), options=OFTEN)
    else:
        runner.start(config, tmp_path)
    intact = path.read_bytes()
    record = json.loads(intact)
    EDITS[edit](record)
    path.write_text(json.dumps(record))
    before = files(tmp_path)
    for epochs in (None, 3):
        with pytest.raises(RecordError, match=r"own SHA-256 does not match; .* cannot be continued|not a record"):
            runner.resume(tmp_path, epochs=epochs)
    assert files(tmp_path) == before
    path.write_bytes(intact)
    assert runner.resume(tmp_path, epochs=3).status is Status.FINISHED


def test_more_epochs_for_a_schedule_that_ends_with_the_run_are_warned_about(tmp_path: Path) -> None:
    runner.start(tiny_config("nag", epochs=2), tmp_path / "nag")
    watcher = Watcher()
    runner.resume(tmp_path / "nag", epochs=3, observer=watcher)
    assert "begun for 2 epochs and now has 3 epochs" in watcher.warnings[0]
    assert read_run(tmp_path / "nag").run["warnings"] == watcher.warnings


def test_a_run_stopped_by_the_clock_inside_an_epoch_continues_without_the_extra_row(tmp_path: Path) -> None:
    runner.start(tiny_config("adam", epochs=2, batch=1), tmp_path / "whole")
    timed = dataclasses.replace(tiny_config("adam", batch=1), epochs=None, minutes=1)
    assert runner.start(timed, tmp_path / "parts", options=runner.RunOptions(clock=ticking())).summary["epochs"] == 1
    runner.resume(tmp_path / "parts", epochs=2)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_killed_before_the_first_checkpoint_it_starts_again(tmp_path: Path) -> None:
    runner.start(tiny_config(), tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        runner.start(tiny_config(), tmp_path / "parts", observer=Watcher(4, die))
    watcher = Watcher()
    runner.resume(tmp_path / "parts", observer=watcher)
    assert "from its beginning" in watcher.notes[0]
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


KILL = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from runs_helpers import tiny_config
from shf.lab import runner
import torch._dynamo  # which optimizers import: once, and not in every child
torch.set_num_threads(1)
home, kills, seed = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
config = tiny_config(epochs=12)
often = runner.RunOptions(checkpoint_seconds=0.0)
draw = random.Random(seed)

def child(resumed):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        result = runner.resume(home, options=often) if resumed else runner.start(config, home, options=often)
        code = 0 if result.status.value == "finished" else 2
    finally:
        os._exit(code)

def size():
    try:
        return (home / "metrics.jsonl").stat().st_size
    except OSError:
        return 0

def killed(pid):
    # after a few writes (by their number, so that a slow machine is killed as far on) and a moment more
    writes, last = draw.randint(0, 4), size()
    while writes:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        now = size()
        writes, last = writes - (now != last), now
        time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.02))
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]

done, status = 0, None
while status is None or not os.WIFEXITED(status):
    pid = child((home / "run.json").exists())
    status = killed(pid) if done < kills else os.waitpid(pid, 0)[1]
    done += os.WIFSIGNALED(status)
print("kills", done, "code", os.WEXITSTATUS(status))
"""


def _killed_run(home: Path, kills: int, seed: int) -> str:
    command = [sys.executable, "-c", KILL, str(Path(__file__).parent), str(home), str(kills), str(seed)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(("kills", "rounds"), [(10, 1), pytest.param(25, 8, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_the_same(tmp_path: Path, kills: int, rounds: int) -> None:
    """SIGKILL again and again, also inside checkpoint writes (one follows every iteration), then resume.

    Fails if metrics.jsonl is not cut back to the checkpoint, if a checkpoint is written in place, or if the method's
    state is left out of it. The slow form kills 200 times.
    """
    runner.start(tiny_config(epochs=12), tmp_path / "whole")
    for number in range(rounds):
        home = tmp_path / f"killed{number}"
        printed = _killed_run(home, kills, seed=random.randrange(1 << 30))
        assert printed.strip().endswith("code 0"), printed
        assert_same_run(tmp_path / "whole", home)
        assert read_run(home).problems == ()


def test_progress_is_right_where_batches_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where all iterations are divided by those of the present epoch, which are fewer than they were."""
    monkeypatch.setattr(
        "shf.data.growing.BatchSize.hear", lambda self, *_: dataclasses.replace(self, size=min(2 * self.size, 24))
    )
    fractions: list[float] = []

    class Listens(Watcher):
        def epoch(self, row: Mapping[str, Any], progress: Progress) -> None:
            fractions.append(progress.fraction)

    config = tiny_config("fast", epochs=4, batch=6, options=("noise_every=1",))
    runner.start(config, tmp_path, observer=Listens())
    assert fractions == [0.25, 0.5, 0.75, 1.0]
    assert len(read_run(tmp_path).iterations) < 4 * 8  # they have grown


# refusals


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path: Path) -> None:
    """A mount that is missing for a moment. Fails without `_refuse_to_start_over`: the run starts from its beginning, and
    removes what is there of the old one. Fails, too, if `Recorder.checkpoint` does not write the metrics that it counts."""

    with pytest.raises(RuntimeError, match="killed"):
        runner.start(tiny_config(), tmp_path, observer=Watcher(6, die), options=OFTEN)
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RecordError, match="says that checkpoints were saved, but there is none"):
        runner.resume(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
    assert runner.resume(tmp_path).status is Status.FINISHED


@pytest.mark.parametrize("more", [{}, {"epochs": 5}], ids=["interrupted", "finished, with a new limit"])
def test_a_record_without_its_checkpoints_is_never_begun_anew(tmp_path: Path, more: dict[str, int]) -> None:
    """As in a clone, which has records and no checkpoints."""
    runner.start(
        tiny_config(), tmp_path, observer=None if more else Watcher(4, lambda: signal.raise_signal(signal.SIGTERM))
    )
    shutil.rmtree(tmp_path / "checkpoints")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(runner.CheckpointsGoneError, match="but there is none in checkpoints/"):
        runner.resume(tmp_path, **more)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}


def test_a_directory_with_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    runner.start(tiny_config(epochs=1), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(ExperimentError, match="holds another run"):
        runner.start(tiny_config("adam"), tmp_path)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    runner.start(tiny_config("adam"), tmp_path, options=runner.RunOptions(force=True))
    found = read_run(tmp_path)
    assert found.config["method"] == "adam"
    assert found.problems == ()


def test_a_fresh_directory_is_found(tmp_path: Path) -> None:
    first = runner.fresh_directory(tiny_config(), tmp_path)
    assert first == tmp_path / "tiny" / "shf-seed0"
    runner.start(tiny_config(epochs=1), first)
    assert runner.fresh_directory(tiny_config(), tmp_path).name == "shf-seed0-2"


@pytest.mark.parametrize("other", ["works there", "was there and has ended"])
@pytest.mark.parametrize("force", [False, True])
def test_of_runs_started_together_each_finds_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, force: bool
) -> None:
    """Another process takes the directory between the search for it and the lock, and has no note there yet (or again)."""
    config, genuine = tiny_config(epochs=1), runner.locked
    taken = runner.fresh_directory(config, tmp_path)

    @contextlib.contextmanager
    def overtaken(directory: Path, **how: Any) -> Iterator[str | None]:
        if directory == taken and other == "works there":
            stack.enter_context(genuine(directory))
            (directory / "owner.json").unlink()
        elif directory == taken:
            monkeypatch.setattr(runner, "locked", genuine)
            runner.start(tiny_config("adam", epochs=1), directory)
        with genuine(directory, **how) as stale:
            yield stale

    monkeypatch.setattr(runner, "locked", overtaken)
    with contextlib.ExitStack() as stack:
        result = runner.start_fresh(config, tmp_path, options=runner.RunOptions(force=force))
    assert result.directory == taken.with_name("shf-seed0-2")
    assert read_run(result.directory).status == Status.FINISHED
    assert other == "works there" or read_run(taken).config["method"] == "adam"


def test_a_restarted_run_finds_its_directory_beside_others(tmp_path: Path) -> None:
    """Beside a finished run, and one of a version whose configuration cannot be read."""
    config = tiny_config(epochs=1)
    runner.start(config, runner.fresh_directory(config, tmp_path))
    for record in ({"config": config.to_json()}, {"config": {"experiment": {"name": "tiny"}}}):
        directory = runner.fresh_directory(config, tmp_path)
        directory.mkdir()
        write_run(directory / RUN_FILE, {"status": "running", **record})
    assert runner.unfinished_directory(config, tmp_path).name == "shf-seed0-2"
    other = tiny_config(epochs=1, options=("damping=3",))
    assert runner.unfinished_directory(other, tmp_path) == runner.fresh_directory(other, tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "nonsense"}, "no optimizer is called 'nonsense'"),
        ({"method": 5}, "method=5: must be a name"),
        ({"threads": 0}, "threads=0: must be at least 1"),
        ({"threads": "two"}, "threads='two': must be a whole number"),
        ({"threads": True}, "threads=True: must be a whole number"),
        ({"seed": "a"}, "seed='a': must be a whole number"),
        ({"batch": -1}, "batch=-1: must be at least 0"),
        ({"epochs": 1.5}, "epochs=1.5: must be a whole number or None"),
        ({"minutes": "1"}, "minutes='1': must be a number greater than 0, or None"),
        ({"settings": ["a"]}, "settings is ['a'], expected an object"),
        ({"clock": ["wall"]}, "must be one of 'wall', 'processor'"),
        ({"pretraining": {"epoch": 5}}, "the recorded configuration cannot be read"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    """Of a record that was sealed all the same, by another version say."""
    runner.start(tiny_config(epochs=1), tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    record["config"].update(changes)
    write_run(tmp_path / "run.json", record)
    with pytest.raises((ExperimentError, RecordError), match=re.escape(says)):
        runner.resume(tmp_path, **({} if "epochs" in changes or "minutes" in changes else {"epochs": 2}))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Fails if `Training.load_state` does not compare fingerprints."""
    for name, changes in (("a", {}), ("b", {"sizes": (784, 7, 2)})):
        config = tiny_config(epochs=1, experiment=tiny_experiment(**changes))
        runner.start(config, tmp_path / name)
    for file in (tmp_path / "a" / "checkpoints").glob("iteration-*"):
        file.replace(tmp_path / "b" / "checkpoints" / file.name)
    with pytest.raises(CheckpointMismatchError, match="another configuration"):
        runner.resume(tmp_path / "b", epochs=2)


def test_a_state_that_does_not_fit_the_network_is_refused(tmp_path: Path) -> None:
    runner.start(tiny_config(epochs=1), tmp_path)
    store = checkpoint.CheckpointStore(tmp_path / "checkpoints")
    state = final_state(tmp_path)
    state["model"] = {name: value[:1] for name, value in state["model"].items()}
    store.save(4, state)
    with pytest.raises(CheckpointMismatchError, match="does not fit the network"):
        runner.resume(tmp_path, epochs=2)


def test_other_data_are_refused(tmp_path: Path) -> None:
    runner.start(tiny_config(epochs=1), tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    record["data"]["checksums"] = {"other": "00"}
    write_run(tmp_path / "run.json", record)
    with pytest.raises(RecordError, match="other data"):
        runner.resume(tmp_path, epochs=2)


def test_settings_that_the_method_refuses_name_it(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="cg_iterations"):
        runner.start(tiny_config(options=("cg_iterations=0",)), tmp_path)


# a disk that fails


def _refused(number: int) -> None:
    raise OSError(number, os.strerror(number))


def _full_disk() -> None:
    _refused(errno.ENOSPC)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_a_checkpoint_that_cannot_be_written_warns_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Fails if `Recorder` does not guard its writes: the run would end with the OSError."""
    genuine = checkpoint.write_atomically
    broken = iter([False] * 3 + [True] * 4 + [False] * 99)
    monkeypatch.setattr(checkpoint, "write_atomically", lambda *a: _refused(number) if next(broken) else genuine(*a))
    watcher = Watcher()
    result = runner.start(tiny_config(), tmp_path / "run", observer=watcher, options=OFTEN)
    assert result.status is Status.FINISHED
    assert watcher.iterations == list(range(1, 10))
    assert sum("could not be written" in text for text in watcher.warnings) in (1, 2)
    assert any(os.strerror(number) in text for text in watcher.warnings)
    assert any("can be written again" in text for text in watcher.warnings)
    found = read_run(tmp_path / "run")
    assert found.problems == ()
    assert found.run["warnings"] == watcher.warnings
    monkeypatch.undo()


def test_a_run_whose_last_checkpoint_fails_is_not_called_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk too full for a checkpoint, but not for run.json. Fails if the record says "finished" all the same: the last
    parameters are then nowhere, and `resume` has nothing to do."""
    runner.start(tiny_config(), tmp_path / "whole")
    genuine = checkpoint.write_atomically

    def too_large(path: Path, content: bytes) -> None:
        if path.name > "iteration-0000000004.ckpt":
            _full_disk()
        genuine(path, content)

    monkeypatch.setattr(checkpoint, "write_atomically", too_large)
    result = runner.start(tiny_config(), tmp_path / "run", options=OFTEN)
    assert (result.status, result.saved) == (Status.FINISHED, False)
    assert read_run(tmp_path / "run").status == Status.INTERRUPTED
    monkeypatch.setattr(checkpoint, "write_atomically", genuine)
    assert runner.resume(tmp_path / "run").saved
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_after_failed_checkpoints_the_last_good_one_continues_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.start(tiny_config(), tmp_path / "whole")
    genuine = checkpoint.write_atomically
    writes = iter(range(999))
    monkeypatch.setattr(checkpoint, "write_atomically", lambda *a: _full_disk() if next(writes) > 4 else genuine(*a))

    with pytest.raises(RuntimeError, match="killed"):
        runner.start(tiny_config(), tmp_path / "parts", observer=Watcher(8, die), options=OFTEN)
    monkeypatch.setattr(checkpoint, "write_atomically", genuine)
    watcher = Watcher()
    runner.resume(tmp_path / "parts", observer=watcher)
    assert 1 < watcher.iterations[0] < 8
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("fails", ["the writer", "add_scalar", "close"])
def test_events_that_cannot_be_written_are_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Fails if `Recorder` does not guard the events: the run would end with the OSError of a row, or at its end."""
    tried: list[str] = []

    class Writer:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.attempt("the writer")

        def add_scalar(self, *_: Any) -> None:
            self.attempt("add_scalar")

        def close(self) -> None:
            self.attempt("close")

        def attempt(self, name: str) -> None:
            tried.append(name)
            if name == fails:
                _full_disk()

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)
    watcher = Watcher()
    result = runner.start(tiny_config(), tmp_path, observer=watcher, options=runner.RunOptions(tensorboard=True))
    assert (result.status, result.saved) == (Status.FINISHED, True)
    assert watcher.iterations == list(range(1, 10))
    (warning,) = watcher.warnings
    assert "the TensorBoard events could not be written" in warning
    assert read_run(tmp_path).run["warnings"] == [warning]
    assert tried.count(fails) == 1
    assert tried[-1] == fails, "nothing is asked of a writer that has failed"


def test_a_run_directory_that_vanishes_does_not_stop_the_training(tmp_path: Path) -> None:
    home = tmp_path / "run"
    watcher = Watcher(3, lambda: home.rename(tmp_path / "gone"))
    result = runner.start(tiny_config(), home, observer=watcher, options=OFTEN)
    assert watcher.iterations == list(range(1, 10))
    assert not result.saved
    assert any("could not be written" in text for text in watcher.warnings)


def test_a_directory_that_comes_back_has_lost_nothing(tmp_path: Path) -> None:
    runner.start(tiny_config(), tmp_path / "whole")
    home = tmp_path / "run"

    class Mount(Watcher):
        def iteration(self, row: Mapping[str, Any], progress: Progress) -> None:
            if progress.iteration == 3:
                home.rename(tmp_path / "gone")
            if progress.iteration == 7:
                (tmp_path / "gone").rename(home)

    result = runner.start(tiny_config(), home, observer=Mount(), options=OFTEN)
    assert result.saved
    assert_same_run(tmp_path / "whole", home)
    assert read_run(home).problems == ()


def test_a_damaged_last_checkpoint_is_passed_over_and_said_so(tmp_path: Path) -> None:
    """Fails if `_continue` does not say it."""
    runner.start(tiny_config(), tmp_path / "whole")
    stop = Watcher(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    runner.start(tiny_config(), tmp_path / "parts", observer=stop, options=OFTEN)
    newest = sorted((tmp_path / "parts" / "checkpoints").glob("iteration-*"))[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    watcher = Watcher()
    runner.resume(tmp_path / "parts", observer=watcher)
    assert watcher.iterations[0] == 5
    assert any("damaged checkpoint was passed over" in text for text in watcher.warnings)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_damage_twice_in_a_row_is_survived(tmp_path: Path) -> None:
    """The newest checkpoint is damaged; resumed, the run saves once, and that one is damaged too. Fails if `resume` does not
    tell its recorder what it found damaged: nothing intact would be left."""
    runner.start(tiny_config(), tmp_path / "whole")

    def damage_newest() -> None:
        newest = sorted((tmp_path / "parts" / "checkpoints").glob("iteration-*"))[-1]
        newest.write_bytes(newest.read_bytes()[:-1])

    with pytest.raises(RuntimeError, match="killed"):
        runner.start(tiny_config(), tmp_path / "parts", observer=Watcher(7, die), options=OFTEN)
    damage_newest()  # of iteration 6; that of 5 is left
    seldom = runner.RunOptions(checkpoint_seconds=3600.0)
    stop = Watcher(7, lambda: os.kill(os.getpid(), signal.SIGINT))
    runner.resume(tmp_path / "parts", observer=stop, options=seldom)
    damage_newest()  # of iteration 7
    watcher = Watcher()
    assert runner.resume(tmp_path / "parts", observer=watcher).status is Status.FINISHED
    assert watcher.iterations[0] == 6
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# the paper's experiments on real data


NEEDS = {"mnist": "mnist", "mnist-autoencoder": "mnist", "usps": "usps", "reuters": "reuters"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_runs_with_shf(tmp_path: Path, name: str) -> None:
    """One epoch on a part of the real data: its network, its settings, its error."""
    experiment = EXPERIMENTS[name]
    needed = NEEDS.get(experiment.data)
    place = None if needed is None else real(needed)
    part = dataclasses.replace(
        experiment, data_options={"train": 200, "test": 60}, gradient_batch=100, evaluation_cases=None
    )
    config = dataclasses.replace(tiny_config(experiment=part, batch=100), epochs=1)
    result = runner.start(config, tmp_path, options=runner.RunOptions(data_dir=place))
    assert result.status is Status.FINISHED
    found = read_run(tmp_path)
    assert found.problems == ()
    assert found.epochs[1]["train_loss"] < found.epochs[0]["train_loss"]
    assert experiment.metric in found.epochs[1]
    assert bool(found.samples) == (experiment.data != "reuters")
