"""`torchrun -m shf run`: rank 0 records, the others help; whatever fails, the run continues as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs_helpers import assert_same_run, rows_without_clock, tiny_config

from shf.lab.records import read_run
from shf.lab.runner import start

MAIN = Path(__file__).with_name("torchrun_main.py")
OPTIONS = {"run": ("--threads", "1", "--checkpoint-seconds", "0", "--quiet"), "resume": ("--quiet",)}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def launch(ranks: int, *words: str | Path, restarts: int = 0, fault: str | None = None) -> subprocess.Popen[str]:
    launcher = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        str(restarts),
    ]
    command = [sys.executable, "-m", *launcher, str(MAIN), *map(str, words), *OPTIONS[str(words[0])]]
    environment = {**os.environ, **({"FAULT": fault} if fault else {})}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torchrun(ranks: int, *words: str | Path, restarts: int = 0, fault: str | None = None) -> tuple[int, str]:
    with launch(ranks, *words, restarts=restarts, fault=fault) as process:
        _, errors = process.communicate(timeout=1200)
    return process.returncode, errors


def objectives(directory: Path) -> list[float]:
    return [row["objective"] for row in rows_without_clock(directory) if row["row"] == "iteration"]


def alone(directory: Path, epochs: int) -> None:
    """The same run in this process."""
    start(tiny_config(epochs=epochs), directory)


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs on two ranks, undisturbed: made once, and read by all who compare with it."""
    directory = tmp_path_factory.getbasetemp() / "whole-crew"
    if not directory.exists():
        code, errors = torchrun(2, "run", "tiny", "--epochs", "4", "--out", directory)
        assert code == 0, errors
    return directory


@pytest.mark.xdist_group("crew")
def test_a_run_on_two_ranks_is_the_run_on_one(tmp_path: Path, whole: Path) -> None:
    alone(tmp_path / "one", epochs=4)
    record = read_run(whole).run
    assert (record["status"], record["machine"]["processes"]) == ("finished", 2)
    assert record["command"].startswith("torchrun --nproc-per-node 2 -m shf run tiny ")
    assert "processes" not in read_run(tmp_path / "one").run["machine"]
    assert objectives(whole) == pytest.approx(objectives(tmp_path / "one"), rel=1e-4)
    assert len(objectives(whole)) == 12


@pytest.mark.xdist_group("crew")
@pytest.mark.parametrize(
    "fault",
    [
        "kill 1 5",
        pytest.param("kill 0 5", marks=pytest.mark.slow),
        pytest.param("raise 1 5", marks=pytest.mark.slow),
        pytest.param("raise 0 1", marks=pytest.mark.slow),
        pytest.param("break 1 5", marks=pytest.mark.slow),
        pytest.param("break 0 5", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_is_restarted_and_nothing_is_lost(tmp_path: Path, whole: Path, fault: str) -> None:
    words = ("run", "tiny", "--epochs", "4", "--out")
    # a restarted process was once seen to abort in std::terminate, outside of Python: they may try again
    code, errors = torchrun(2, *words, tmp_path / "failed", restarts=3, fault=fault)
    assert code == 0, errors
    if fault == "kill 1 5":
        assert "rank 1 gave no sign" in errors
    assert_same_run(tmp_path / "failed", whole)


@pytest.mark.slow
def test_without_restarts_the_run_fails_and_is_resumed_on_another_number_of_ranks(tmp_path: Path) -> None:
    code, errors = torchrun(2, "run", "tiny", "--epochs", "3", "--out", tmp_path / "run", fault="raise 1 5")
    assert code != 0
    assert "rank 1 raised ArithmeticError: a fault on purpose" in errors
    assert len(objectives(tmp_path / "run")) == 4
    code, errors = torchrun(3, "resume", tmp_path / "run")
    assert code == 0, errors
    alone(tmp_path / "one", epochs=3)
    assert objectives(tmp_path / "run") == pytest.approx(objectives(tmp_path / "one"), rel=1e-4)


@pytest.mark.slow
def test_a_hanging_rank_is_given_up(tmp_path: Path) -> None:
    words = ("run", "tiny", "--epochs", "3", "--set", "rank_timeout=5", "--out", tmp_path / "run")
    code, errors = torchrun(2, *words, fault="hang 1 5")
    assert code != 0
    assert re.search(r"error: .*rank 1 gave no sign within 5 s", errors)
    assert len(objectives(tmp_path / "run")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with launch(2, "run", "tiny", "--epochs", "100000", "--out", tmp_path / "run") as process:
        deadline = time.monotonic() + 1200
        while time.monotonic() < deadline and not (tmp_path / "run" / "checkpoints").exists():
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(number)
        process.communicate(timeout=1200)
    found = read_run(tmp_path / "run")
    assert found.run["status"] == "interrupted"
    reached = found.run["summary"]["epochs"] + 2
    assert torchrun(2, "resume", tmp_path / "run", "--epochs", str(reached))[0] == 0
    assert torchrun(2, "run", "tiny", "--epochs", str(reached), "--out", tmp_path / "whole")[0] == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_wrong_usage_is_said_once(tmp_path: Path) -> None:
    code, errors = torchrun(2, "run", "tiny", "--optimizer", "adam", "--epochs", "1", "--out", tmp_path / "run")
    assert code != 0
    assert errors.count("adam works on one process; under torchrun only shf does its steps on 2") == 1
