"""Weight clipping: each unit's squared incoming norm is held to a bound after an update."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shf.linear.flat import Shapes

_Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def input_major_groups(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[int]:
    """For each parameter, in how many groups it is stored inputs first, (inputs, units, …); 0 if units come first.

    Inputs come first in transposed convolutions, whose groups of inputs share the second axis, and in the `weight` of a
    module that says so by a true attribute `input_major`.
    """
    groups = {
        id(m.weight): m.groups if isinstance(m, _Transposed) else 1
        for m in model.modules()
        if isinstance(m, _Transposed) or getattr(m, "input_major", False)
    }
    return [groups.get(id(p), 0) for p in parameters]


@torch.no_grad()
def clip_norms_(theta: Tensor, shapes: Shapes, bound: float | str, input_major: Sequence[int] = ()) -> Tensor:
    """Scales, in place, the incoming weights w of every unit so that ‖w‖² ≤ bound.

    Weights are the parameters with two or more dimensions, units their first axis unless `input_major` says otherwise.

    Args:
        theta: θ, flat.
        bound: the bound, or "fan-in" for round(√inputs), as in the author's program.
        input_major: as `input_major_groups` finds it; by default no parameter is stored inputs first.
    """
    weights = shapes.split(theta)
    for weight, groups in zip(weights, input_major or [0] * len(weights), strict=True):
        if weight.ndim < 2:
            continue
        incoming, axes = _incoming(weight, groups)
        inputs = math.prod(incoming.shape[axis] for axis in axes)
        limit = float(round(inputs**0.5)) if bound == "fan-in" else float(bound)
        squared = incoming.square().sum(axes, keepdim=True)
        incoming.mul_(torch.where(squared > limit, (limit / squared).sqrt(), torch.ones_like(squared)))
    return theta


def _incoming(weight: Tensor, groups: int) -> tuple[Tensor, tuple[int, ...]]:
    """A view of the weights, and its axes that run over the incoming weights of one unit."""
    if groups:
        return weight.view(groups, -1, weight.shape[1], math.prod(weight.shape[2:])), (1, 3)
    return weight.view(len(weight), -1), (1,)
