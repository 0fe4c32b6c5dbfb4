"""Files from elsewhere, opened without risk: never a pipe that nobody writes to, never more bytes than expected."""

from __future__ import annotations

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
    stream = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        stream.close()
        raise IrregularFileError(f"{path}: not a regular file")
    return stream


def read_at_most(path: Path, limit: int) -> bytes:
    """The bytes of a regular file; one of more than `limit` is refused unread."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise TooLargeError(f"{path}: {size} bytes, expected at most {limit}")
        return stream.read(size)
