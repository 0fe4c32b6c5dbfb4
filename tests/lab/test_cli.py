"""The command line: exit codes, JSON, refusals with nothing overwritten, signals, completion."""

import dataclasses
import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import typer.main
from rich.console import Console
from runs_helpers import assert_same_run, files, tiny_config, tiny_experiment
from typer.testing import CliRunner, Result

import shf
from shf import cli
from shf.lab import bench, checkpoint, choices, commands, experiments, runner, subjects
from shf.lab.baselines.registry import METHODS
from shf.lab.checkpoint import CheckpointStore
from shf.lab.observer import Observer, Status
from shf.lab.progress import BarObserver, LineObserver, QuietObserver, closing, show
from shf.lab.records import read_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _tiny_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with a tiny experiment first."""
    registry = MappingProxyType({"tiny": tiny_experiment(), **experiments.EXPERIMENTS})
    monkeypatch.setattr(experiments, "EXPERIMENTS", registry)
    monkeypatch.setattr(commands, "EXPERIMENTS", registry)
    monkeypatch.setenv("COLUMNS", "200")


def shf_command(*words: str | Path) -> Result:
    return CliRunner().invoke(commands.app, [str(word) for word in words])


def run_tiny(out: Path, *words: str) -> Result:
    return shf_command("run", "tiny", "--out", out, "--epochs", "2", "--threads", "1", "--quiet", *words)


# what works


def documented() -> list[str]:
    """The commands that README and docs show, but for those with placeholders or patterns in them."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    found = re.findall(r"(?:`|^)(shf [a-z]+(?: [^`#\n]*)?)", text, re.MULTILINE)
    return sorted({command.strip() for command in found if not re.search(r"\b[A-Z]{3,}\b|\*|…", command)})


def test_documented_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group = typer.main.get_command(commands.app)
    shown = documented()
    assert len(shown) > 50
    for command in shown:
        _, name, *words = shlex.split(command)
        assert name in group.commands, command  # type: ignore[attr-defined]
        if words:  # else it is but named
            group.commands[name].make_context(name, words)  # type: ignore[attr-defined]


def test_version_and_help() -> None:
    result = shf_command("--version")
    assert (result.exit_code, result.output) == (0, f"shf {shf.__version__}\n")
    result = shf_command("--help")
    assert result.exit_code == 0
    for command in ("demo", "list", "data", "tune", "run", "resume", "report", "bench"):
        assert f" {command} " in result.output


def test_the_module_is_the_command() -> None:
    found = subprocess.run([sys.executable, "-m", "shf", "--version"], capture_output=True, text=True, timeout=1200)
    assert (found.returncode, found.stdout) == (0, f"shf {shf.__version__}\n")


def test_list_shows_the_paper_and_what_was_measured_here() -> None:
    from shf.lab import measuring

    measuring.remember("usps-classifier", 0.5)
    result = shf_command("list")
    assert result.exit_code == 0
    words = re.sub(r"\s+", " ", result.output)
    assert "mnist-autoencoder" in words
    assert "λ 10, gradient 2000, curvature 2000, ζ 25, 250 epochs" in words
    assert "107 errors (Figure 2)" in words
    assert "8 min" in words
    rows = json.loads(shf_command("list", "--json").output)
    measured = {row["name"]: row["seconds_per_epoch_here"] for row in rows}
    assert measured["usps-classifier"] == 0.5
    assert measured["mnist-classifier"] is None


def test_the_list_keeps_the_sizes_of_a_network_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = shf_command("list").output
    assert "784-400-200-100-50-25-6" in listed
    assert max(map(len, listed.splitlines()[:-1])) <= 80


def test_data_are_listed() -> None:
    rows = json.loads(shf_command("data", "--json").output)
    assert {"mnist", "usps", "reuters", "curves", "terrain"} == {row["name"] for row in rows}
    result = shf_command("data")
    assert result.exit_code == 0
    assert "curves" in result.output


def test_curves_can_be_got_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from shf.lab.data import curves

    monkeypatch.setattr(curves, "TRAIN", 20)
    monkeypatch.setattr(curves, "TEST", 10)
    result = shf_command("data", "get", "curves", "--quiet")
    assert result.exit_code == 0
    assert "curves:" in result.output
    assert "generating" not in shf_command("data", "get", "curves").stderr, "they are there already"


def test_run_resume_report(tmp_path: Path) -> None:
    result = run_tiny(tmp_path / "a")
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(tmp_path / "a")
    result = shf_command("resume", tmp_path / "a", "--epochs", "3", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.output)
    assert answer["status"] == "finished"
    assert answer["summary"]["epochs"] == 3
    again = shf_command("resume", tmp_path / "a")
    assert again.exit_code == 0
    assert "has finished; give it more with --epochs or --minutes" in again.stderr
    assert shf_command("resume", tmp_path / "a", "--quiet").stderr == ""
    page = tmp_path / "out" / "report.html"
    result = shf_command("report", tmp_path, "--out", page, "--figures", tmp_path / "figures", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.output)
    assert answer["runs"] == 1
    assert len(answer["figures"]) == 5
    assert page.read_text().startswith("<!doctype html>")


def test_report_passes_over_files_beside_the_runs(tmp_path: Path) -> None:
    """`shf report runs/*`, where a report is among the runs already."""
    run_tiny(tmp_path / "runs" / "a")
    page = tmp_path / "runs" / "report.html"
    page.touch()
    result = shf_command("report", tmp_path / "runs" / "a", page, "--out", page)
    assert (result.exit_code, result.stdout) == (0, f"{page}: 1 run\n")
    assert result.stderr == f"passed over {page}: it is no directory\n"
    result = shf_command("report", page, "--out", tmp_path / "r.html")
    assert (result.exit_code, f"{page} is no directory" in result.stderr) == (1, True)


def test_run_chooses_a_fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("runs/tiny/adam-seed4", "runs/tiny/adam-seed4-2"):
        result = shf_command("run", "tiny", "-o", "adam", "--epochs", "1", "--seed", "4", "--quiet", "--untuned")
        assert result.output.strip() == expected


def test_progress_goes_to_standard_error_and_the_answer_to_standard_output(tmp_path: Path) -> None:
    result = shf_command("run", "tiny", "--out", tmp_path / "a", "--epochs", "2", "--threads", "1")
    assert result.stdout.strip() == str(tmp_path / "a")
    assert "tiny with shf starts" in result.stderr
    assert "λ" in result.stderr
    assert "finished after 2 epochs" in result.stderr


def test_what_is_left_is_not_estimated_at_the_end(tmp_path: Path) -> None:
    words = ("run", "tiny", "--threads", "1", "--optimizer", "adam", "--set", "gradient_batch=10000", "--epochs")
    assert "of training to go" in shf_command(*words, "6", "--out", tmp_path / "a").stderr
    assert "of training to go" not in shf_command(*words, "5", "--out", tmp_path / "b").stderr


def test_pretraining_is_announced(tmp_path: Path) -> None:
    words = ("--pretrain", "denoising", "--pretrain-epochs", "2", "--epochs", "1", "--threads", "1")
    assert "pretraining (denoising, 2 epochs per layer)" in shf_command("run", "tiny", "--out", tmp_path, *words).stderr


@pytest.mark.usefixtures("ticking")
def test_tune_writes_what_run_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHF_TUNED", str(tmp_path / "mine.json"))
    result = shf_command("tune", "tiny", "adagrad", "--minutes", "1", "--quiet")
    assert result.exit_code == 0, result.output
    assert "tuned:" in result.output
    chosen = json.loads((tmp_path / "mine.json").read_text())["tiny"]["adagrad"]["settings"]["learning_rate"]
    assert run_tiny(tmp_path / "a", "-o", "adagrad").exit_code == 0
    config = read_run(tmp_path / "a").config
    assert config["settings"]["learning_rate"] == chosen
    assert config["tuning"]["tried"] >= 5


@pytest.mark.usefixtures("ticking")
def test_tune_shows_every_trial(tmp_path: Path) -> None:
    shown = shf_command("tune", "tiny", "adagrad", "--minutes", "1", "--out", tmp_path / "t.json").stderr
    trials = len(METHODS["adagrad"].grid["learning_rate"])
    assert len(re.findall(rf"^rung 1, with {trials} trials: learning_rate=[\d.]+: [\d.]+$", shown, re.M)) == trials


def test_a_report_counts_its_runs(tmp_path: Path) -> None:
    for count in ("1 run", "2 runs"):
        run_tiny(tmp_path / count)
        page = tmp_path / "r.html"
        assert shf_command("report", tmp_path, "--out", page).output == f"{page}: {count}\n"


def test_bench_is_called_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(bench, "run", lambda out, cases, quick: seen.append((out, cases, quick)) or 1)
    assert shf_command("bench", "--quick", "--case", "a", "--case", "b").exit_code == 1
    assert seen == [(None, ["a", "b"], True)]


def test_completion_knows_the_names() -> None:
    assert "tiny" in list(commands._experiment_names("ti"))
    assert list(commands._method_names("momentum")) == ["momentum-0.99", "momentum-0.9"]
    command = [sys.executable, "-m", "shf", "--show-completion", "bash"]
    told = {
        **os.environ,
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }  # there may be no shell above this process
    found = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=told)
    assert found.returncode == 0
    assert "complete" in found.stdout


