"""The damped system (B + λI + λμS)δ = -∇f of one step, as a solver sees it. No network here."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shf.linear.cg import Dot, LinearMap, inner_product


@dataclass(frozen=True)
class LinearSystem:
    """B at θ, on X^c, damped.

    Attributes:
        product: v ↦ (B + λI + λμS)v; the result is the caller's to change, and may be overwritten by the next call.
        damping: λ.
        quadratic: v ↦ v'(B + λI + λμS)v, where that costs less than a product.
        structural: v ↦ ½λμ v'Sv; 0 without structural damping.
        dot: the inner product of vectors, where each process holds a part of them.
        share: rows that products are over, of those that the gradient is over: what a product costs.
    """

    product: LinearMap
    damping: float = 0.0
    quadratic: Callable[[Tensor], float] | None = None
    structural: Callable[[Tensor], float] = lambda vector: 0.0
    dot: Dot = inner_product
    share: float = 1.0

    def undamped(self, model: float, delta: Tensor) -> float:
        """½δ'Bδ + ∇f'δ from the damped model's value at δ: that is ½λ(δ'δ + μδ'Sδ) above."""
        return model - 0.5 * self.damping * self.dot(delta, delta) - self.structural(delta)
