"""An initial λ from the curvature itself, where none is given. Beyond the paper; off by default."""

import torch
from torch import Tensor

from shf.randomness import generator
from shf.ranks import Ranks
from shf.step import Problem

MEAN_EIGENVALUES = 100.0
"""λ at the start, in mean eigenvalues of B."""


@torch.no_grad()
def initial_damping(problem: Problem, theta: Tensor, seed: int, ranks: Ranks) -> float:
    """λ = 100 tr(B)/n at the beginning, with v'Bv for tr(B), v independent ±1 (Hutchinson): one product.

    B's few large eigenvalues carry the trace and its many small ones the mean, so that λ lies between them: directions of
    large curvature are left to CG, the others are damped until the rule for λ has learned better.

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
    return MEAN_EIGENVALUES * mean if mean > 0 else 1.0
