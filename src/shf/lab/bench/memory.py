"""Peak memory, each figure from a process of its own: `python -m shf.lab.bench.memory REQUEST` prints one JSON object.

What is counted is resident memory beyond that of the interpreter with everything loaded and its threads started:
parameters, batch, activations, vectors. Freed blocks are given back at once (an environment variable tells glibc so), hence
the figure is what is alive and not what the allocator has kept. On Linux the high-water mark is set back before the
measured work, so that what building the problem needed for a moment does not count; elsewhere it counts for both sides.
"""

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shf.lab.bench.cases import FEED_FORWARD, REUTERS, FeedForward, Workload
from shf.lab.bench.measure import take_over

_GROWTH_STEPS = (1000, 200)
"""Steps of the test for leaks, and after how many of them memory is first looked at."""


def measure(what: str, case: str, *, quick: bool = False, microbatch: int | None = None) -> dict[str, int]:
    """Runs one measurement in a new process.

    Args:
        what: "gradient", "step" or "growth".
        case: a feed-forward case by name, "reuters" or "reuters-dense".
        quick: shrunk shapes.
        microbatch: the optimizer's option.

    Returns:
        Bytes by name: "peak" for the first two, "early" and "late" for growth.
    """
    request = {"what": what, "case": case, "quick": quick, "microbatch": microbatch, "threads": torch.get_num_threads()}
    command = [sys.executable, "-m", "shf.lab.bench.memory", json.dumps(request)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {what} on {case} failed:\n{done.stderr.strip()}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def step_against_gradient(case: str, *, quick: bool = False) -> dict[str, Any]:
    """Peak memory of a step and of one gradient on the same rows."""
    gradient, step = (measure(what, case, quick=quick)["peak"] for what in ("gradient", "step"))
    return {
        "network": _case(case).name,
        "gradient_bytes": gradient,
        "step_bytes": step,
        "step_over_gradient": step / max(gradient, 1),
    }


def bounded_by_microbatch(case: str, *, quick: bool = False) -> dict[str, Any]:
    """Peak memory of a step, with all rows at once and in ten chunks."""
    rows = _shrunk(_case(case), quick).rows
    whole = measure("step", case, quick=quick)["peak"]
    chunked = measure("step", case, quick=quick, microbatch=rows // 10)["peak"]
    return {"network": _case(case).name, "microbatch": rows // 10, "whole_bytes": whole, "chunked_bytes": chunked}


def sparse_against_dense(*, quick: bool = False) -> dict[str, int]:
    """Peak memory of a step on Reuters' shape."""
    sparse, dense = (measure("step", name, quick=quick)["peak"] for name in ("reuters", "reuters-dense"))
    return {"sparse_bytes": sparse, "dense_bytes": dense}


def growth(*, quick: bool = False) -> dict[str, int]:
    """Resident memory early and late in a thousand steps."""
    return measure("growth", "usps", quick=quick)


def _case(name: str) -> FeedForward:
    return {**FEED_FORWARD, "reuters": replace(REUTERS, sparse=True), "reuters-dense": REUTERS}[name]


def _shrunk(case: FeedForward, quick: bool) -> FeedForward:
    return case.shrunk() if quick else case


# --- in the process that is measured ---------------------------------------------------------------------------------


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    return pages * resource.getpagesize() if pages else peak()


def peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def reset_peak() -> None:
    with suppress(OSError):  # not Linux, or not allowed: the mark then includes building the problem
        Path("/proc/self/clear_refs").write_text("5")


def _load_everything(case: FeedForward) -> None:
    """Lets the libraries take what they take once: code, thread stacks, packing buffers of matrix products."""
    small = case.shrunk()
    problem = small.problem()
    small.optimizer(problem).step(problem.inputs, problem.targets)
    a = torch.rand(512, 512, requires_grad=True)
    (a @ a).relu().sum().backward()


def _work(request: dict[str, Any]) -> dict[str, int]:
    torch.set_num_threads(request["threads"])
    case = _shrunk(_case(request["case"]), request["quick"])
    _load_everything(case)
    empty = resident()
    if request["what"] == "growth":
        return _grow(case, empty, quick=request["quick"])
    problem = case.problem()
    {"gradient": _gradient, "step": _step}[request["what"]](case, problem, request["microbatch"])
    return {"peak": peak() - empty}


def _gradient(case: FeedForward, problem: Workload, microbatch: int | None) -> None:
    problem.gradient()
    reset_peak()
    problem.gradient()


def _step(case: FeedForward, problem: Workload, microbatch: int | None) -> None:
    first = case.optimizer(problem, cg_iterations=1)
    first.step(problem.inputs, problem.targets)
    optimizer = case.optimizer(problem, microbatch=microbatch)
    take_over(optimizer, first)
    del first
    reset_peak()
    optimizer.step(problem.inputs, problem.targets)


def _grow(case: FeedForward, empty: int, *, quick: bool) -> dict[str, int]:
    """The same network on a tenth of the rows, so that a thousand steps take seconds."""
    problem = replace(case, rows=max(case.rows // 10, 16)).problem()
    optimizer = replace(case, curvature_rows=10).optimizer(problem)
    steps, first = (20, 5) if quick else _GROWTH_STEPS
    early = 0
    for number in range(1, steps + 1):
        optimizer.step(problem.inputs, problem.targets)
        if number == first:
            early = resident() - empty
    return {"steps": steps, "early": early, "late": resident() - empty}


if __name__ == "__main__":
    print(json.dumps(_work(json.loads(sys.argv[1]))))
