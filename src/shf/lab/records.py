"""What a run leaves on disk, and how it is read back: ``run.json``, ``metrics.jsonl``, ``samples.npz``.

``metrics.jsonl`` holds one JSON object per line, ``"row": "epoch"`` or ``"row": "iteration"``. Names of wall-clock
fields end in ``_seconds``; every other field is a pure function of the configuration. ``run.json`` carries the SHA-256
of the metrics (a `Seal`), of the samples, and of itself, so that a record edited by hand is detected. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shf.lab.files import IrregularFileError, TooLargeError, open_regular, read_at_most, write_atomically
from shf.lab.npz import NpzError, read_npz

SCHEMA = 1
RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.npz"

_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("config", "data", "versions", "machine", "summary"), dict),
    **dict.fromkeys(("warnings", "earlier"), list),
}
_KINDS_OF_CONFIG: Mapping[str, type] = {
    **dict.fromkeys(("settings", "tuning", "pretraining"), dict),
    "options": list,
}
_LONGEST_LINE = 1 << 20
_LONGEST_RUN_FILE = 1 << 24
_LARGEST_SAMPLES = 1 << 24
_FLUSH_BYTES = 1 << 16
_ROW_DIGITS = 7  # single precision holds no more


class RecordError(RuntimeError):
    """A record that is missing, damaged, from a newer version, or changed after it was written."""


@dataclass(frozen=True)
class Seal:
    """The length of a file's sealed beginning and its SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Seal:
        return cls(len(content), hashlib.sha256(content).hexdigest())

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.sha256}

    @classmethod
    def from_json(cls, record: Any) -> Seal:
        if not isinstance(record, Mapping) or not isinstance(record.get("bytes"), int) or record["bytes"] < 0:
            raise RecordError(f"not a seal: {record!r}; expected {{'bytes': n, 'sha256': '…'}}")
        return cls(record["bytes"], str(record.get("sha256")))


class MetricsFile:
    """Appends rows to ``metrics.jsonl``; rows that cannot be written now wait in memory and are written later.

    Every write starts at the known end of the file, so a write that broke off half way (full disk) is simply repeated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0
        self._pending = bytearray()
        self._digest = hashlib.sha256()

    @classmethod
    def resume(cls, path: Path, seal: Seal) -> MetricsFile:
        """Continue after the sealed beginning, which is verified; what follows it will be done again: `cut` it off."""
        file = cls(path)
        file._digest = _digest_of_beginning(path, seal.size)
        file._written = seal.size
        if file._digest.hexdigest() != seal.sha256:
            raise RecordError(
                f"{path}: its first {seal.size} bytes are not those the checkpoint was written with; "
                "the record was changed by hand or damaged, and cannot be continued"
            )
        return file

    def cut(self) -> None:
        """Remove what follows the rows that are known."""
        with self._path.open("r+b") as handle:
            handle.truncate(self._written)

    def append(self, row: Mapping[str, Any]) -> None:
        line = (json.dumps(plain(row, _ROW_DIGITS), separators=(",", ":"), allow_nan=False) + "\n").encode()
        self._pending += line
        self._digest.update(line)

    @property
    def crowded(self) -> bool:
        """Whether enough rows wait in memory to be worth a write."""
        return len(self._pending) >= _FLUSH_BYTES

    def flush(self, *, sync: bool = False) -> None:
        """Write what waits. Raises OSError and keeps it waiting if that fails."""
        self._path.touch()
        with self._path.open("r+b") as handle:
            handle.seek(self._written)
            handle.write(self._pending)
            handle.flush()
            if sync:
                os.fsync(handle.fileno())
        self._written += len(self._pending)
        self._pending.clear()

    def seal(self) -> Seal:
        """The seal over everything appended so far, written or waiting."""
        return Seal(self._written + len(self._pending), self._digest.hexdigest())


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except IrregularFileError as error:
        raise RecordError(f"{error}; this is no record of a run") from None


def _digest_of_beginning(path: Path, size: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    left = size
    try:
        with _opened(path) as handle:
            while left and (block := handle.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
    except FileNotFoundError:
        raise RecordError(f"{path} is missing") from None
    if left:
        raise RecordError(f"{path}: {size - left} bytes, expected at least {size}; the file was cut short")
    return digest


def plain(value: Any, digits: int | None = None) -> Any:
    """Plain JSON data: floats exact or to so many digits, not-finite ones as the strings "nan", "inf", "-inf"."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return value if digits is None else _short(float(f"{value:.{digits}g}"))
    if isinstance(value, Mapping):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    raise TypeError(f"a record holds numbers, strings, lists and mappings; got {type(value).__name__}")


