"""A data file and what its content must be."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from dataclasses import dataclass
from pathlib import Path

from .errors import DamagedDataError, DataError
from .storage import read_bounded

SLACK = 1 << 20  # a gzip file may be larger than what it holds, by headers only


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
