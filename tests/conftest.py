"""Shared by all tests: one thread in every process, so that results do not depend on the machine's cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

import pytest
import torch

import helpers  # it brings the hypothesis profile, before any test is made by it
from shf.lab import clock


@pytest.fixture(autouse=True)
def _quiet_torch():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # without those of devices, which take a while to ask for
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ticking(monkeypatch):
    """For commands, which take no clock: the laboratory's own become such that every step takes a second."""
    for name in clock.CLOCKS:
        monkeypatch.setitem(clock.CLOCKS, name, helpers.ticking())