# what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "mnist-clasifier"], "did you mean 'mnist-classifier'"),
        (["run", "tiny", "--optimizer", "adma"], "did you mean 'adam'"),
        (["run", "tiny", "--epochs", "2", "--minutes", "1"], "contradict each other"),
        (["run", "tiny", "--split", "2"], "only USPS has splits"),
        (["run", "tiny", "--pretrain-epochs", "2"], "without --pretrain"),
        (["run", "tiny", "--pretrain", "luck"], "denoising or rbm"),
        (["run", "tiny", "--set", "dampign=1"], "did you mean 'damping'"),
        (["run", "tiny", "--set", "seed=5"], "give --seed"),
        (["run", "tiny", "--set", "cg_iterations=0"], "cg_iterations=0"),
        (["run", "tiny", "--optimizer", "dropout-sgd-all"], "trains with dropout"),
        (["run", "curves-demo", "--optimizer", "dropout-sgd-all"], "curves-demo has none"),
        (["run", "curves-demo", "--set", "hidden_dropout=0.5"], "hidden_dropout=0.5: must be 0"),
        (["run", "tiny", "--set", "evaluation_cases=0"], "evaluation_cases=0: must be at least 1"),
        (["run", "tiny", "--set", "initialisation_scale=NaN"], "must be a finite number"),
        (["run", "tiny", "--seed", str(2**64)], "--seed"),
        (["run", "tiny", "--epochs", "0"], "--epochs"),
        (["run", "tiny", "--bogus"], "No such option"),
        (["run", "tiny", "--set", "sed=5"], "no such setting"),
        (["run", "tiny", "--optimizer", "adam", "--set", "learning_rate=null"], "expected a value like"),
        (["tune", "tiny", "shf"], "nothing to tune"),
        (["tune", "tiny", "adam", "--minutes", "inf"], "--minutes inf: must be a finite number"),
        (["tune", "tinny", "adam"], "did you mean 'tiny'"),
        (["tune", "usps-classifier", "dropout-sgd-last"], "use usps-classifier-dropout"),
        (["report", ".", "--out", "."], "--out .: a directory; expected the page's file"),
        (["report", ".", "--figures", "file"], "--figures file: a file; expected a directory"),
        (["run", "tiny", "--out", "file"], "--out file: a file; expected a directory"),
        (["demo", "--out", "file"], "--out file: a file; expected a directory"),
    ],
)
def test_bad_commands_end_with_2_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = shf_command(*words)
    assert result.exit_code == 2, result.output
    assert message in re.sub(r"\s+", " ", result.stderr)
    assert not any((tmp_path / "runs").rglob("run.json"))


