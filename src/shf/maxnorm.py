"""Weight clipping: each unit's squared incoming norm is held to a bound after an update."""

import torch
from torch import Tensor

from shf.flat import Shapes


@torch.no_grad()
def clip_norms_(theta: Tensor, shapes: Shapes, bound: float | str) -> Tensor:
    """Scales, in place, the incoming weights w of every unit so that ‖w‖² ≤ bound.

    Weights are the parameters with two or more dimensions, units their first axis.

    Args:
        theta: θ, flat.
        bound: the bound, or "fan-in" for round(√inputs), as in the author's program.
    """
    for weight in shapes.split(theta):
        if weight.ndim < 2:
            continue
        incoming = weight.view(len(weight), -1)
        limit = float(round(incoming.shape[1] ** 0.5)) if bound == "fan-in" else float(bound)
        squared = incoming.square().sum(1, keepdim=True)
        incoming.mul_(torch.where(squared > limit, (limit / squared).sqrt(), torch.ones_like(squared)))
    return theta
