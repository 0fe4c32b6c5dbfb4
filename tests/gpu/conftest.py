"""Tests on an accelerator: CUDA or MPS where torch finds one. With SHF_DEVICE=pretend they take the pretend one, for which
they need a process of their own (tests/test_pretend.py starts it). Elsewhere they are skipped."""

import os
from pathlib import Path

import pytest
import torch

import pretend

HERE = Path(__file__).parent
PRETENDS = os.environ.get("SHF_DEVICE") == pretend.NAME


def _device() -> torch.device | None:
    if PRETENDS:
        return pretend.register()
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps", 0) if torch.backends.mps.is_available() else None


_DEVICE = _device()


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if _DEVICE is None:
                item.add_marker(pytest.mark.skip(reason="neither CUDA nor MPS here"))


@pytest.fixture(scope="session")
def device():
    return _DEVICE


@pytest.fixture(scope="session")
def dtype(device):
    """The most precise that the device has."""
    return torch.float32 if device.type == "mps" else torch.float64


@pytest.fixture(scope="session")
def tolerance(device, dtype):
    """Of a few steps, relative to the largest number: other kernels add up in another order."""
    return 1e-10 if device.type == pretend.NAME else 1e3 * torch.finfo(dtype).eps