def test_tune_refuses_a_file_that_is_not_its_own_before_the_search(tmp_path: Path) -> None:
    other = tmp_path / "notes.json"
    other.write_text("[]")
    result = shf_command("tune", "tiny", "adam", "--minutes", "600", "--out", other)
    assert result.exit_code != 0
    assert "is not a file of tuned settings" in re.sub(r"\s+", " ", result.stderr)
    assert other.read_text() == "[]"


def test_an_out_that_holds_another_run_is_refused_without_force(tmp_path: Path) -> None:
    run_tiny(tmp_path / "a")
    before = files(tmp_path / "a")
    result = run_tiny(tmp_path / "a", "-o", "adam")
    assert result.exit_code == 2
    assert "holds another run" in result.stderr
    assert files(tmp_path / "a") == before
    assert run_tiny(tmp_path / "a", "-o", "adam", "--force").exit_code == 0
    assert read_run(tmp_path / "a").config["method"] == "adam"


def test_a_checkpoint_of_a_newer_version_or_another_architecture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tiny(tmp_path / "a")
    store = CheckpointStore(tmp_path / "a" / "checkpoints")
    loaded = store.load_latest()
    assert loaded is not None
    state = loaded.state
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint, "SCHEMA", 99)
        path = store.save(1000, state)
    before = files(tmp_path / "a")
    result = shf_command("resume", tmp_path / "a", "--epochs", "3")
    assert result.exit_code == 2
    assert "schema 99" in result.stderr
    assert files(tmp_path / "a") == before
    path.unlink()
    store.save(1001, {**state, "fingerprint": "of another network"})
    before = files(tmp_path / "a")
    result = shf_command("resume", tmp_path / "a", "--epochs", "3")
    assert result.exit_code == 2
    assert "another configuration" in result.stderr
    assert files(tmp_path / "a") == before


