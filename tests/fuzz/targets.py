"""Every parser of ours as a function of bytes: it reads them or refuses them by its own error; all else is a finding.

`SEEDS` are well-formed inputs from which fuzzing starts. Files are written into memory where the system has such a place.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.io
import scipy.sparse
import torch

from shf.lab import checkpoint, lock, records
from shf.lab.choices import ChoicesError, read_choices
from shf.lab.data import DamagedDataError, idx
from shf.lab.data.archives import gunzip, tar_member, zip_member
from shf.lab.data.matfile import read_variables
from shf.lab.data.pickles import load_arrays
from shf.lab.experiments import ExperimentError
from shf.lab.npz import NpzError, read_npz
from shf.lab.runconfig import RunConfig
from shf.lab.samples import encode_samples

LIMIT = 1 << 20
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_FOLDER = Path(tempfile.mkdtemp(prefix="shf-fuzz-", dir=_MEMORY))


def _file(name: str, content: bytes) -> Path:
    path = _FOLDER / name
    path.write_bytes(content)
    return path


def read_checkpoint(content: bytes) -> None:
    try:
        checkpoint.read(_file("c.ckpt", content))
    except checkpoint.CheckpointError:
        return


def read_checkpoint_payload(content: bytes) -> None:
    """Behind the checksum, which an attacker can make right."""
    beginning = f"{checkpoint.SCHEMA} {len(content)} ".encode()
    digest = hashlib.sha256(beginning + content).hexdigest().encode()
    read_checkpoint(b"shf-checkpoint " + beginning + digest + b"\n" + content)


def read_run_json(content: bytes) -> None:
    (_FOLDER / records.METRICS_FILE).write_bytes(b"")
    _file(records.RUN_FILE, content)
    try:
        run = records.read_run(_FOLDER)
        RunConfig.from_json(run.config).fingerprint()
    except (records.RecordError, ExperimentError):
        return


def read_metrics(content: bytes) -> None:
    _file(records.METRICS_FILE, content)
    _file(records.RUN_FILE, json.dumps({"schema": 1, "config": {}}).encode())
    try:
        run = records.read_run(_FOLDER)
        for name in ("objective", "epoch"):
            run.column(name)
            run.column(name, "iteration")
    except records.RecordError:
        return


def read_tuned(content: bytes) -> None:
    try:
        read_choices(_file("tuned.json", content))
    except ChoicesError:
        return


def read_owner(content: bytes) -> None:
    _file(lock.OWNER_FILE, content)
    lock._owner(_FOLDER)


def read_arrays(content: bytes) -> None:
    try:
        read_npz(content, limit=LIMIT)
    except NpzError:
        return


def _refusing(call: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def target(content: bytes) -> None:
        try:
            call(content)
        except DamagedDataError:
            return

    return target


TARGETS: dict[str, Callable[[bytes], None]] = {
    "checkpoint": read_checkpoint,
    "checkpoint-payload": read_checkpoint_payload,
    "run-json": read_run_json,
    "metrics": read_metrics,
    "tuned": read_tuned,
    "owner": read_owner,
    "npz": read_arrays,
    "mat": _refusing(lambda content: read_variables(content, ["a", "s"], limit=LIMIT, label="x")),
    "pickle": _refusing(load_arrays),
    "idx": _refusing(lambda content: idx.decode(content, axes=3)),
    "gzip": _refusing(lambda content: gunzip(content, LIMIT, "x")),
    "zip": _refusing(lambda content: zip_member(_file("a.whl", content), "m", LIMIT)),
    "tar": _refusing(lambda content: tar_member(_file("a.tar.gz", content), "m", LIMIT, archive_limit=LIMIT)),
}


def _mat(*, compress: bool) -> bytes:
    stream = io.BytesIO()
    values = {"a": np.arange(6.0), "s": scipy.sparse.eye(3, format="csc"), "text": "x"}
    scipy.io.savemat(stream, values, do_compression=compress)
    return stream.getvalue()


def _zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m", b"content")
    return stream.getvalue()


def _tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        entry = tarfile.TarInfo("m")
        entry.size = 7
        archive.addfile(entry, io.BytesIO(b"content"))
    return stream.getvalue()


def _run_json() -> bytes:
    config = {"experiment": {}, "method": "shf", "settings": {}, "batch": 1, "epochs": 1, "options": []}
    seal = records.Seal.of(b"").to_json()
    return json.dumps({"schema": 1, "status": "finished", "config": config, "metrics": seal}).encode()


def seeds() -> dict[str, list[bytes]]:
    """Well-formed inputs of every target."""
    state = checkpoint.encode({"w": torch.ones(2, 3), "position": {"epoch": 1}, "names": ["a"]})
    array = np.arange(6, dtype="f4").reshape(2, 3)
    return {
        "checkpoint": [state],
        "checkpoint-payload": [state.split(b"\n", 1)[1]],
        "run-json": [_run_json()],
        "metrics": [b'{"row":"epoch","epoch":1,"objective":0.5}\n{"row":"iteration","objective":"nan"}\n'],
        "tuned": [b'{"curves":{"shf":{"experiment":"curves","trials":[]}}}'],
        "owner": [b'{"host":"a","pid":1}'],
        "npz": [encode_samples({"images": array.astype("u1"), "labels": np.arange(2)})],
        "mat": [_mat(compress=False), _mat(compress=True)],
        "pickle": [pickle.dumps((array, (array[0],)), protocol=p) for p in (2, 3)],
        "idx": [idx.encode(np.zeros((2, 2, 1), np.uint8))],
        "gzip": [gzip.compress(b"content", mtime=0)],
        "zip": [_zip()],
        "tar": [_tar()],
    }
