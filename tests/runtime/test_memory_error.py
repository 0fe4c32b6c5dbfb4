"""Out of memory inside a step: everything as before, and the error names a microbatch half of what failed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shf
from helpers import identical, labelled, mlp, normalised, snapshot
from shf.errors import RankError
from shf.runtime.memory import is_out_of_memory

CE = nn.CrossEntropyLoss()

LIMITED = """
import copy, resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
import shf
from helpers import identical, snapshot

torch.set_num_threads(1)
torch.manual_seed(0)
rows, width = 8_000, 300
model = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
optimizer = shf.SHF(model, nn.CrossEntropyLoss(), seed=1)
x, t = torch.randn(rows, 20), torch.randint(3, (rows,))
optimizer.step(x[:50], t[:50])
pages = int(open("/proc/self/statm").read().split()[0])
room = pages * resource.getpagesize() + int(sys.argv[2]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (room, room))
before = snapshot(optimizer)
microbatch = None
for attempt in range(12):
    try:
        info = optimizer.step(x, t)
        print("fits", microbatch, info.accepted)
        break
    except shf.StepMemoryError as error:
        assert identical(snapshot(optimizer), before), "something has changed"
        half = (microbatch or rows) // 2
        assert error.microbatch == half and f"use microbatch={half}" in str(error), str(error)
        print("failed", microbatch)
        microbatch = half
        successor = shf.SHF(model, nn.CrossEntropyLoss(), seed=1, microbatch=half)
        successor.load_state_dict(optimizer.state_dict())
        optimizer, before = successor, snapshot(successor)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an address-space limit is needed")
def test_under_an_address_space_limit():
    """In the end the halved microbatch fits. Fails without `explained_exhaustion` (a bare RuntimeError of the allocator),
    and without the all-or-nothing of the writes (a changed parameter)."""
    command = [sys.executable, "-c", LIMITED, str(Path(__file__).parents[1]), "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "failed None"
    assert lines[-1].startswith("fits ")
    assert lines[-1].endswith(" True")


ALLOCATORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: 12 bytes"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried 12"),
]


def failing(error):
    def loss(outputs, targets):
        if loss.armed:
            raise error
        return CE(outputs, targets)

    loss.armed = False
    return loss


@pytest.mark.parametrize("error", ALLOCATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("make", "options", "suggestion", "words"),
    [
        (mlp, {}, 6, "12 rows were in memory at once; use microbatch=6"),
        (mlp, {"microbatch": 5}, 2, "5 rows were in memory at once; use microbatch=2"),
        (mlp, {"microbatch": 1}, None, "one row at a time is too much already"),
        (normalised, {}, None, "use a batch of 6 rows instead of 12"),
    ],
)
def test_every_allocators_error_is_understood(error, make, options, suggestion, words):
    assert is_out_of_memory(error)
    loss = failing(error)
    optimizer = shf.SHF(make(), loss, **options)
    optimizer.step(*labelled(seed=1))
    before = snapshot(optimizer)
    loss.armed = True
    with pytest.raises(shf.StepMemoryError, match=words) as caught:
        optimizer.step(*labelled())
    assert caught.value.microbatch == suggestion
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert identical(snapshot(optimizer), before)


def test_other_errors_stay_what_they_are():
    loss = failing(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    optimizer = shf.SHF(mlp(), loss)
    loss.armed = True
    with pytest.raises(RuntimeError, match=r"^mat1") as caught:
        optimizer.step(*labelled())
    assert not isinstance(caught.value, shf.StepMemoryError)


def test_hf_says_so_of_its_largest_batch():
    loss = failing(MemoryError())
    optimizer = shf.HF(mlp(), loss, cg_iterations=3)
    loss.armed = True
    with pytest.raises(shf.StepMemoryError, match="9 rows were in memory at once; use microbatch=4"):
        optimizer.step([labelled(5), labelled(9, seed=1)], curvature=labelled(4))


def test_another_processs_lack_of_memory_is_not_ones_own():
    assert not is_out_of_memory(
        RankError("rank 1 raised RuntimeError: DefaultCPUAllocator: can't allocate memory", [1])
    )