def test_other_records_are_passed_over(tmp_path: Path) -> None:
    """Fails where the records of a contest, or a directory without any, keep the runs beside them from being shown."""
    run_tiny(tmp_path / "runs" / "a")
    shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / "contest")
    record = tmp_path / "runs" / "contest" / "run.json"
    record.write_text(record.read_text().replace('"experiment": {', '"task": {', 1))
    (tmp_path / "runs" / "empty").mkdir()
    places = sorted((tmp_path / "runs").iterdir())
    result = shf_command("report", *places, "--out", tmp_path / "r.html", "--unverified")
    assert result.exit_code == 0, result.stderr
    assert "contest: it is no run of an experiment" in result.stderr
    assert (tmp_path / "r.html").exists()


def test_the_optimizers_are_listed() -> None:
    result = shf_command("list", "--optimizers")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in METHODS)
    listed = json.loads(shf_command("list", "--optimizers", "--json").stdout)
    assert [row["name"] for row in listed] == list(METHODS)
    result = shf_command("list", "--optimizers", "--measure")
    assert (result.exit_code, "leave one of the two out" in result.stderr) == (2, True)


@pytest.mark.usefixtures("ticking")
def test_a_limit_that_is_already_passed_is_refused(tmp_path: Path) -> None:
    run_tiny(tmp_path / "a", "--set", "gradient_batch=1")
    before = files(tmp_path / "a")
    for words, says in ((("--epochs", "1"), "gone through 2 already"), (("--minutes", "1"), "has trained for")):
        result = shf_command("resume", tmp_path / "a", *words)
        assert (result.exit_code, says in result.stderr) == (2, True), result.stderr
    assert files(tmp_path / "a") == before


def test_a_run_that_diverged_at_once_says_so_when_it_is_resumed(tmp_path: Path) -> None:
    run_tiny(tmp_path / "a", "--optimizer", "sgd", "--set", "learning_rate=1e38")
    result = shf_command("resume", tmp_path / "a")
    assert (result.exit_code, "the run diverged before a checkpoint" in result.stderr) == (1, True)


def test_options_of_a_subcommand_come_after_its_name(tmp_path: Path) -> None:
    result = shf_command("data", "--data-dir", tmp_path, "get", "usps")
    assert (result.exit_code, "come after its name" in result.stderr) == (2, True)


def test_a_place_that_cannot_be_written_to_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, says in (
        (tmp_path / "file" / "tuned.json", "cannot be written to"),
        (tmp_path, "a directory; expected"),
    ):
        result = shf_command("tune", "tiny", "adam", "--out", place)
        assert (result.exit_code, says in result.stderr, "rung" in result.stderr) == (2, True, False), result.stderr


@pytest.mark.usefixtures("ticking")
def test_a_choice_that_cannot_be_written_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(choices, "write_atomically", full_disk)
    result = shf_command("tune", "tiny", "sgd", "--minutes", "1", "--out", tmp_path / "tuned.json", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["method"] == "sgd"
    assert result.stderr.endswith(f"error: {tmp_path}: no space left on device\n")


@pytest.mark.parametrize(
    "words",
    [("data", "get", "mnits"), ("data", "--data-dir", "absent"), ("resume", "absent"), ("report", "absent")],
)
def test_a_name_that_does_not_exist_is_a_wrong_command(words: tuple[str, ...]) -> None:
    result = shf_command(*words)
    assert (result.exit_code, words[-1] in result.stderr) == (2, True), result.stderr


def test_the_systems_errors_are_told_without_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    for words in (("resume", tmp_path / "run"), ("report", tmp_path / "run")):
        result = shf_command(*words)
        assert (result.exit_code, "run.json: not a regular file" in result.stderr) == (1, True), result.stderr
    (tmp_path / "file").touch()
    result = shf_command("run", "tiny", "--out", tmp_path / "file" / "run", "--epochs", "1")
    assert (result.exit_code, result.stderr) == (1, f"error: {tmp_path / 'file' / 'run'}: not a directory\n")


def test_a_search_that_is_interrupted_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subjects, "tune_experiment", interrupted)
    result = shf_command("tune", "tiny", "adam", "--out", tmp_path / "tuned.json")
    assert (result.exit_code, result.stderr) == (1, "error: interrupted\n")


