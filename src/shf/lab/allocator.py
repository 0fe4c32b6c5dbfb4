"""Lets a process keep the memory that it frees, for the next step: a setting of glibc's allocator."""

from __future__ import annotations

import ctypes
import sys

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
