"""Every parser of ours as a function of bytes: it reads them (True) or refuses them by its own error (False); any other
error, and a value that is not what the parser promises, is a finding.

`seeds()` are well-formed inputs from which fuzzing starts. Files are written into memory where the system has such a place.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse
import torch

from shf.lab import checkpoint, lock, records
from shf.lab.choices import Choice, ChoicesError, Trial, read_choices
from shf.lab.data import DamagedDataError
from shf.lab.data.files import DataFile
from shf.lab.data.matfile import read_variables
from shf.lab.experiments import EXPERIMENTS, ExperimentError
from shf.lab.npz import NpzError, read_npz, write_npz
from shf.lab.runconfig import RunConfig

LIMIT = 1 << 20
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_FOLDER = Path(tempfile.mkdtemp(prefix="shf-fuzz-", dir=_MEMORY))


def _file(name: str, content: bytes) -> Path:
    path = _FOLDER / name
    path.write_bytes(content)
    return path


def read_checkpoint(content: bytes) -> bool:
    try:
        state = checkpoint.read(_file("c.ckpt", content))
    except checkpoint.CheckpointError:
        return False
    for value in state.values():
        assert not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() <= len(content)
    return True


def read_checkpoint_payload(content: bytes) -> bool:
    """Behind the checksum, which an attacker can make right."""
    beginning = f"{checkpoint.SCHEMA} {len(content)} ".encode()
    digest = hashlib.sha256(beginning + content).hexdigest().encode()
    return read_checkpoint(b"shf-checkpoint " + beginning + digest + b"\n" + content)


def read_run_json(content: bytes) -> bool:
    (_FOLDER / records.METRICS_FILE).write_bytes(b"")
    _file(records.RUN_FILE, content)
    try:
        run = records.read_run(_FOLDER)
        assert len(RunConfig.from_json(run.config).fingerprint()) == 64
    except (records.RecordError, ExperimentError):
        return False
    assert run.problems == () or all(isinstance(words, str) for words in run.problems)
    return True


def read_metrics(content: bytes) -> bool:
    _file(records.METRICS_FILE, content)
    _file(records.RUN_FILE, json.dumps({"schema": 1, "config": {}}).encode())
    try:
        run = records.read_run(_FOLDER)
    except records.RecordError:
        return False
    for kind, rows in (("epoch", run.epochs), ("iteration", run.iterations)):
        for name in ("objective", "epoch"):
            column = run.column(name, kind)
            assert column.dtype == np.float64
            assert column.shape == (len(rows),)
    return True


def read_tuned(content: bytes) -> bool:
    try:
        assert isinstance(read_choices(_file("tuned.json", content)), dict)
    except ChoicesError:
        return False
    return True


def read_owner(content: bytes) -> bool:
    """A note that cannot be read is no obstacle: it is None then, and never an error."""
    _file(lock.OWNER_FILE, content)
    owner = lock._owner(_FOLDER)
    assert owner is None or [type(part) for part in owner] == [str, int]
    return owner is not None


def read_arrays(content: bytes) -> bool:
    try:
        arrays = read_npz(content, limit=LIMIT)
    except NpzError:
        return False
    return numeric(*arrays.values())


def numeric(*arrays: Any) -> bool:
    """True, if it is so: numbers alone, and no more bytes than the limit."""
    for array in arrays:
        assert array.dtype.kind in "biuf"
        assert array.nbytes <= LIMIT
    return True


def _refusing(call: Callable[[bytes], Any], sound: Callable[[bytes, Any], bool]) -> Callable[[bytes], bool]:
    """A reader of data: what it does not refuse must be sound."""

    def target(content: bytes) -> bool:
        try:
            value = call(content)
        except DamagedDataError:
            return False
        assert sound(content, value)
        return True

    return target


PACKED = DataFile("toy/packed.gz", 7, hashlib.sha256(b"content").hexdigest(), "")
"""A file of data: what is not its content is refused, in whatever way it is packed."""


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "checkpoint": read_checkpoint,
    "checkpoint-payload": read_checkpoint_payload,
    "run-json": read_run_json,
    "metrics": read_metrics,
    "tuned": read_tuned,
    "owner": read_owner,
    "npz": read_arrays,
    "mat": _refusing(
        lambda content: read_variables(content, ["a", "b"], limit=LIMIT, label="x"),
        lambda content, value: set(value) == {"a", "b"} and numeric(*value.values()),
    ),
    "gzip": _refusing(lambda content: PACKED.content(content, "x"), lambda content, value: value == b"content"),
}


def _mat(*, compress: bool) -> bytes:
    stream = io.BytesIO()
    values = {
        "a": np.arange(6.0),
        "b": np.eye(3, dtype=np.float32),
        "s": scipy.sparse.eye(3, format="csc"),
        "text": "x",
    }
    scipy.io.savemat(stream, values, do_compression=compress)
    return stream.getvalue()


def _run_json() -> bytes:
    config = RunConfig(EXPERIMENTS["mnist-classifier"], "shf", {"damping": 1.0}, 100, epochs=1).to_json()
    path = _FOLDER / "seed.json"
    records.write_run(path, {"status": "finished", "config": config, "metrics": records.Seal.of(b"").to_json()})
    return path.read_bytes()


def _tuned() -> bytes:
    trial = Trial({"learning_rate": 0.1}, None, (0.5, None), 10, 1.5)
    choice = Choice("curves", "sgd", {"learning_rate": 0.1}, None, 0.5, "loss", {"seconds": 9.0}, 10, 0, (), (trial,))
    return json.dumps({"curves": {"sgd": choice.to_json()}}).encode()


def seeds() -> dict[str, list[bytes]]:
    """Well-formed inputs of every target."""
    state = checkpoint.encode({"w": torch.ones(2, 3), "position": {"epoch": 1}, "names": ["a"]})
    array = np.arange(6, dtype="f4").reshape(2, 3)
    return {
        "checkpoint": [state],
        "checkpoint-payload": [state.split(b"\n", 1)[1]],
        "run-json": [_run_json()],
        "metrics": [b'{"row":"epoch","epoch":1,"objective":0.5}\n{"row":"iteration","objective":"nan"}\n'],
        "tuned": [_tuned()],
        "owner": [b'{"host":"a","pid":1}'],
        "npz": [write_npz({"images": array.astype("u1"), "labels": np.arange(2)})],
        "mat": [_mat(compress=False), _mat(compress=True)],
        "gzip": [gzip.compress(b"content", mtime=0)],
    }
