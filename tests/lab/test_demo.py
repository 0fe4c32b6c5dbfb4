"""The demonstration: three runs in equal time, a report, and a verdict that follows the figures whatever they are."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from runs_helpers import REPOSITORY, tiny_config
from typer.testing import CliRunner

from helpers import ticking
from shf.lab import demo
from shf.lab.clock import CLOCKS
from shf.lab.commands import app
from shf.lab.data import load, terrain
from shf.lab.data.errors import DamagedDataError, MissingDataError
from shf.lab.demo import NAMES, SEEN, UNSEEN, run_demo, verdict
from shf.lab.experiments import EXPERIMENTS, ExperimentError
from shf.lab.records import RunRecord, read_run
from shf.lab.runner import start

OFFLINE = """
import itertools, socket, sys

def refuse(*_):
    raise AssertionError("the demonstration must not use the network")

socket.socket.connect = refuse
from shf.lab import clock
clock.CLOCKS.update(dict.fromkeys(clock.CLOCKS, itertools.count().__next__))
from shf.lab.commands import app
app(sys.argv[1:])
"""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are processes without a network, in which a step takes a second."""
    genuine = demo._command

    def command(*words: Any) -> list[str]:
        python, _, module, *rest = genuine(*words)
        assert module == "shf"
        return [python, "-c", OFFLINE, *rest]

    monkeypatch.setattr(demo, "_command", command)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.usefixtures("soon")
