"""Measure this machine: what the experiments' first iterations take, for ``shf list``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from shf.lab import timings
from shf.lab.configure import Request, configure
from shf.lab.data import DataError
from shf.lab.experiments import EXPERIMENTS
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
        timings.remember(name, seconds)
        yield name, f"{seconds:.2g} s per epoch, {duration(seconds * experiment.epochs)} in all"
