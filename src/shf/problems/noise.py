"""How noisy a batch's gradient is, from its two halves. Beyond the paper; off by default."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shf.component import Component, option, whole
from shf.data.rows import RowAxis
from shf.distributed.collective import Share
from shf.model.jacobian import Jacobian
from shf.model.percase import refuse_unclear_rows


@dataclass(frozen=True, kw_only=True)
class NoiseMeasure(Component):
    """When the noise is measured."""

    every: int | None = option(
        None,
        whole(least=1, optional=True),
        "steps between two measurements of the gradient's noise (`StepInfo.gradient_noise`); None for none.",
        name="noise_every",
    )

    def due(self, iteration: int) -> bool:
        return self.every is not None and iteration % self.every == 0


def half_difference(jacobian: Jacobian, cotangents: Sequence[Tensor], gradient: Tensor, share: Share) -> Tensor:
    """d = a g₁ - b g₂, where g₁ and g₂ are the parts of the gradient from the first and the second half of the rows and
    a² = 1/b² = B₂/B₁: then E[d] = 0 and E‖d‖² is the trace of the gradient's covariance, tr Σ / B. Of a process that has
    only a share of the rows this is its part: d is the sum of all.

    Byrd et al. (2012) estimate the same number from single cases. Two halves cost one backward pass for any model.

    Args:
        jacobian: J on this process's rows.
        cotangents: ∂L/∂z.
        gradient: J'∂L/∂z, flat.
        share: which of the batch's rows these are; there are at least two.
    """
    first = share.total // 2
    per_row = gradient.new_zeros(share.rows)
    per_row[: max(first - share.first, 0)] = 1
    masked = [
        u if jacobian.is_idle(i, u) else _first_half(u, jacobian.axis(i), per_row) for i, u in enumerate(cotangents)
    ]
    a = math.sqrt((share.total - first) / first)
    return jacobian.vjp(masked).mul_(a + 1 / a).sub_(gradient, alpha=1 / a)


def _first_half(u: Tensor, axis: RowAxis, per_row: Tensor) -> Tensor:
    refuse_unclear_rows(u, axis, len(per_row), "noise_every", "noise_every=None and cg_noise=None")
    return u * axis.factor(per_row, u.ndim)