def _short(value: float) -> float | int:
    """A whole number without its '.0', which JSON does not need."""
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def write_run(path: Path, record: Mapping[str, Any]) -> None:
    """Write ``run.json`` atomically, sealed by the SHA-256 of its own content."""
    content = plain({**record, "schema": SCHEMA})
    content.pop("record_sha256", None)
    content["record_sha256"] = _own_digest(content)
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def _own_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_run_file(directory: Path) -> dict[str, Any]:
    """``run.json`` of a run directory, seals not checked; refuses what is no record, or one of a newer version."""
    path = directory / RUN_FILE
    try:
        record = json.loads(read_at_most(path, _LONGEST_RUN_FILE))
    except (IrregularFileError, TooLargeError) as error:
        raise RecordError(f"{error}; this is no record of a run") from None
    except FileNotFoundError:
        found = [path.parent for deep in ("*", "*/*") for path in sorted(directory.glob(f"{deep}/{RUN_FILE}"))]
        below = ", ".join(map(str, found[:5])) + (" and others" if len(found) > 5 else "")
        advice = f"; below it are {below}" if below else ""
        raise RecordError(f"{directory} holds no run: {RUN_FILE} is missing{advice}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not a record of a run: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise RecordError(f"{path}: not a record of a run: no schema number")
    if record["schema"] > SCHEMA:
        raise RecordError(
            f"{path}: written with record schema {record['schema']}, this version of shf reads up to {SCHEMA}; "
            "upgrade shf to read it"
        )
    _check_kinds(path, record, _KINDS)
    _check_kinds(path, record.get("config") or {}, _KINDS_OF_CONFIG)
    return record


def _check_kinds(path: Path, part: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        value = part.get(name)
        if value is not None and not isinstance(value, kind):
            expected = "an object" if kind is dict else "a list"
            raise RecordError(f"{path}: not a record of a run: {name} is {value!r}, expected {expected}")


def read_sealed_run_file(directory: Path) -> dict[str, Any]:
    """`read_run_file` of a run that is to go on: refuses a record that was changed after it was written, which would come
    under a new seal with the change in it. A run that was killed has a sealed record too, that of its last checkpoint."""
    record = read_run_file(directory)
    if not _is_sealed(record):
        raise RecordError(
            f"{directory / RUN_FILE}: its own SHA-256 does not match; "
            "the record was changed by hand or damaged, and cannot be continued"
        )
    return record


def _is_sealed(record: Mapping[str, Any]) -> bool:
    """Whether a record is as it was written."""
    unsealed = {key: value for key, value in record.items() if key != "record_sha256"}
    return _own_digest(unsealed) == record.get("record_sha256")


@dataclass(frozen=True)
class RunRecord:
    """A run as the report sees it. `problems` says, in words, what about the record cannot be trusted."""

    directory: Path
    run: Mapping[str, Any]
    epochs: tuple[Mapping[str, Any], ...]
    iterations: tuple[Mapping[str, Any], ...]
    samples: Mapping[str, NDArray[Any]]
    problems: tuple[str, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self.run["config"]
        return config

    @property
    def status(self) -> str:
        return str(self.run.get("status", "unknown"))

    def column(self, name: str, row: str = "epoch") -> NDArray[np.float64]:
        """One field over the epochs or iterations, NaN where a row lacks it."""
        rows = self.epochs if row == "epoch" else self.iterations
        return np.array([number(r.get(name)) for r in rows], dtype=np.float64)

    def reached(self, metric: str, level: float, clock: str = "elapsed_seconds") -> float:
        """When a metric was first at most this, on the line between two epochs' rows; infinite if it never was."""
        x, y = self.column(clock), self.column(metric)
        below = np.flatnonzero(y <= level)
        if below.size == 0:
            return math.inf
        k = int(below[0])
        if k == 0 or not math.isfinite(y[k - 1]):
            return float(x[k])
        share = (y[k - 1] - level) / (y[k - 1] - y[k])
        return float(x[k - 1] + share * (x[k] - x[k - 1]))


def number(value: Any) -> float:
    """A recorded field as a float: the inverse of `plain` for numbers, NaN for anything that is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def read_run(directory: Path) -> RunRecord:
    """Everything recorded in a run directory, with the seals checked."""
    run = read_run_file(directory)
    if not isinstance(run.get("config"), dict):
        raise RecordError(f"{directory / RUN_FILE}: no configuration in it")
    problems = list(_seal_problems(directory, run))
    rows = list(_rows(directory / METRICS_FILE))
    samples: Mapping[str, NDArray[Any]] = {}
    try:
        if run.get("samples"):  # else those that are there are of an earlier end, before the run was given more time
            samples = read_samples(directory / SAMPLES_FILE)
    except FileNotFoundError:
        pass
    except RecordError as error:
        problems.append(str(error))
    return RunRecord(
        directory=directory,
        run=run,
        epochs=tuple(r for r in rows if r.get("row") == "epoch"),
        iterations=tuple(r for r in rows if r.get("row") == "iteration"),
        samples=samples,
        problems=tuple(problems),
    )


def read_samples(path: Path) -> dict[str, NDArray[Any]]:
    """The few images that a run leaves for its report, uint8, (n, height, width), 0 black.

    An autoencoder leaves ``originals`` and ``reconstructions``, a classifier of images ``images``, ``labels`` and
    ``predictions`` of test cases it gets wrong.
    """
    try:
        return read_npz(read_at_most(path, _LARGEST_SAMPLES), limit=_LARGEST_SAMPLES)
    except FileNotFoundError:
        raise
    except (NpzError, OSError) as error:
        raise RecordError(f"{path}: not a readable samples file: {error}") from None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The complete rows of ``metrics.jsonl``; a last line without its end (a run killed while writing) is left out."""
    if not path.exists():
        return
    with _opened(path) as handle:
        for index, line in enumerate(iter(lambda: handle.readline(_LONGEST_LINE), b""), start=1):
            if not line.endswith(b"\n"):
                if len(line) >= _LONGEST_LINE:
                    raise RecordError(f"{path}, line {index}: longer than {_LONGEST_LINE} bytes; this is no record")
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecordError(f"{path}, line {index}: not a row of a record: {error}") from None
            if not isinstance(row, dict):
                raise RecordError(f"{path}, line {index}: not a row of a record: expected an object")
            yield row


def _seal_problems(directory: Path, run: Mapping[str, Any]) -> Iterator[str]:
    """In words: every part of the record that is not what it was when it was written."""
    if not _is_sealed(run):
        yield f"{RUN_FILE} was changed after it was written (its own SHA-256 does not match)"
    for key, name in (("metrics", METRICS_FILE), ("samples", SAMPLES_FILE)):
        path = directory / name
        if key == "samples" and not run.get(key):
            return
        try:
            seal = Seal.from_json(run.get(key))
            changed = _digest_of_beginning(path, seal.size).hexdigest() != seal.sha256
        except RecordError as error:
            yield str(error)
            continue
        longer = path.stat().st_size != seal.size
        if changed or (longer and key == "samples"):
            yield f"{name} was changed after it was written (SHA-256 in {RUN_FILE} does not match)"
        elif longer and run.get("status") != "running":
            yield f"{name} has rows after the end of the run; they are not covered by its SHA-256"
