"""A data file and what its content must be."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from .archives import gunzip
from .errors import DamagedDataError
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

    def content(self, stored: bytes, label: str) -> bytes:
        """The content in the bytes of a file, after its size and checksum were found right."""
        try:
            content = gunzip(stored, self.size, label) if self.gzipped else stored
        except DamagedDataError as fault:
            raise self._damaged(label, f"nothing readable; the file's own sha256 is {sha256(stored)}") from fault
        found = sha256(content)
        if found != self.sha256:
            raise self._damaged(label, f"{found} ({len(content)} bytes)")
        return content

    def _damaged(self, label: str, found: str) -> DamagedDataError:
        name = self.path.split("/", maxsplit=1)[0]
        return DamagedDataError(
            f"{label}: damaged, truncated or another file. Expected {self.checksum_of} {self.sha256} "
            f"({self.size} bytes), found {found}. Replace it by a good copy ({self.home}); "
            f"for a file in the user cache `shf data get {name}` does that."
        )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
