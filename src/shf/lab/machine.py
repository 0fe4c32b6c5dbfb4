"""What a run ran on and with, for its record, so that a figure can be traced to versions and hardware (no host name); and a
setting of the machine's allocator."""

import ctypes
import functools
import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers, and a digest of this package's own source."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("shf", "torch", "numpy", "scipy")},
        "shf's source": _source(),
    }


@functools.cache
def _source() -> str:
    """The beginning of the SHA-256 over all modules of shf: between two releases the version says nothing."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def description() -> dict[str, Any]:
    """Processor, cores, memory and system."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


# <malloc.h> of glibc
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TRIM_BYTES = 2**31 - 1
_PAD_BYTES = 2**26


def keep_freed_memory() -> bool:
    """Tells glibc's malloc not to give large freed blocks back to the system; returns whether it obeys.

    A step frees its graphs and vectors, and the next one needs as much: given back, they are faulted in again page by
    page, a tenth of the time of some steps. For processes that are ours (the command `shf`), never for a user's: the
    setting is the whole process's. Elsewhere than in glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _TRIM_BYTES), (_M_TOP_PAD, _PAD_BYTES))
    obeyed = [mallopt(name, value) == 1 for name, value in settings]
    return all(obeyed)
