"""The command `shf` with a tiny experiment in its registry, for torchrun; a rank may be told to fail once.

FAULT="kill 1 5" makes rank 1 kill itself at its fifth step, unless torchrun has restarted it; "hang" and "break" (an error
before the step, of which the others hear nothing) likewise; "raise" is an error inside the step.
STEP_SECONDS makes every step take longer, so that there is time to disturb it.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from runs_helpers import tiny_experiment

import shf
from shf.lab import commands, experiments


def fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
    raise ArithmeticError("a fault on purpose")


def with_fault(kind: str, rank: str, number: str) -> None:
    if os.environ["RANK"] != rank or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    name = "_prepare" if kind == "raise" else "step"
    original, steps = getattr(shf.SHF, name), 0

    def disturbed(self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == int(number):
            fail(kind)
        return original(self, *args)

    setattr(shf.SHF, name, disturbed)


def slowed(seconds: float) -> None:
    original = shf.SHF.step

    def step(self: Any, *args: Any) -> Any:
        time.sleep(seconds)
        return original(self, *args)

    shf.SHF.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    registry = MappingProxyType({"tiny": tiny_experiment(), **experiments.EXPERIMENTS})
    experiments.EXPERIMENTS = commands.EXPERIMENTS = registry
    if "STEP_SECONDS" in os.environ:
        slowed(float(os.environ["STEP_SECONDS"]))
    if "FAULT" in os.environ:
        with_fault(*os.environ["FAULT"].split())
    commands.app()
