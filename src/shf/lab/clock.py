"""What time it is. Nothing else in the laboratory reads it: whoever measures time is handed a `Clock`.

The environment variable SHF_CLOCK replaces the real clocks of this process and of those it starts by one that is wrong:
``stopped``, or ``hundredfold``, a hundred times too fast. It is for tests, which must come out the same on any machine.
"""

import os
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since some moment."""

VARIABLE = "SHF_CLOCK"


def _chosen(real: Clock) -> Clock:
    match os.environ.get(VARIABLE, ""):
        case "":
            return real
        case "stopped":
            return lambda: 0.0
        case "hundredfold":
            return lambda: 100.0 * real()
        case other:
            raise ValueError(f"{VARIABLE}={other}: must be stopped or hundredfold, or not set")


CLOCKS: dict[str, Clock] = {"wall": _chosen(time.perf_counter), "processor": _chosen(time.process_time)}
"""What a second is of, by name."""


def wall() -> float:
    return CLOCKS["wall"]()
