"""Measure this machine: what the experiments' first iterations take, remembered for ``shf list``."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from shf.lab.configure import Request, configure
from shf.lab.data import DataError, cache_directory
from shf.lab.experiments import EXPERIMENTS
from shf.lab.files import read_at_most, write_atomically
from shf.lab.runner import new_training
from shf.lab.words import duration

_ITERATIONS = 3


def seconds_per_epoch(experiment: str, data_dir: Path | None = None) -> float:
    """Train SHF for three iterations (the first, which warms up, is not counted) and extrapolate to an epoch."""
    training = new_training(configure(Request(experiment, epochs=1)), data_dir)
    with torch.random.fork_rng(devices=[]):
        training.iterate()
        warm = training.position.elapsed
        for _ in range(_ITERATIONS - 1):
            training.iterate()
    return (training.position.elapsed - warm) / (_ITERATIONS - 1) * training.iterations_per_epoch


def measure_all(data_dir: Path | None = None) -> Iterator[tuple[str, str]]:
    """Measure and remember every experiment whose data can be had; yields its name and the outcome in words."""
    for name, experiment in EXPERIMENTS.items():
        try:
            seconds = seconds_per_epoch(name, data_dir)
        except DataError as error:
            yield name, f"not measured: {str(error).splitlines()[0]}"
            continue
        remember(name, seconds)
        yield name, f"{seconds:.2g} s per epoch, {duration(seconds * experiment.epochs)} in all"


def _file() -> Path:
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
