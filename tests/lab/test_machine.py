"""Freed memory that stays with the process."""

import os
import subprocess
import sys

import pytest

_FAULTS = """
import resource, torch
from shf.lab.machine import keep_freed_memory

def faults():
    for _ in range(20):
        torch.zeros(2**22)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(2**22)  # 16 MiB, 4096 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

let_go = faults()
assert keep_freed_memory()
print(let_go, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_blocks_are_not_faulted_in_again():
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}  # else glibc would learn the block's size
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True, env=environment)
    let_go, kept = map(int, done.stdout.split())
    assert let_go > 20 * 1000
    assert kept < 1000
