"""tr(B)/n, the mean eigenvalue of B, from products with random signs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shf.data.draws import generator
from shf.distributed.collective import Collective
from shf.linear.cg import LinearMap

_OUTPUTS = 8
"""Outputs times probes that the mean is made of, at the least."""


@torch.no_grad()
def mean_eigenvalue(
    product: LinearMap, theta: Tensor, counts: Sequence[float], seed: int, collective: Collective
) -> tuple[float, int]:
    """tr(B)/n at θ, with the mean of v'Bv for tr(B), v independent ±1 (Hutchinson); 0 where that is not finite.

    With many outputs one v does. With few, B has hardly more than as many eigenvalues that matter, and v'Bv is as
    uncertain as a sum of so few squares: so many v are taken that outputs times v are eight or more.

    Args:
        product: v ↦ Bv.
        theta: θ, whole.
        counts: entries of the model's outputs on the batch, and its rows.
        seed: of v.
        collective: the processes of the step.

    Returns:
        The mean eigenvalue, and how many products it took.
    """
    outputs, rows = counts
    products = max(1, math.ceil(_OUTPUTS * rows / max(outputs, 1)))
    source, total = generator(theta.device, seed, 3), 0.0
    for _ in range(products):
        v = collective.own(torch.empty_like(theta).bernoulli_(0.5, generator=source).mul_(2).sub_(1))
        total += collective.dots((v, product(v)))[0]
    mean = total / (products * len(theta))
    return (mean if mean > 0 and math.isfinite(mean) else 0.0), products
