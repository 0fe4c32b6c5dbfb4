"""Faults for the soak: each begins and ends while a run goes on in another process."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
from pathlib import Path
from typing import Protocol

_TINY_FILE = 4096


class Fault(Protocol):
    """Something that goes wrong with the disk under a run, for a while."""

    name: str

    def begin(self, home: Path, pid: int) -> None: ...

    def end(self, home: Path, pid: int) -> None: ...


class FileSizeLimit:
    """The system refuses to let any file of the process grow: what a quota does, or a disk that is full."""

    name = "no file may grow"

    def begin(self, home: Path, pid: int) -> None:
        self._set(pid, _TINY_FILE)

    def end(self, home: Path, pid: int) -> None:
        self._set(pid, resource.RLIM_INFINITY)

    def _set(self, pid: int, size: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


class FullDisk:
    """A file system without a free byte (where the run lies on a small one of its own)."""

    name = "disk full"

    def begin(self, home: Path, pid: int) -> None:
        with contextlib.suppress(OSError), self._filler(home).open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        with contextlib.suppress(OSError), self._filler(home).open("ab", buffering=0) as file:
            while True:
                file.write(b"\0")

    def end(self, home: Path, pid: int) -> None:
        self._filler(home).unlink(missing_ok=True)

    def _filler(self, home: Path) -> Path:
        return home.parent / "filler"


class ReadOnly:
    """Directories in which nothing can be made, renamed or removed."""

    name = "directory read-only"

    def begin(self, home: Path, pid: int) -> None:
        self._set(home, 0o555)

    def end(self, home: Path, pid: int) -> None:
        self._set(home, 0o755)

    def _set(self, home: Path, mode: int) -> None:
        for directory in (home, home / "checkpoints"):
            if directory.is_dir():
                directory.chmod(mode)


class Vanished:
    """The directory is gone, as when a mount is lost, and comes back later."""

    name = "directory vanished"

    def begin(self, home: Path, pid: int) -> None:
        home.rename(self._elsewhere(home))

    def end(self, home: Path, pid: int) -> None:
        while self._elsewhere(home).is_dir():
            # a process that was about to lock it may have made it again; it must not have begun a run there
            if home.is_dir():
                found = {p.name for p in home.iterdir()}
                assert found <= {".lock", "owner.json"}, "a run began in place of the lost one"
                shutil.rmtree(home, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._elsewhere(home).rename(home)

    def _elsewhere(self, home: Path) -> Path:
        return home.with_name(home.name + ".lost")


def damage_newest(home: Path, draw: random.Random) -> bool:
    """Flips a bit of the newest checkpoint or cuts it short, if there is an older one to go back to."""
    found = sorted((home / "checkpoints").glob("iteration-*.ckpt"))
    if len(found) < 2:
        return False
    content = bytearray(found[-1].read_bytes())
    at = draw.randrange(len(content))
    if draw.random() < 0.5:
        content[at] ^= 1 << draw.randrange(8)
    else:
        del content[at:]
    found[-1].write_bytes(content)
    return True


def become_nobody(owner: int) -> None:
    """Gives up root's rights, for which no directory is read-only."""
    if os.getuid() == 0:
        os.setgid(owner)
        os.setuid(owner)
