"""The linear system of a step, over the rows of all processes."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shf.distributed.collective import Collective
from shf.linear.decay import Decay
from shf.linear.roots import Roots
from shf.linear.system import LinearSystem
from shf.model.gaussnewton import GaussNewton
from shf.preconditioners.base import Space
from shf.problems.part import OwnPart
from shf.runtime.interrupts import poll


def make_system(
    part: OwnPart, whole_decay: Decay, collective: Collective, damping: float, scratch: Tensor | None
) -> LinearSystem:
    """v ↦ (B + λI + λμS + W)v over all processes' rows.

    Args:
        part: this process's part of the problem.
        whole_decay: w for every parameter.
        collective: the processes.
        damping: λ.
        scratch: where this process's products may be put.
    """
    size = part.network.shapes.total
    decay = Space(damping, whole_decay, collective).own_decay
    made: list[GaussNewton | None] = []

    def own() -> GaussNewton | None:
        poll()
        if not made:
            made.append(part.curvature(damping, scratch))
        return made[0]

    def own_product(vector: Tensor) -> Tensor:
        B = own()
        return torch.zeros_like(vector) if B is None else B(vector)

    def product(vector: Tensor) -> Tensor:
        whole = collective.whole(vector, size)
        Bv = collective.sum(lambda: own_product(whole), whole)
        return decay.add_product_(Bv, decay.shapes.split(vector), damping)

    def quadratic(vector: Tensor) -> float:
        whole = collective.whole(vector, size)
        along = collective.add(lambda: [0.0 if (B := own()) is None else B.quadratic(whole)], 1)[0]
        decayed = 2 * whole_decay.penalty(part.network.shapes.split(whole))
        return along + decayed + damping * torch.dot(whole, whole).item()

    def structural(vector: Tensor) -> float:
        if not part.structural:
            return 0.0
        whole = collective.whole(vector, size)
        return collective.add(lambda: [0.0 if (B := own()) is None else B.structural(whole)], 1)[0]

    return LinearSystem(
        product,
        damping,
        quadratic,
        structural,
        dot=collective.dot,
        share=part.curvature_share,
        roots=None if collective.several or not part.can_be_written_out else partial(_roots, part, whole_decay),
        size=part.size,
    )


def _roots(part: OwnPart, decay: Decay, most: int) -> Roots:
    """B = R'R + W written out."""
    found, weights = part.roots(most), decay.weights
    if not any(weights):
        return found
    theta = part.network.theta()
    of_all = torch.cat([torch.full((n,), w) for n, w in zip(decay.shapes.sizes, weights, strict=True)]).to(theta)
    return replace(found, weights=weights[0] if len(set(weights)) == 1 else of_all, penalty=of_all * theta)