def test_a_reader_who_has_enough_ends_the_command_quietly() -> None:
    script = f"{sys.executable} -m shf list --json | head -c 1"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=1200)
    assert (found.stdout, found.stderr) == ("[", "")


def test_resume_names_the_runs_below_a_directory_that_is_none(tmp_path: Path) -> None:
    run_tiny(tmp_path / "tiny" / "a")
    result = shf_command("resume", tmp_path)
    assert result.exit_code == 1
    assert f"holds no run: run.json is missing; below it are {tmp_path / 'tiny' / 'a'}" in result.stderr


def test_failures_end_with_1(tmp_path: Path) -> None:
    result = shf_command("resume", tmp_path)
    assert (result.exit_code, "holds no run" in result.stderr) == (1, True)
    result = shf_command("report", tmp_path)
    assert (result.exit_code, "holds no run" in result.stderr) == (1, True)
    run_tiny(tmp_path / "a")
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"epoch":1,', '"epoch":7,', 1))
    result = shf_command("report", tmp_path / "a", "--out", tmp_path / "r.html")
    assert (result.exit_code, "was changed after it was written" in result.stderr) == (1, True)
    assert not (tmp_path / "r.html").exists()
    assert shf_command("report", tmp_path / "a", "--out", tmp_path / "r.html", "--unverified").exit_code == 0
    result = run_tiny(tmp_path / "b", "-o", "sgd", "--set", "learning_rate=1e38")
    assert result.exit_code == 1


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from shf.lab import report

    def broken(*_: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(report, "find_runs", broken)
    result = shf_command("report", ".")
    assert isinstance(result.exception, AssertionError)


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "pip install '.[lab]'" in capsys.readouterr().err


# signals, in a process of its own

TINY_MAIN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from types import MappingProxyType
from runs_helpers import tiny_experiment
from shf.lab import commands, experiments
experiments.EXPERIMENTS = commands.EXPERIMENTS = MappingProxyType({"tiny": tiny_experiment()})
commands.app()
"""


def process(*words: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-c", TINY_MAIN, str(Path(__file__).parent), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_rows(directory: Path, epoch: int) -> None:
    deadline = time.monotonic() + 1200
    while time.monotonic() < deadline:
        path = directory / "metrics.jsonl"
        if path.exists() and f'"row":"epoch","epoch":{epoch}' in path.read_text():
            return
        time.sleep(0.01)
    raise TimeoutError(f"no epoch {epoch} in {directory}")


@pytest.mark.parametrize(("status", "saved"), [(Status.INTERRUPTED, True), (Status.FINISHED, False)])
def test_a_command_that_is_suggested_can_be_pasted(tmp_path: Path, status: Status, saved: bool) -> None:
    place = tmp_path / "a run's"
    result = runner.start(tiny_config(epochs=1), place)
    suggested = closing(dataclasses.replace(result, status=status, saved=saved))
    assert shlex.split(suggested.partition(": ")[2]) == ["shf", "resume", str(place)]
    refusal = run_tiny(place).stderr
    assert shlex.split(refusal.split("`")[1]) == ["shf", "resume", str(place)]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path: Path, name: str) -> None:
    number = getattr(signal, name)
    words = ("run", "tiny", "--epochs", "20000", "--threads", "1", "--out", tmp_path / "a")
    with process(*words) as running:
        wait_for_rows(tmp_path / "a", 3)
        os.kill(running.pid, number)
        _, errors = running.communicate(timeout=1200)
    assert running.returncode == 1
    assert f"shf resume {tmp_path / 'a'}" in errors
    reached = read_run(tmp_path / "a").run["summary"]["epochs"]
    assert 3 <= reached < 20000
    for directory, epochs in ((tmp_path / "a", reached + 2),):
        assert shf_command("resume", directory, "--epochs", str(epochs), "--quiet").exit_code == 0
    whole = shf_command(
        "run", "tiny", "--epochs", str(reached + 2), "--threads", "1", "--out", tmp_path / "b", "--quiet"
    )
    assert whole.exit_code == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    with process("run", "tiny", "--epochs", "100000", "--threads", "1", "--out", tmp_path / "a") as running:
        try:
            wait_for_rows(tmp_path / "a", 2)
            result = shf_command("resume", tmp_path / "a")
            assert result.exit_code == 1
            assert f"process {running.pid} on host" in result.stderr
            result = run_tiny(tmp_path / "a", "--force")
            assert result.exit_code == 1
        finally:
            running.kill()
            running.communicate()
    result = shf_command("resume", tmp_path / "a", "--epochs", "3")
    assert result.exit_code == 0
    assert "stale lock" in result.stderr


# what a person sees


def test_on_a_terminal_there_is_a_bar_with_loss_error_damping_ratio_and_time(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    observer = show(console)
    assert isinstance(observer, BarObserver)
    runner.start(tiny_config(epochs=4), tmp_path / "a", observer=observer)
    seen = screen.getvalue()
    for words in ("epoch 1/4", "loss ", "train squared error ", "λ ", "ρ ", " left", "finished after 4 epochs"):
        assert words in seen, words
    assert isinstance(show(Console(file=screen)), LineObserver)
    assert isinstance(show(console, quiet=True), QuietObserver)


# who watches is gone


class Gone(io.StringIO):
    """A stream that takes so many writes, and then none; a terminal, if asked to be."""

    def __init__(self, error: Exception, writes: int = 0, *, terminal: bool = False) -> None:
        super().__init__()
        self.error, self.left, self.terminal = error, writes, terminal
        self.failures = 0

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            self.failures += 1
            raise self.error
        return super().write(text)

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "full"), BrokenPipeError(), OSError(errno.EIO, "gone"), ValueError("closed")],
    ids=repr,
)
@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("writes", [0, 1])
def test_a_run_goes_on_when_nobody_can_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, terminal: bool, quiet: bool, writes: int
) -> None:
    """Fails if an observer writes to a stream itself: the run would end with the error of a progress line or a warning."""
    stream = Gone(error, writes, terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    observer = show(Console(stderr=True), quiet=quiet)
    runner.start(tiny_config(epochs=1), tmp_path, observer=observer)
    assert read_run(tmp_path).run["status"] == "finished"
    for text in ("one", "two"):
        observer.warn(text)
    failures = stream.failures
    observer.warn("three")
    assert stream.failures == failures > 0, "it is silent after the first failure"


@pytest.mark.parametrize("quiet", [True, False])
def test_without_standard_error_warnings_do_not_go_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    show(Console(stderr=True), quiet=quiet).warn("the disk is full")
    assert capsys.readouterr().out == ""


def test_a_warning_that_nobody_takes_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `Recorder.say` lets the error of the observer out: a full disk would end the run by its own warning."""

    class Absent(Observer):
        def warn(self, text: str) -> None:
            raise BrokenPipeError

    genuine = checkpoint.write_atomically
    refusals = iter([OSError(errno.ENOSPC, "full")])

    def once_full(*words: Any) -> None:
        if (error := next(refusals, None)) is not None:
            raise error
        genuine(*words)

    monkeypatch.setattr(checkpoint, "write_atomically", once_full)
    options = runner.RunOptions(checkpoint_seconds=0.0)
    assert runner.start(tiny_config(epochs=1), tmp_path, observer=Absent(), options=options).saved
    assert "the checkpoint could not be written" in read_run(tmp_path).run["warnings"][0]


@pytest.mark.parametrize("shell", ["{} 2>/dev/full >/dev/null", "{} 2>&1 >/dev/null | true"])
def test_a_run_whose_progress_cannot_be_written_ends_with_0(tmp_path: Path, shell: str) -> None:
    """As a process, whose last act is to flush its streams."""
    words = ("run", "tiny", "--epochs", "1", "--threads", "1", "--out", str(tmp_path / "a"))
    command = shlex.join([sys.executable, "-c", TINY_MAIN, str(Path(__file__).parent), *words])
    script = f"set -o pipefail; {shell.format(command)}"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=1200)
    assert read_run(tmp_path / "a").run["status"] == "finished"
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.usefixtures("ticking")
def test_a_search_goes_on_when_nobody_can_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone(BrokenPipeError()))
    command = typer.main.get_command(commands.app)
    words = ["tune", "tiny", "adam", "--minutes", "1", "--out", str(tmp_path / "tuned.json")]
    command.main(words, standalone_mode=False)
    assert "tiny" in choices.read_choices(tmp_path / "tuned.json")
