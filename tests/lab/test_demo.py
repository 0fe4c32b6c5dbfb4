"""The demonstration: four runs in equal time, a report, and a verdict that follows the figures whatever they are."""

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from runs_helpers import tiny_config
from typer.testing import CliRunner

from shf.lab import configure, demo
from shf.lab.commands import app
from shf.lab.demo import run_demo, verdict
from shf.lab.experiments import EXPERIMENTS, ExperimentError
from shf.lab.observer import RunResult, Status
from shf.lab.records import read_run
from shf.lab.runner import start


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demonstration on fewer curves and units."""
    experiment = dataclasses.replace(
        EXPERIMENTS["curves-demo"],
        data_options={"train": 60, "test": 20},
        sizes=(784, 8, 2),
        gradient_batch=20,
        settings={"damping": 1.0, "cg_iterations": 3, "curvature_batch": 10},
    )
    monkeypatch.setattr(configure, "find", lambda _: experiment)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the demonstration must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("small", "no_network", "ticking")
def test_it_ends_with_a_table_the_report_and_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--minutes", "1", "--out", str(tmp_path / "d")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.strip().splitlines()
    assert "optimizer" in lines[0]
    assert [line.split()[0] for line in lines[1:5]] == ["fast", "shf", "adam", "nag"]
    assert lines[5] == f"Report: {tmp_path / 'd' / 'report.html'}"
    assert len(lines) == 7
    assert "won" in lines[6] or "level" in lines[6]
    assert "curves-demo with adam starts" in result.stderr
    page = (tmp_path / "d" / "report.html").read_text()
    assert page.count("<svg") == 5
    for method in ("fast", "shf", "adam", "nag"):
        found = read_run(tmp_path / "d" / method)
        assert found.problems == ()
        assert found.epochs[-1]["elapsed_seconds"] == 60  # the same time for each


@pytest.mark.usefixtures("small", "ticking")
def test_it_can_be_repeated_and_read_by_a_script(tmp_path: Path) -> None:
    words = ["demo", "--minutes", "1", "--out", str(tmp_path / "d"), "--json"]
    for more in ((), ("--force",)):
        result = CliRunner().invoke(app, [*words, *more])
        answer = json.loads(result.stdout)
        assert [run["method"] for run in answer["runs"]] == ["fast", "shf", "adam", "nag"]
        assert answer["verdict"] == verdict([_again(tmp_path / "d" / m) for m in ("fast", "shf", "adam", "nag")])


@pytest.mark.usefixtures("small", "ticking")
def test_a_directory_with_a_run_of_its_own_is_left_as_it_is(tmp_path: Path) -> None:
    start(tiny_config("adam", epochs=1), tmp_path / "adam")
    before = (tmp_path / "adam" / "metrics.jsonl").read_bytes()
    with pytest.raises(ExperimentError, match="adam holds a run; choose another --out"):
        run_demo(tmp_path, minutes=1)
    assert (tmp_path / "adam" / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "fast").exists()


def _again(directory: Path) -> RunResult:
    """The result as its record tells it."""
    run = read_run(directory).run
    config = tiny_config(run["config"]["method"])
    return RunResult(Status(run["status"]), directory, config, run["summary"])


@pytest.mark.usefixtures("small", "ticking")
def test_stopped_by_a_signal_it_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Any, directory: Path, **_: Any) -> RunResult:
        return RunResult(Status.INTERRUPTED, directory, config, {})

    monkeypatch.setattr(demo, "start", interrupted)
    assert run_demo(tmp_path / "d", minutes=1, quiet=True) == 1
    assert not (tmp_path / "d" / "report.html").exists()


def results(**errors: float | None) -> list[RunResult]:
    """Results by method; None diverged."""
    return [
        RunResult(
            Status.DIVERGED if error is None else Status.FINISHED,
            Path(method),
            tiny_config(method),
            {"value": error, "elapsed_seconds": 36.0},
        )
        for method, error in errors.items()
    ]


@pytest.mark.parametrize(
    ("errors", "sentence"),
    [
        ({"shf": 3.0, "adam": 4.0, "nag": 5.0}, "SHF won: training error 3.000 in 36 s, against 4.000 by Adam."),
        ({"fast": 2.0, "shf": 3.0}, "SHF fast won: training error 2.000 in 36 s, against 3.000 by SHF."),
        ({"shf": 5.0, "adam": 4.0, "nag": 3.0}, "NAG won: training error 3.000 in 36 s, against 4.000 by Adam."),
        ({"shf": 5.0, "adam": 3.0, "nag": 4.0}, "Adam won: training error 3.000 in 36 s, against 4.000 by NAG."),
        ({"shf": 3.0, "adam": 3.01}, "SHF and Adam ended level (within 1 %): training error 3.000 in 36 s."),
        ({"shf": None, "adam": 3.0, "nag": None}, "Adam won: training error 3.000 in 36 s; the others diverged."),
        ({"shf": None, "adam": None}, "All of them diverged: nobody won."),
        ({"shf": float("nan"), "adam": 2.0}, "Adam won: training error 2.000 in 36 s; the others diverged."),
    ],
)
def test_the_verdict_follows_the_figures(errors: dict[str, float | None], sentence: str) -> None:
    assert verdict(results(**errors)) == sentence


def test_the_experiment_is_what_it_says() -> None:
    experiment = EXPERIMENTS["curves-demo"]
    assert experiment.data == "curves"
    assert experiment.data_options == {"train": 4000, "test": 1000}
