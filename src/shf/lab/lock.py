"""One process per run directory: a file lock that the kernel drops with its owner, and a note of who that is.

The lock itself (flock, through `filelock`) cannot be left behind by a dead process on this machine. The note beside it
names host and pid: it tells the second process whom it waits for, and it recognises a directory shared between
machines, where the lock of another host may not be visible here.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from shf.lab.files import read_at_most, write_atomically

LOCK_FILE = ".lock"
OWNER_FILE = "owner.json"


class RunLockedError(RuntimeError):
    """Another process works in the run directory."""


@contextlib.contextmanager
def locked(directory: Path, *, force: bool = False) -> Iterator[str | None]:
    """Hold the lock of a run directory. Yields, in words, the stale lock that was taken over, or None.

    `force` takes over the note of another host, whose process cannot be looked at from here; a living process of this
    host is never robbed.
    """
    lock = FileLock(directory / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = _owner(directory)
        words = f"process {holder[1]} on host {holder[0]}" if holder else "another process"
        raise RunLockedError(f"{directory} is in use by {words}; wait for it or stop it") from None
    try:
        stale = _take_over(directory, force=force)
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        with contextlib.suppress(OSError):  # a note, not the lock: a full disk must not stop the run
            write_atomically(directory / OWNER_FILE, json.dumps(owner).encode())
        try:
            yield stale
        finally:
            with contextlib.suppress(OSError):
                (directory / OWNER_FILE).unlink(missing_ok=True)
    finally:
        lock.release()


def is_taken(directory: Path) -> bool:
    """Whether a process noted that it works there; a run that still reads its data has left nothing else yet."""
    return (directory / OWNER_FILE).exists()


def _take_over(directory: Path, *, force: bool) -> str | None:
    """What to say about the note that a dead owner left; refuses if its owner may be alive on another host."""
    owner = _owner(directory)
    if owner is None:
        return None
    host, pid = owner
    if host != socket.gethostname() and not force:
        raise RunLockedError(
            f"{directory} is noted as in use by process {pid} on host {host}, which cannot be looked at from here; "
            "if that process is dead, use --force"
        )
    return f"a stale lock of process {pid} on host {host}, which ended without releasing it, was taken over"


def _owner(directory: Path) -> tuple[str, int] | None:
    try:
        note = json.loads(read_at_most(directory / OWNER_FILE, 4096))
        return str(note["host"]), int(note["pid"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
