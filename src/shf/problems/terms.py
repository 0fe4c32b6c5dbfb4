"""What a step begins with, summed over the processes that hold the rows, and the weight decay that is added once."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shf.algorithm import Expansion
from shf.distributed.collective import Collective
from shf.errors import NonFiniteError
from shf.model.network import Network
from shf.preconditioners.diagonal import Preconditioner, solve_diagonal
from shf.problems.decay import Decay


@dataclass(frozen=True)
class Terms:
    """L, ∇L, the diagonal of P before damping (if there is one), the buffers that the pass left, and what tells how noisy
    ∇L is (if that is wanted)."""

    value: float
    gradient: Tensor
    diagonal: Tensor | None
    buffers: dict[str, Tensor]
    noise: Tensor | None = None


def no_terms(network: Network, preconditioner: Preconditioner, *, noise: bool = False) -> Terms:
    """The terms of a process without rows."""
    zeros = torch.zeros_like(network.theta())
    diagonal = zeros.clone() if preconditioner.diagonal else None
    return Terms(0.0, zeros, diagonal, network.buffers(), zeros.clone() if noise else None)


def sum_terms(ranks: Collective, compute: Callable[[], Terms], *, agree: bool = False) -> Terms:
    """The sum of all processes' terms, each already weighted; buffers are those of the first process with rows.

    Terms that are not finite are an error: that of the process whose rows they are from, or, if the processes are to
    `agree` on it (all pass over the batch), a `NonFiniteError` on each of them.
    """
    found: list[Terms] = []
    fault: list[NonFiniteError] = []

    def value() -> list[float]:
        try:
            found.append(compute())
        except NonFiniteError as error:
            if not agree:
                raise
            fault.append(error)
            return [math.nan]
        return [found[0].value]

    (total,) = ranks.add(value, 1)
    if agree and not math.isfinite(total):
        raise fault[0] if fault else NonFiniteError.elsewhere()
    own = found[0]
    gradient = ranks.sum(lambda: own.gradient, own.gradient)
    squares = own.diagonal
    diagonal = None if squares is None else ranks.sum(lambda: squares, squares)
    difference = own.noise
    noise = None if difference is None else ranks.sum(lambda: difference, difference)
    return Terms(total, gradient, diagonal, ranks.common(own.buffers), noise)


def expand_terms(
    terms: Terms,
    network: Network,
    decay: Decay,
    ranks: Collective,
    *,
    damping: float,
    exponent: float,
    out: Tensor | None = None,
) -> Expansion:
    """f, ∇f and P⁻¹ from the data's terms and the decay; gradient and diagonal are overwritten, and `out` by every P⁻¹r."""
    theta, own = [p.detach() for p in network.parameters], own_decay(decay, ranks)
    pieces = own.shapes.split(ranks.own(network.theta())) if ranks.split else theta
    precondition = solve_diagonal(terms.diagonal, damping, own, exponent, out)
    gradient, noise = own.add_product_(terms.gradient, pieces), None
    if terms.noise is not None:
        size = ranks.dot(gradient, gradient)
        noise = ranks.dot(terms.noise, terms.noise) / size if size > 0 else None
    return Expansion(terms.value + decay.penalty(theta), gradient, precondition, noise)


def own_decay(decay: Decay, ranks: Collective) -> Decay:
    """The decay of the entries that this process holds."""
    if not ranks.split:
        return decay
    part = ranks.part(decay.shapes.total)
    return decay.within(part.start, part.stop)
