"""Shared by all tests: float64 references on one thread, so that results do not depend on the machine's cores."""

import pytest
import torch

import helpers  # noqa: F401 - the hypothesis profile, before any test is made by it


@pytest.fixture(autouse=True)
def _quiet_torch():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