def test_it_ends_with_a_table_one_sentence_and_the_way_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["demo", "--minutes", "1"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.strip().splitlines()
    headings = "optimizer training error, m error on unseen data, m epochs processor time set beforehand"
    assert " ".join(lines[0].split()) == headings
    assert [line.split("  ")[0] for line in lines[1:4]] == list(NAMES.values())
    records = [read_run(Path("runs/demo") / method) for method in NAMES]
    assert lines[4] == verdict(records)
    assert len(lines) == 6
    assert lines[-1].startswith("Report: runs/demo/report.html, to open in a browser: ")
    assert lines[-1].endswith(" runs/demo/report.html")
    assert "adam: terrain-demo with adam starts" in result.stderr
    page = Path("runs/demo/report.html").read_text()
    assert page.count("<svg") == 5
    assert page.count("as learned by") == 3
    for record in records:
        assert record.problems == ()
        assert record.config["threads"] == 1
        assert record.column("elapsed_seconds")[-1] == 60  # the same time for each, whose first minute is not decisive
        assert record.column(UNSEEN)[-1] == pytest.approx(record.column(SEEN)[-1], rel=0.05), "they go together"
    assert demo._fresh(Path("runs")) == Path("runs/demo-2")


def test_it_can_be_repeated_and_read_by_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(commands: Mapping[str, list[str]], *_: Any) -> list[int]:
        return [CliRunner().invoke(app, command[3:]).exit_code for command in commands.values()]

    monkeypatch.setattr(demo, "_side_by_side", here)
    for clock in CLOCKS:
        monkeypatch.setitem(CLOCKS, clock, ticking(20))
    start(tiny_config("adam", epochs=1), tmp_path / "adam")
    before = (tmp_path / "adam" / "metrics.jsonl").read_bytes()
    with pytest.raises(ExperimentError, match="adam holds a run; choose another --out"):
        run_demo(tmp_path, minutes=1)
    assert (tmp_path / "adam" / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "fast").exists()
    result = CliRunner().invoke(app, ["demo", "--minutes", "1", "--out", str(tmp_path), "--json", "--force"])
    answer = json.loads(result.stdout)
    assert [run["method"] for run in answer["runs"]] == list(NAMES)
    assert answer["verdict"] == verdict([read_run(tmp_path / method) for method in NAMES])


@pytest.mark.parametrize("script", ["import sys; sys.exit(1)", "import os; os.kill(os.getpid(), 15)"])
def test_without_all_runs_it_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(demo, "_command", lambda *_: [sys.executable, "-c", script])
    assert run_demo(tmp_path / "d", minutes=1, quiet=True) == 1
    assert not (tmp_path / "d" / "report.html").exists()


def test_after_an_interrupt_no_further_run_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the runs by itself; fails if those that wait for a core are begun all the same."""
    started = threading.Event()

    class Runs:
        def __init__(self, command: list[str], **_: Any) -> None:
            names.append(command[0])
            started.set()

        def __enter__(self) -> Any:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    names: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", Runs)
    with pytest.raises(KeyboardInterrupt):
        demo._side_by_side({name: [name] for name in "abcdefgh"}, 1, print)
    assert started.is_set()
    assert len(names) < 8


def records(**errors: tuple[float, float] | None) -> list[RunRecord]:
    """Made up: training error and error on unseen data by method; None diverged."""
    found = []
    for method, pair in errors.items():
        row = {"elapsed_seconds": 36.0} | ({} if pair is None else dict(zip((SEEN, UNSEEN), pair, strict=True)))
        run = {"status": "diverged" if pair is None else "finished", "config": {"method": method.replace("_", "-")}}
        found.append(RunRecord(Path(method), run, (row,), (), {}, ()))
    return found


@pytest.mark.parametrize(
    ("errors", "seen", "unseen"),
    [
        (
            {"fast": (3.0, 7.0), "adam": (4.0, 6.0), "schedule_free": (5.0, 9.0)},
            "SHF fast has the lowest training error, 3.0 m (then Adam, 4.0 m)",
            "Adam has the lowest error on unseen data, 6.0 m (then SHF fast, 7.0 m)",
        ),
        (
            {"fast": (5.0, 5.0), "adam": (4.0, 4.0), "schedule_free": (3.0, 4.01)},
            "Schedule-Free has the lowest training error, 3.0 m (then Adam, 4.0 m)",
            "Adam and Schedule-Free are level in error on unseen data (within 1 %), 4.0 m",
        ),
        (
            {"fast": None, "adam": (4.0, 5.0), "schedule_free": (float("nan"), float("nan"))},
            "Adam has the lowest training error, 4.0 m (the others diverged)",
            "Adam has the lowest error on unseen data, 5.0 m (the others diverged)",
        ),
    ],
)
def test_the_verdict_follows_the_figures(errors: dict[str, tuple[float, float] | None], seen: str, unseen: str) -> None:
    assert verdict(records(**errors)) == f"After 36 s of processor time each, {seen}, and {unseen}."


def test_a_verdict_where_nobody_is_left() -> None:
    assert verdict(records(fast=None, adam=None, schedule_free=None)) == "All of them diverged: nobody won."


def test_the_readmes_table_is_of_the_records_in_the_repository() -> None:
    """Records of one demonstration, none changed by hand; and the files do not grow."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    found = [read_run(REPOSITORY / "results" / "demo" / method) for method in NAMES]
    for record in found:
        assert record.problems == ()
        assert (record.config["minutes"], record.config["clock"], record.config["threads"]) == (0.6, "processor", 1)
        assert record.config["experiment"]["name"] == demo.EXPERIMENT
        seen, unseen = (f"{record.column(part)[-1]:.1f}" for part in (SEEN, UNSEEN))
        (row,) = re.findall(rf"^\| {NAMES[record.config['method']]} \|.*", readme, re.M)
        cells = [cell.strip(" *") for cell in row.split("|")]
        assert cells[2:5] == [seen, unseen, f"{record.column('epoch')[-1]:.0f}"]
    assert verdict(found) in readme
    assert sum(path.stat().st_size for path in (REPOSITORY / "results" / "demo").rglob("*")) < 1_000_000


# the data


def test_the_experiment_is_what_it_says() -> None:
    experiment = EXPERIMENTS["terrain-demo"]
    data = load(experiment.data)
    assert data.train_inputs.shape == (20_000, 2)
    assert data.test_inputs.shape == (10_000, 2)
    assert data.train_targets.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train_targets.std().item() == pytest.approx(1, abs=1e-5)
    places = [{tuple(place) for place in part.tolist()} for part in (data.train_inputs, data.test_inputs)]
    assert (len(places[0]), len(places[1])) == (20_000, 10_000)
    assert not places[0] & places[1]
    assert 100 < data.unit < 200  # metres
    with pytest.raises(ValueError, match="only mnist and usps can be standardised"):
        load(experiment.data, standardise=True)


def test_a_target_is_the_elevation_at_its_place() -> None:
    data, heights = load("terrain", train=50, test=20), terrain.elevations()
    rows, columns = (((data.test_inputs[:, k] + 1) / 2 * (heights.shape[k] - 1)).round().long() for k in (0, 1))
    metres = data.test_targets[:, 0] * data.unit
    expected = heights[rows.numpy(), columns.numpy()]
    assert (metres - metres[0]).tolist() == pytest.approx((expected - expected[0]).tolist(), abs=0.01)


def test_terrain_that_is_absent_or_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terrain, "path", lambda: tmp_path / "x.npz")
    with pytest.raises(MissingDataError, match="comes without its sample data"):
        load("terrain")
    (tmp_path / "x.npz").write_bytes(b"another")
    with pytest.raises(DamagedDataError, match="expected d493f50a"):
        load("terrain")
