"""How long an epoch took on this machine, remembered for ``shf list``."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from filelock import FileLock, Timeout

from shf.lab.files import read_at_most, write_atomically


def _file() -> Path:
    from shf.lab.data.places import cache_directory

    return cache_directory() / "timings.json"


def recall() -> dict[str, float]:
    """Seconds of training per epoch with SHF, by experiment, as far as they were measured here."""
    try:
        content = json.loads(read_at_most(_file(), 1 << 16))
        return {str(k): float(v) for k, v in content.items() if math.isfinite(float(v)) and float(v) > 0}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def remember(experiment: str, seconds_per_epoch: float) -> None:
    """Note a measurement; a cache that cannot be written is no reason to fail."""
    path = _file()
    with contextlib.suppress(OSError, Timeout):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=2):
            known = {**recall(), experiment: round(seconds_per_epoch, 4)}
            write_atomically(path, json.dumps(known, indent=1, sort_keys=True).encode())
