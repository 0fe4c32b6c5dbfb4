"""Records: what is written comes back, what was changed is found, what is hostile is refused; one process per directory."""

import io
import json
import math
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shf.lab.files import write_atomically
from shf.lab.lock import OWNER_FILE, RunLockedError, locked
from shf.lab.npz import write_npz
from shf.lab.records import (
    MetricsFile,
    RecordError,
    RunRecord,
    Seal,
    read_run,
    read_run_file,
    read_samples,
    write_run,
)

CONFIG = {"experiment": {"name": "tiny", "metric": "train_squared_error"}, "method": "shf"}


def record(directory: Path, *, status: str = "finished", rows: int = 3) -> MetricsFile:
    """A small, sealed record."""
    metrics = MetricsFile(directory / "metrics.jsonl")
    for epoch in range(rows):
        metrics.append({"row": "epoch", "epoch": epoch, "train_squared_error": 10.0 / (epoch + 1)})
        metrics.append({"row": "iteration", "iteration": epoch, "reduction_ratio": -math.inf})
    metrics.flush()
    samples = write_npz({"images": np.zeros((2, 4, 4), np.uint8)})
    (directory / "samples.npz").write_bytes(samples)
    seals = {"metrics": metrics.seal().to_json(), "samples": Seal.of(samples).to_json()}
    write_run(directory / "run.json", {"status": status, "config": CONFIG, **seals})
    return metrics


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    record(tmp_path)
    found = read_run(tmp_path)
    assert found.problems == ()
    assert found.status == "finished"
    np.testing.assert_array_equal(found.column("train_squared_error"), [10, 5, 3.333333])
    assert np.isneginf(found.column("reduction_ratio", "iteration")).all()
    assert np.isnan(found.column("absent")).all()
    assert found.samples["images"].shape == (2, 4, 4)


def test_samples_without_a_seal_are_no_part_of_the_record(tmp_path: Path) -> None:
    """A run that goes on after its end has none until it ends again."""
    record(tmp_path)
    before = read_run_file(tmp_path)
    write_run(tmp_path / "run.json", {key: value for key, value in before.items() if key != "samples"})
    found = read_run(tmp_path)
    assert found.problems == ()
    assert not found.samples


@pytest.mark.parametrize(("level", "epoch"), [(12, 0), (10, 0), (7.5, 0.5), (5, 1), (1, math.inf)])
def test_when_a_metric_was_reached(tmp_path: Path, level: float, epoch: float) -> None:
    """10, 5 and 3.3 at epochs 0, 1 and 2; between them on a line."""
    record(tmp_path)
    assert read_run(tmp_path).reached("train_squared_error", level, clock="epoch") == pytest.approx(epoch)


@pytest.mark.parametrize("before", [math.nan, math.inf])
def test_after_a_row_without_a_number_it_is_reached_at_its_own(tmp_path: Path, before: float) -> None:
    rows = [{"row": "epoch", "epoch": k, "error": error} for k, error in enumerate((9.0, before, 3.0))]
    found = RunRecord(tmp_path, {}, tuple(rows), (), {}, ())
    assert found.reached("error", 3.0, clock="epoch") == 2
    assert found.reached("error", math.nan, clock="epoch") == math.inf


