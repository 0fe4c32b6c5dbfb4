"""Checkpoints that are whole or not there: checksummed, written atomically, the last two kept, and the best.

Format: one line of ASCII, ``shf-checkpoint <schema> <bytes> <sha256>``, then a payload of that many bytes, a
``torch.save`` archive read with ``weights_only=True`` alone. The SHA-256 covers the schema, the length and the
payload, so that a flipped bit anywhere in the file is detected before torch sees it.
"""

import contextlib
import hashlib
import io
import os
import pickletools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shf.lab.files import open_regular, write_atomically

SCHEMA = 1

_HEADER = re.compile(rb"shf-checkpoint (\d{1,9}) (\d{1,15}) ([0-9a-f]{64})\n")
_LONGEST_HEADER = 128
_BLOCK = 1 << 20
_NAMES = re.compile(r"collections OrderedDict|torch._utils _rebuild_(tensor_v2|parameter)|torch \w+Storage")
"""What torch.save writes for dicts of tensors."""
_NAME = re.compile(r"iteration-(\d{10})\.ckpt")
_BEST = "best.ckpt"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used."""


class CheckpointDamagedError(CheckpointError):
    """Truncated, altered, or no checkpoint at all."""


class CheckpointVersionError(CheckpointError):
    """Written by a newer version of shf."""


class CheckpointMismatchError(CheckpointError):
    """Intact, but of another run: other network, method or experiment."""


def encode(state: Mapping[str, Any]) -> bytes:
    """A checkpoint file's content."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    payload = buffer.getvalue()
    beginning = f"{SCHEMA} {len(payload)} ".encode()
    digest = hashlib.sha256(beginning)
    digest.update(payload)
    return b"shf-checkpoint " + beginning + digest.hexdigest().encode() + b"\n" + payload


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint file, after its checksum has been verified."""
    try:
        with open_regular(path) as handle:
            schema, payload = _verified(handle, path)
    except OSError as error:
        raise CheckpointDamagedError(f"{path}: cannot be read: {error}") from error
    if schema > SCHEMA:
        raise CheckpointVersionError(
            f"{path}: checkpoint schema {schema}, this version of shf reads up to {SCHEMA}; "
            "continue the run with the version of shf that wrote it (named in run.json), or a newer one"
        )
    return _unpack(payload, path)


def _verified(handle: BinaryIO, path: Path) -> tuple[int, bytes]:
    line = handle.readline(_LONGEST_HEADER)
    header = _HEADER.fullmatch(line)
    if header is None:
        raise CheckpointDamagedError(f"{path}: not a checkpoint, or damaged in its first line")
    schema, size, expected = int(header[1]), int(header[2]), header[3].decode()
    found_size = path.stat().st_size - len(line)
    if found_size != size:
        raise CheckpointDamagedError(f"{path}: {found_size} bytes after the first line, expected {size}")
    if size > _memory():
        raise CheckpointDamagedError(f"{path}: {size} bytes, more than this machine's memory; nothing was read")
    digest = hashlib.sha256(b"%d %d " % (schema, size))
    while block := handle.read(_BLOCK):  # by blocks: no more than one is in memory before the checksum is right
        digest.update(block)
    if digest.hexdigest() != expected:
        raise CheckpointDamagedError(f"{path}: SHA-256 {digest.hexdigest()[:16]}…, expected {expected[:16]}…: damaged")
    handle.seek(len(line))
    return schema, handle.read(size)


def _memory() -> int:
    """Bytes of this machine's memory; what does not fit cannot be loaded."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _unpack(payload: bytes, path: Path) -> dict[str, Any]:
    """torch.load of plain data, after a look at what it would unpack."""
    try:
        _refuse_bombs(payload, path)
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        # torch.load raises whatever the malformed archive provokes; all of it means the same to the caller
        raise CheckpointDamagedError(f"{path}: its content cannot be loaded: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointDamagedError(f"{path}: holds {type(state).__name__}, expected a mapping")
    return state


def _refuse_bombs(payload: bytes, path: Path) -> None:
    """Refuses what torch never writes, and a few bytes could fill the memory with: compressed members, members that share
    their bytes, and in the pickle any name but those of tensors (weights_only admits more, bytearray among them)."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        members = archive.infolist()
        if any(m.compress_type != zipfile.ZIP_STORED for m in members):
            raise CheckpointDamagedError(f"{path}: a compressed archive; no checkpoint of shf is")
        if sum(m.file_size for m in members) > len(payload):
            raise CheckpointDamagedError(f"{path}: its members are larger than the file")
        for member in members:
            if member.filename.endswith(".pkl"):
                names = {str(word) for op, word, _ in pickletools.genops(archive.read(member)) if op.name == "GLOBAL"}
                if foreign := sorted(name for name in names if not _NAMES.fullmatch(name)):
                    raise CheckpointDamagedError(f"{path}: asks for {foreign[0]!r}; no checkpoint of shf does")


@dataclass(frozen=True)
class Loaded:
    """The newest usable state, the file it came from, and in words what newer files were passed over."""

    state: dict[str, Any]
    path: Path
    passed_over: tuple[str, ...]


class CheckpointStore:
    """The checkpoints of one run directory. Saving raises OSError when the disk does; older ones stay valid then."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self._directory = directory
        self._keep = keep
        self._damaged: set[Path] = set()

    def save(self, iteration: int, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of an iteration, then remove all but the last `keep` that are not known as damaged."""
        path = self._directory / f"iteration-{iteration:010d}.ckpt"
        self._write(path, state)
        self._damaged.discard(path)
        found = self._newest_first()
        kept = [p for p in found if p not in self._damaged][: self._keep]
        for old in set(found).difference(kept):
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def save_best(self, state: Mapping[str, Any]) -> Path:
        path = self._directory / _BEST
        self._write(path, state)
        return path

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        self._directory.mkdir(exist_ok=True)
        for leftover in self._directory.glob(".*.partial"):
            leftover.unlink(missing_ok=True)
        write_atomically(path, encode(state))

    def _newest_first(self) -> list[Path]:
        found = [p for p in self._directory.glob("iteration-*.ckpt") if _NAME.fullmatch(p.name)]
        return sorted(found, reverse=True)

    def load_latest(self) -> Loaded | None:
        """The newest checkpoint that is intact; None if none was ever written.

        A damaged one is passed over, and said so; one of a newer version is refused, since going back behind it
        would throw away good work.
        """
        paths = self._newest_first()
        passed_over: list[str] = []
        for path in paths:
            try:
                return Loaded(read(path), path, tuple(passed_over))
            except CheckpointDamagedError as error:
                passed_over.append(str(error))
                self._damaged.add(path)
        if paths:
            raise CheckpointDamagedError("no intact checkpoint is left:\n" + "\n".join(passed_over))
        return None

    def clear(self) -> None:
        """Remove every checkpoint, for a run that starts anew in the same directory."""
        for path in (*self._newest_first(), self._directory / _BEST):
            path.unlink(missing_ok=True)
