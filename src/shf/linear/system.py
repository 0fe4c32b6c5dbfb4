"""The damped system (B + λI + λμS)δ = -∇f of one step, as a solver sees it. No network here."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shf.linear.cg import Dot, LinearMap, inner_product
from shf.linear.roots import Roots


@dataclass(frozen=True)
class LinearSystem:
    """B at θ, on X^c, damped.

    Attributes:
        product: v ↦ (B + λI + λμS)v; the result is the caller's to change, and may be overwritten by the next call.
        damping: λ.
        quadratic: v ↦ v'(B + λI + λμS)v, where that costs less than a product.
        structural: v ↦ ½λμ v'Sv; 0 without structural damping.
        dot: the inner product of vectors, where each process holds a part of them.
        roots: most ↦ B written out as R'R + W, where that can be had; refused where R would have more numbers than that.
        size: rows of R, and parameters.
        share: rows that products are over, of those that the gradient is over: what a product costs.
    """

    product: LinearMap
    damping: float = 0.0
    quadratic: Callable[[Tensor], float] | None = None
    structural: Callable[[Tensor], float] = lambda vector: 0.0
    dot: Dot = inner_product
    share: float = 1.0
    roots: Callable[[int], Roots] | None = None
    size: tuple[int, int] = (0, 0)

    def written_out(self, most: int) -> Roots:
        """B = R'R + W in full; R has at most so many numbers."""
        if self.roots is None:
            raise ValueError(
                "this system cannot be written out: exact solvers need all rows in one process, curvature_batch=None, no "
                "structural damping, and a model whose outputs have the rows along an axis; use solver='cg'"
            )
        rows, parameters = self.size
        if rows * parameters > most:
            raise ValueError(
                f"J has {rows} rows and {parameters} columns, {rows * parameters * 8 / 2**30:.1f} GiB in double precision; "
                f"at most {most * 8 / 2**30:.1f} GiB are taken; use solver='cg', or fewer rows"
            )
        return self.roots(most)

    def undamped(self, model: float, delta: Tensor) -> float:
        """½δ'Bδ + ∇f'δ from the damped model's value at δ: that is ½λ(δ'δ + μδ'Sδ) above."""
        return model - 0.5 * self.damping * self.dot(delta, delta) - self.structural(delta)
