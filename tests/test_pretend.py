"""The tests of tests/gpu on a pretend accelerator, in a process of their own: once made, a device stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration as registration

import pretend

HERE = Path(__file__).parent
NEEDS_A_PYTHON_BACKEND = pytest.mark.skipif(
    not hasattr(registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices made in Python",
)


def run(marker: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(HERE / "gpu")]
    environment = {**os.environ, "SHF_DEVICE": pretend.NAME}
    found = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.strip().splitlines()[-1]


@NEEDS_A_PYTHON_BACKEND
def test_on_the_pretend_accelerator_everything_is_as_on_the_cpu():
    assert "skipped" not in run("gpu and not slow")


@NEEDS_A_PYTHON_BACKEND
@pytest.mark.slow
def test_every_declared_case_is_as_on_the_cpu_too():
    assert "skipped" not in run("gpu and slow")
