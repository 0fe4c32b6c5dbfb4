"""The damped system (B + λI + λμS)δ = -∇f of one step, as a solver sees it. No network here."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shf.linear.cg import LinearMap
from shf.linear.flat import Dots, inner_products
from shf.linear.roots import Roots


@dataclass(frozen=True)
class LinearSystem:
    """B at θ, on X^c, damped.

    Attributes:
        product: v ↦ (B + λI + λμS)v; the result is the caller's to change, and may be overwritten by the next call.
        damping: λ.
        quadratic: v ↦ v'(B + λI + λμS)v, where that costs less than a product.
        structural: v ↦ ½λμ v'Sv; 0 without structural damping.
        dots: the inner products of pairs of vectors, where each process holds a part of them.
        roots: most ↦ B written out as R'R + W, where that can be had; refused where R would have more numbers than that.
        size: rows of R, and parameters.
        even: whether w is the same for all parameters.
        share: rows that products are over, of those that the gradient is over: what a product costs.
    """

    product: LinearMap
    damping: float = 0.0
    quadratic: Callable[[Tensor], float] | None = None
    structural: Callable[[Tensor], float] = lambda vector: 0.0
    dots: Dots = inner_products
    share: float = 1.0
    roots: Callable[[int], Roots] | None = None
    size: tuple[int, int] = (0, 0)
    even: bool = True

    def written_out(self, most: int, side: int) -> Roots:
        """B = R'R + W in full, for a solver that factorises a matrix of so many rows and columns; neither it nor R has more
        than `most` numbers."""
        if self.roots is None:
            raise ValueError(
                "this system cannot be written out: exact solvers need all rows in one process, curvature_batch=None, no "
                "structural damping, and a model whose outputs have the rows along an axis; use solver='cg'"
            )
        rows, parameters = self.size
        for what, height, width in (("J", rows, parameters), ("the matrix to factorise", side, side)):
            if height * width > most:
                raise ValueError(
                    f"{what} has {height} rows and {width} columns, {_gib(height * width)} in double precision; at most "
                    f"{_gib(most)} are taken; use {self._instead(most, side)}"
                )
        return self.roots(most)

    def _instead(self, most: int, side: int) -> str:
        """The solver that does with this memory."""
        smaller = min(self.size)
        if math.prod(self.size) > most or smaller >= side or smaller**2 > most:
            return "solver='cg', or fewer rows"
        return f"solver='{'rows' if smaller == self.size[0] else 'dense'}', which factorises {smaller} × {smaller}"

    def dot(self, a: Tensor, b: Tensor) -> float:
        """The inner product of one pair."""
        return self.dots((a, b))[0]

    def undamped(self, model: float, delta: Tensor, square: float) -> float:
        """½δ'Bδ + ∇f'δ from the damped model's value at δ, δ'δ given: that is ½λ(δ'δ + μδ'Sδ) above."""
        return model - 0.5 * self.damping * square - self.structural(delta)


def _gib(numbers: int) -> str:
    return f"{numbers * 8 / 2**30:.3g} GiB"
