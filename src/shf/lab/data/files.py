"""A data file and what its content must be; bounded reads, atomic writes, one fetching process at a time."""

import contextlib
import gzip
import hashlib
import io
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from shf.lab.files import IrregularFileError, TooLargeError, read_at_most, write_atomically

from .errors import DamagedDataError, DataError
from .places import CACHE_VARIABLE

SLACK = 1 << 20  # a gzip file may be larger than what it holds, by headers only
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


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    ``size`` and ``sha256`` are those of the content: for a gzip file, of the decompressed bytes, so that files packed
    by different programs but with the same content are the same data.
    """

    path: str  # relative to a data directory, with forward slashes
    size: int
    sha256: str
    home: str  # URL of the file on its public home page

    @property
    def gzipped(self) -> bool:
        return self.path.endswith(".gz")

    @property
    def checksum_of(self) -> str:
        return "sha256 of the decompressed bytes" if self.gzipped else "sha256"

    def at(self, root: Path) -> Path:
        return root.joinpath(*self.path.split("/"))

    def read(self, root: Path) -> bytes:
        """The verified content of the file under ``root``."""
        path = self.at(root)
        return self.content(read_bounded(path, self.size + SLACK), str(path))

    def problem(self, root: Path) -> str | None:
        """Why the file under ``root`` cannot be used; None if it can."""
        try:
            self.read(root)
        except DataError as fault:
            return str(fault)
        return None

    def content(self, stored: bytes, label: str) -> bytes:
        """The content in the bytes of a file, after its checksum was found right; a gzip bomb is left at ``size + 1``."""
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(stored)).read(self.size + 1) if self.gzipped else stored
        except (OSError, EOFError, zlib.error):
            found = f"nothing readable; the file's own sha256 is {sha256(stored)}"
        else:
            if sha256(content) == self.sha256:
                return content
            found = f"{sha256(content)} ({len(content)} bytes)"
        raise DamagedDataError(
            f"{label}: damaged, truncated or another file. Expected {self.checksum_of} {self.sha256} "
            f"({self.size} bytes), found {found}. Replace it by a good copy ({self.home}); "
            f"for a file in the user cache `shf data get {self.path.partition('/')[0]}` does that."
        )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
