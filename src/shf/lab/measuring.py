"""Measure this machine: what the experiments' first iterations take (for ``shf list``), and how many threads help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from shf.lab import timings
from shf.lab.clock import Clock, wall
from shf.lab.configure import Request, configure
from shf.lab.data import DataError
from shf.lab.experiments import EXPERIMENTS, Experiment
from shf.lab.problem import build_loss, build_model
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


def fastest_threads(experiment: Experiment, seconds: float = 0.4, clock: Clock = wall) -> int:
    """One thread or torch's own number, whichever takes gradients of the network faster here and now.

    On a machine that others use too, threads that wait for each other can be many times slower than one alone.
    """
    threads = torch.get_num_threads()
    model, loss = build_model(experiment), build_loss(experiment)
    inputs = torch.rand(200, experiment.sizes[0], generator=torch.Generator().manual_seed(0))

    def gradients_per_second(number: int) -> float:
        torch.set_num_threads(number)
        count, started = 0, clock()
        while (elapsed := clock() - started) < seconds or count < 3:
            loss(model(inputs), inputs).backward()
            count += 1
        return count / elapsed

    try:
        return max((1, threads), key=gradients_per_second)
    finally:
        torch.set_num_threads(threads)


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
