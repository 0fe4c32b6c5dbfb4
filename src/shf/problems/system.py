"""The linear system of a step, over the rows of all processes."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shf.distributed.collective import Collective
from shf.linear.decay import Decay
from shf.linear.roots import Roots
from shf.linear.system import LinearSystem
from shf.preconditioners.base import Space
from shf.problems.part import OwnPart, Products
from shf.runtime.interrupts import poll


def make_system(
    part: OwnPart, whole_decay: Decay, collective: Collective, damping: float, scratch: Tensor | None
) -> LinearSystem:
    """v ↦ (B + λI + λμS + W)v over all processes' rows; `scratch` is where this process's products may be put."""
    size = part.network.shapes.total
    decay = Space(damping, whole_decay, collective).own_decay
    made: list[Products | None] = []

    def own() -> Products | None:
        if not made:
            made.append(part.curvature(damping, scratch))
        return made[0]

    def summed(vector: Tensor) -> Tensor:
        def here() -> Tensor:
            B = own()
            return torch.zeros_like(whole) if B is None else B(whole)

        whole = collective.whole(vector, size)
        return collective.sum(here, whole)

    def product(vector: Tensor) -> Tensor:
        poll()
        alone = None if collective.several else own()
        return decay.add_product_(summed(vector) if alone is None else alone(vector), vector, damping)

    def quadratic(vector: Tensor) -> float:
        poll()
        whole, alone = collective.whole(vector, size), None if collective.several else own()
        if alone is not None:
            along = alone.quadratic(whole)
        else:
            along = collective.add(lambda: [0.0 if (B := own()) is None else B.quadratic(whole)], 1)[0]
        decayed = 2 * whole_decay.penalty(part.network.shapes.split(whole)) if whole_decay.any else 0.0
        return along + decayed + damping * torch.dot(whole, whole).item()

    def structural(vector: Tensor) -> float:
        if not part.structural:
            return 0.0
        whole = collective.whole(vector, size)
        return collective.add(lambda: [0.0 if (B := own()) is None else B.structural(whole)], 1)[0]

    if not collective.several and not part.can_be_written_out:
        own()  # nothing but products is wanted of it
    return LinearSystem(
        product,
        damping,
        quadratic,
        structural,
        dots=collective.dots,
        share=part.curvature_share,
        roots=None if collective.several or not part.can_be_written_out else partial(_roots, part, whole_decay),
        size=part.size,
        even=len(set(whole_decay.weights)) <= 1,
    )


def _roots(part: OwnPart, decay: Decay, most: int) -> Roots:
    """B = R'R + W written out."""
    found, weights = part.roots(most), decay.weights
    if not any(weights):
        return found
    theta = part.network.theta()
    of_all = torch.cat([torch.full((n,), w) for n, w in zip(decay.shapes.sizes, weights, strict=True)]).to(theta)
    penalty = of_all * theta if found.penalty is None else found.penalty + of_all * theta
    return replace(found, weights=weights[0] if len(set(weights)) == 1 else of_all, penalty=penalty)
