"""Where a step's time goes, by kinds of work, and what `torch.compile` would save of it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shf.lab.bench.cases import FeedForward
from shf.lab.bench.measure import Pace, interleaved
from shf.lab.bench.speed import RepeatedStep
from shf.lab.bench.targets import KINDS

_PRODUCTS = {"aten::mm", "aten::addmm"}


def shares_of_a_step(case: FeedForward, pace: Pace) -> dict[str, Any]:
    """Shares of one step's time, as torch's profiler sees it on the calling thread; its own cost falls on "all else".

    A pass over a vector is any operation on as many numbers as θ or a weight matrix has, but no matrix product.
    """
    case = case.shrunk() if pace.quick else case
    problem = case.problem()
    step = RepeatedStep(case, problem)
    step()
    step.rewind()
    begun = pace.clock()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    seconds = pace.clock() - begun
    sizes = {case.parameters, *(p.numel() for p in problem.model.parameters() if p.ndim > 1)}
    spent = dict.fromkeys(KINDS, 0.0)
    for event in found.key_averages(group_by_input_shape=True):
        spent[_kind(event.key, event.input_shapes, sizes)] += event.self_cpu_time_total
    total = sum(spent.values())
    return {
        "network": case.name,
        "seconds": seconds,
        "shares": {kind: microseconds / total for kind, microseconds in spent.items()},
    }


def _kind(name: str, shapes: Sequence[Sequence[Any]], sizes: set[int]) -> str:
    if name in _PRODUCTS:
        return KINDS[0]
    if name == "aten::cat" or any(math.prod(shape) in sizes for shape in shapes if shape and isinstance(shape[0], int)):
        return KINDS[1]
    return KINDS[2] if name.startswith("aten::") else KINDS[3]


def compiled_evaluation(case: FeedForward, pace: Pace) -> dict[str, Any]:
    """Seconds of an evaluation of the objective through the module and through `torch.compile`d code for it."""
    case = case.shrunk() if pace.quick else case
    problem = case.problem()

    class Value(nn.Module):
        def forward(self) -> torch.Tensor:
            return problem.loss(problem.model(problem.inputs), problem.targets)

    torch.compiler.reset()
    plain, compiled = Value(), torch.compile(Value())
    begun = pace.clock()
    try:
        with torch.no_grad():
            compiled()
            spent = pace.clock() - begun
            found = interleaved({"plain": plain, "compiled": compiled}, pace)
    except RuntimeError as error:  # of torch._dynamo, where there is no C++ compiler
        return {"network": case.name, "skipped": f"torch.compile failed: {type(error).__name__}"}
    return {
        "network": case.name,
        "compilation_seconds": spent,
        "plain": found["plain"].record(),
        "compiled": found["compiled"].record(),
        "compiled_over_plain": found["compiled"].over(found["plain"]),
    }
