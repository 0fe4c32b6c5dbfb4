"""Freed memory that stays with the process."""

import os
import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys, torch
from shf.lab.machine import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(20):
    torch.zeros(2**22)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.zeros(2**22)  # 16 MiB, 4096 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_blocks_are_not_faulted_in_again():
    def faults(how: str) -> int:
        environment = {
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "1048576",
        }  # in a fresh process glibc would learn the block's size
        done = subprocess.run(
            [sys.executable, "-c", _FAULTS, how], capture_output=True, text=True, check=True, env=environment
        )
        return int(done.stdout)

    assert faults("let go") > 20 * 1000
    assert faults("keep") < 1000
