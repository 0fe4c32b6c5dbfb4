"""λ's beginning and its floor from the curvature itself, where none is given. Beyond the paper; off by default."""

import math

import torch
from torch import Tensor

from shf.data.draws import generator
from shf.distributed.collective import Collective
from shf.problems.objective import Objective

START, FLOOR = 10.0, 0.01
"""λ at the start and at the least, in mean eigenvalues of B.

B's few large eigenvalues carry the trace and its many small ones the mean, so that λ begins between them: directions of
large curvature are left to CG, the others are damped until ρ has said better. Far below the mean λ damps nothing that
carries a signal; steps then fit the noise of their batch, on which ρ stays near 1 and would let λ sink for ever.
"""
_OUTPUTS = 8
"""Outputs times probes that the mean is made of, at the least."""


@torch.no_grad()
def mean_eigenvalue(objective: Objective, theta: Tensor, seed: int, ranks: Collective) -> tuple[float, int]:
    """tr(B)/n at θ, with the mean of v'Bv for tr(B), v independent ±1 (Hutchinson); 0 where that is not finite.

    With many outputs one v does. With few, B has hardly more than as many eigenvalues that matter, and v'Bv is as
    uncertain as a sum of so few squares: so many v are taken that outputs times v are eight or more.

    Args:
        objective: of the first batch.
        theta: θ, whole.
        seed: of v.
        ranks: the processes of the step.

    Returns:
        The mean eigenvalue, and how many products it took.
    """
    objective.expand(1.0)
    outputs, rows = ranks.add(lambda: [float(objective.outputs), float(objective.rows)], 2)
    products = max(1, math.ceil(_OUTPUTS * rows / max(outputs, 1)))
    B, source, total = objective.curvature(0.0), generator(theta.device, seed, 3), 0.0
    for _ in range(products):
        v = ranks.own(torch.empty_like(theta).bernoulli_(0.5, generator=source).mul_(2).sub_(1))
        total += ranks.dot(v, B.product(v))
    mean = total / (products * len(theta))
    return (mean if mean > 0 and math.isfinite(mean) else 0.0), products