def _replace(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        content = (directory / name).read_bytes()
        assert old in content
        (directory / name).write_bytes(content.replace(old, new, 1))

    return change


def _append(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).open("ab").write(content) and None


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a better figure": (_replace("metrics.jsonl", b"3.333333", b"1.333333"), "metrics.jsonl was changed"),
    "a row taken out": (
        _replace("metrics.jsonl", b'{"row":"epoch","epoch":1', b'{"row":"hidden","epoch":1'),
        "changed",
    ),
    "the end cut off": (lambda d: os.truncate(d / "metrics.jsonl", 40), "cut short"),
    "a row added": (_append("metrics.jsonl", b'{"row":"epoch","epoch":9}\n'), "after the end of the run"),
    "no metrics": (lambda d: (d / "metrics.jsonl").unlink(), "missing"),
    "another method": (_replace("run.json", b'"shf"', b'"sgd"'), "run.json was changed"),
    "another status": (_replace("run.json", b'"finished"', b'"running"'), "run.json was changed"),
    "other samples": (_replace("samples.npz", b"images", b"imogen"), "samples.npz was changed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_edit_by_hand_is_detected(tmp_path: Path, name: str) -> None:
    """Fails for each of the cases if `_seal_problems` no longer compares its part."""
    record(tmp_path)
    change, words = CHANGES[name]
    change(tmp_path)
    assert any(words in problem for problem in read_run(tmp_path).problems)


def test_rows_after_the_last_checkpoint_of_a_running_or_killed_run_are_no_edit(tmp_path: Path) -> None:
    metrics = record(tmp_path, status="running")
    metrics.append({"row": "epoch", "epoch": 3, "train_squared_error": 2.0})
    metrics.flush()
    with (tmp_path / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"row":"epoch","epo')  # killed while writing
    found = read_run(tmp_path)
    assert found.problems == ()
    assert len(found.epochs) == 4


def test_metrics_continue_after_a_seal_and_drop_what_follows_it(tmp_path: Path) -> None:
    """Fails if `MetricsFile.cut` does nothing: rows that are done again would be there twice, and after a
    shorter row the rest of a longer one."""
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.append({"epoch": 1})
    first.flush()
    seal = first.seal()
    first.append({"epoch": 2, "note": "longer than what comes next"})
    first.flush()
    second = MetricsFile.resume(path, seal)
    second.cut()
    assert path.read_text() == '{"epoch":1}\n'
    second.append({"epoch": 20})
    second.flush()
    assert path.read_text() == '{"epoch":1}\n{"epoch":20}\n'
    assert second.seal() == Seal.of(path.read_bytes())


def test_metrics_changed_before_the_seal_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append({"epoch": 1})
    metrics.flush()
    path.write_text('{"epoch":7}\n')
    with pytest.raises(RecordError, match="changed by hand or damaged"):
        MetricsFile.resume(path, metrics.seal())


def test_rows_wait_for_the_disk_and_none_is_lost(tmp_path: Path) -> None:
    """A missing directory stands for a mount that vanished; a half-written line for a disk that filled up. Fails if
    `flush` forgets rows before they are written."""
    home = tmp_path / "mount"
    home.mkdir()
    path = home / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append({"epoch": 1})
    metrics.flush()
    home.rename(tmp_path / "gone")
    metrics.append({"epoch": 2})
    with pytest.raises(OSError, match="mount"):
        metrics.flush()
    (tmp_path / "gone").rename(home)
    with path.open("ab") as handle:
        handle.write(b'{"epo')
    metrics.append({"epoch": 3})
    metrics.flush()
    assert path.read_text() == '{"epoch":1}\n{"epoch":2}\n{"epoch":3}\n'
    assert metrics.seal() == Seal.of(path.read_bytes())


def test_numbers_are_kept_short_and_json_stays_json(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"a": 1 / 3, "b": 2.0, "c": math.nan, "d": True, "e": None, "f": 1e-30})
    metrics.flush()
    expected = '{"a":0.3333333,"b":2,"c":"nan","d":true,"e":null,"f":1e-30}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == expected
    with pytest.raises(TypeError, match="set"):
        metrics.append({"a": {1, 2}})


def test_run_json_keeps_settings_exactly(tmp_path: Path) -> None:
    settings = {"learning_rate": 0.1 + 0.2, "x": 1 / 3}
    write_run(tmp_path / "run.json", {"config": settings})
    assert read_run_file(tmp_path)["config"] == settings


def test_an_atomic_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `write_atomically` writes in place."""
    path = tmp_path / "run.json"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a record"),
        (b"[]", "no schema"),
        (b'{"schema": "1"}', "no schema"),
        (b'{"schema": 99}', "upgrade shf"),
        (b"\xff\xfe", "not a record"),
        (b"[" * 100_000, "not a record"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """Fails, for the newer schema, if `read_run_file` does not look at it."""
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RecordError, match=words):
        read_run_file(tmp_path)


def test_an_absurdly_large_run_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "run.json").open("wb") as handle:
        handle.truncate(1 << 40)  # sparse: nothing is written
    with pytest.raises(RecordError, match="expected at most"):
        read_run_file(tmp_path)


@pytest.mark.parametrize("line", [b"{]\n", b"[1]\n", b"[" * 5000 + b"\n", b"x" * (1 << 20) + b"yyy\n"])
def test_a_row_that_is_none_is_an_error_with_its_line(tmp_path: Path, line: bytes) -> None:
    record(tmp_path, status="running", rows=1)
    with (tmp_path / "metrics.jsonl").open("ab") as handle:
        handle.write(line)
    with pytest.raises(RecordError, match="line 3"):
        read_run(tmp_path)


def test_missing_record_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run"):
        read_run(tmp_path)


def test_samples_come_back_and_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"labels": np.arange(3), "images": np.arange(27, dtype=np.uint8).reshape(3, 3, 3)}
    content = write_npz(arrays)
    assert content == write_npz(arrays)
    (tmp_path / "samples.npz").write_bytes(content)
    found = read_samples(tmp_path / "samples.npz")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def _npz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


HOSTILE = {
    "no archive": b"PK nothing",
    "a bomb": _npz({"images.npy": b"\0" * (1 << 25)}),
    "objects": _npz({"images.npy": _npy(np.array([{"a": 1}], dtype=object), allow_pickle=True)}),
    "absurd shape": _npz({"images.npy": _npy(np.zeros(8)).replace(b"(8,)", b"(8000000000000,)"[:16])}),
    "many members": _npz({f"{i}.npy": b"" for i in range(99)}),
    "empty member": _npz({"images.npy": b""}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_samples_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "samples.npz"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(RecordError, match=r"samples\.npz"):
        read_samples(path)


HOLD = "import sys,time; from pathlib import Path; from shf.lab.lock import locked\n" + (
    "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(3600)"
)


def test_a_second_process_is_refused_and_a_dead_ones_lock_is_taken_over(tmp_path: Path) -> None:
    """Fails if `locked` does not take the file lock: the second process would get in while the first holds it."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            words = f"process {process.pid} on host {socket.gethostname()}"
            with pytest.raises(RunLockedError, match=words), locked(tmp_path):
                pass
            with pytest.raises(RunLockedError, match=words), locked(tmp_path, force=True):
                pass
        finally:
            process.kill()
    with locked(tmp_path) as stale:
        assert stale is not None
        assert f"stale lock of process {process.pid}" in stale
    assert not (tmp_path / OWNER_FILE).exists()
    with locked(tmp_path) as stale:
        assert stale is None


def test_a_note_of_another_host_is_respected_until_forced(tmp_path: Path) -> None:
    """Fails if `_take_over` does not compare hosts."""
    (tmp_path / OWNER_FILE).write_text(json.dumps({"host": "elsewhere", "pid": 7}))
    with pytest.raises(RunLockedError, match=r"process 7 on host elsewhere.*--force"), locked(tmp_path):
        pass
    with locked(tmp_path, force=True) as stale:
        assert stale is not None


@pytest.mark.parametrize("note", [b"", b"{}", b"[" * 9999, b'{"host": 1, "pid": "x"}', b"\xff"])
def test_a_note_that_cannot_be_read_is_no_obstacle(tmp_path: Path, note: bytes) -> None:
    (tmp_path / OWNER_FILE).write_bytes(note)
    with locked(tmp_path) as stale:
        assert stale is None


def test_the_lock_is_released_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path) as stale:
        assert stale is None
