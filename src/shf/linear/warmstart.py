"""Exact momentum: the model's minimum over CG's solution and the last update together. Beyond the paper; off by default.

The paper starts CG from γδ, and γ is a schedule. Here CG starts from zero, and its solution x is followed by one iteration
more, along the last update d made conjugate to x:

    d⊥ = d - t x,   t = x'Ad / x'Ax,   δ = x + c d⊥,   c = b'd⊥ / d⊥'Ad⊥.

x is the minimum along itself, so δ is the minimum over the plane of x and d: how much of the last update comes along is
solved for, step by step. With ζ = 1 this is the momentum of Martens & Grosse (2015, §7). It costs one product.
"""

import math

import torch
from torch import Tensor

from shf.linear.cg import Dot, LinearMap


def conjugate_to_last(
    product: LinearMap, rhs: Tensor, x: Tensor, value: float, last: Tensor, dot: Dot
) -> tuple[Tensor, float]:
    """δ and q(δ); x itself where d has nothing to add.

    Args:
        product: v ↦ Av.
        rhs: b.
        x: CG's solution from zero: the minimum of q along itself.
        value: q(x) = ½x'Ax - b'x.
        last: d, which becomes δ: it is overwritten.
        dot: the inner product.
    """
    Ad = product(last)
    xAd, dAd = dot(x, Ad), dot(last, Ad)
    bx, bd = dot(rhs, x), dot(rhs, last)
    xAx = 2 * (value + bx)
    t = xAd / xAx if xAx > 0 else math.nan
    slope, curvature = bd - t * bx, dAd - t * xAd
    numbers = torch.finfo(x.dtype)
    if not curvature > numbers.eps * dAd:  # parallel to rounding, or not a number
        return x, value
    c = slope / curvature
    if not max(abs(c), abs(1 - c * t)) <= numbers.max:
        return x, value
    return last.mul_(c).add_(x, alpha=1 - c * t), value - 0.5 * slope * c
