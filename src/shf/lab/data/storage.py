"""Bytes in and out of files: bounded reads, atomic writes, one fetching process at a time."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from shf.lab.files import IrregularFileError, TooLargeError, read_at_most, write_atomically

from .errors import DamagedDataError, DataError
from .places import CACHE_VARIABLE

LOCK_SECONDS = 1800.0


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; a pipe, a device or a larger file is refused unread."""
    try:
        return read_at_most(path, limit)
    except IrregularFileError as fault:
        raise DamagedDataError(f"{path}: not a regular file. Put the data file itself there.") from fault
    except TooLargeError as fault:
        raise DamagedDataError(f"{fault}. Replace the file.") from fault
    except OSError as fault:
        raise DataError(f"{path}: cannot be read ({fault.strerror}). Check that it is a file you may read.") from fault


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that at every moment, also after a crash, it is absent, the old one or the whole new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as fault:
        raise DataError(_cannot_write(path, len(content), fault)) from fault


def _cannot_write(path: Path, size: int, fault: OSError) -> str:
    home = next((place for place in path.parents if place.is_dir()), Path(path.anchor))
    return (
        f"{path}: cannot be written ({fault.strerror}); {size} bytes are needed, {shutil.disk_usage(home).free} are "
        f"free in {home}. Nothing was left behind: make room, or name another directory with {CACHE_VARIABLE}, "
        "and run the same command again."
    )


@contextlib.contextmanager
def exclusive(path: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock file ``path``; a second process waits. The system frees the lock when its owner dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path).acquire(timeout=seconds)
    except filelock.Timeout as fault:
        words = f"another process has held this lock for {seconds:.0f} s. Wait until it has fetched, or end it."
        raise DataError(f"{path}: {words}") from fault
    except OSError as fault:
        raise DataError(_cannot_write(path, 0, fault)) from fault
    with lock:
        yield
