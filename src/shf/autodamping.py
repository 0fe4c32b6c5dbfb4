"""λ's beginning and its floor from the curvature itself, where none is given. Beyond the paper; off by default."""

import math

import torch
from torch import Tensor

from shf.randomness import generator
from shf.ranks import Ranks
from shf.step import Problem

START, FLOOR = 10.0, 0.01
"""λ at the start and at the least, in mean eigenvalues of B.

B's few large eigenvalues carry the trace and its many small ones the mean, so that λ begins between them: directions of
large curvature are left to CG, the others are damped until ρ has said better. Far below the mean λ damps nothing that
carries a signal; steps then fit the noise of their batch, on which ρ stays near 1 and would let λ sink for ever.
"""


@torch.no_grad()
def mean_eigenvalue(problem: Problem, theta: Tensor, seed: int, ranks: Ranks) -> float:
    """tr(B)/n at θ, with v'Bv for tr(B), v independent ±1 (Hutchinson): one product. 0 where that is not finite.

    Args:
        problem: of the first batch.
        theta: θ, whole.
        seed: of v.
        ranks: the processes of the step.
    """
    problem.expand(1.0)
    signs = torch.empty_like(theta).bernoulli_(0.5, generator=generator(theta.device, seed, 3)).mul_(2).sub_(1)
    v = ranks.own(signs)
    mean = ranks.dot(v, problem.curvature(0.0).product(v)) / len(theta)
    return mean if mean > 0 and math.isfinite(mean) else 0.0
