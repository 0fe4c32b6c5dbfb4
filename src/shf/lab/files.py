"""Files read without risk, whoever wrote them (no pipe that nobody writes to, no more bytes than expected), and written
as a whole or not at all."""

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO


class IrregularFileError(OSError):
    """A pipe, a device, a directory: reading it might wait for ever or never end."""


class TooLargeError(OSError):
    """A file with more bytes than anything of its kind has."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading; a pipe opens at once instead of waiting, and is refused like a device."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise IrregularFileError(f"{path}: not a regular file")
    return os.fdopen(handle, "rb")


def read_at_most(path: Path, limit: int) -> bytes:
    """The bytes of a regular file; one of more than `limit` is refused unread."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise TooLargeError(f"{path}: {size} bytes, expected at most {limit}")
        return stream.read(size)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` as a whole or not at all, also through a crash: write beside it, sync, rename, sync."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
