"""B written out: B = R'R + W with one row of R for each output of each case, for solvers that factorise. No network here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Roots:
    """J, scaled by a root of the loss's Hessian: R = S'J with SS' = L''.

    Attributes:
        rows: R, (outputs of all cases, parameters).
        weights: w of every parameter, W = diag(w), as numbers or one number for all.
        residual: r with R'r = ∇f - p, where the gradient is over the same rows.
        penalty: p: Wθ, and the slope of a loss where it has no curvature; None where there is neither.
        change: δ ↦ S'(z(θ+δ) - z(θ)), how the outputs really change; an evaluation.
    """

    rows: Tensor
    weights: Tensor | float
    residual: Tensor
    penalty: Tensor | None
    change: Callable[[Tensor], Tensor]

    @property
    def wide(self) -> bool:
        """Whether there are more parameters than rows: then the space of rows is the smaller one."""
        return self.rows.shape[1] > self.rows.shape[0]

    def in_units(self, units: Tensor) -> "Roots":
        """The same for sδ in place of δ, with s_i the unit of a parameter. R is overwritten."""
        change, decays = self.change, isinstance(self.weights, Tensor) or self.weights > 0
        return Roots(
            self.rows.div_(units),
            self.weights / units.square() if decays else 0.0,
            self.residual,
            None if self.penalty is None else self.penalty / units,
            lambda delta: change(delta / units),
        )

    def gradient(self) -> Tensor:
        """∇f."""
        g = self.rows.t() @ self.residual
        return g if self.penalty is None else g + self.penalty

    def product(self, vector: Tensor) -> Tensor:
        """Bv."""
        return self.rows.t() @ (self.rows @ vector) + self.weights * vector


@dataclass(frozen=True)
class Coordinates:
    """A right-hand side b = R'r + p by eigenvectors: V'b, or in the space of rows U'r, p and U'Rp."""

    own: Tensor
    penalty: Tensor | None = None
    across: Tensor | None = None

    def scaled(self, values: Tensor, d: float) -> Tensor:
        """V'b / (s + d); by rows y = (U'r - U'Rp/d) / (s + d)."""
        return (self.own if self.across is None else self.own - self.across / d) / (values + d)


class SmallSide:
    """(B + λI)⁻¹ for any λ from one eigendecomposition, of the smaller of R'R and RR'.

    With V diag(s) V' = R'R + W the solution for b is V (V'b / (s + λ)). In the space of rows, U diag(s) U' = RR', where w is
    the same for all parameters and d = λ + w, it is

        p/d + R'U y,   y = (U'r - U'Rp/d) / (s + d)   for b = R'r + p.

    Of R'r no number is divided by λ alone, so that λ may be as small as rounding allows.
    """

    def __init__(self, roots: Roots) -> None:
        self.roots, R = roots, roots.rows
        self.wide = roots.wide and not isinstance(roots.weights, Tensor)
        if self.wide:
            self.shift, products = float(roots.weights), gram(R)
        else:
            self.shift, products = 0.0, gram(R.t())
            products.diagonal().add_(roots.weights)
        values: Tensor
        vectors: Tensor
        values, vectors = torch.linalg.eigh(products)
        self.values, self.vectors = values.clamp_min_(0), vectors
        self._spectrum = self.values.cpu()

    @property
    def largest(self) -> float:
        """B's largest eigenvalue."""
        return float(self._spectrum[-1]) + self.shift

    def of_rows(self, residual: Tensor, penalty: Tensor | None = None) -> Coordinates:
        """Of R'r + p, for `solve`."""
        if not self.wide:
            b = self.roots.rows.t() @ residual
            return Coordinates(self.vectors.t() @ (b if penalty is None else b + penalty))
        own = self.vectors.t() @ residual
        if penalty is None:
            return Coordinates(own)
        return Coordinates(own, penalty, self.vectors.t() @ (self.roots.rows @ penalty))

    def solve(self, b: Coordinates, damping: float) -> Tensor:
        """(B + λI)⁻¹ b."""
        d = damping + self.shift
        part = self.vectors @ b.scaled(self.values, d)
        if not self.wide:
            return part
        found = self.roots.rows.t() @ part
        return found if b.penalty is None else found.add_(b.penalty, alpha=1 / d)

    def lengths(self, b: Coordinates) -> Callable[[float], float]:
        """λ ↦ ‖(B + λI)⁻¹ b‖, in the space of rows from the coordinates alone: few numbers, which the CPU has from here on,
        because a search asks for many lengths."""
        s, shift, wide = self._spectrum, self.shift, self.wide
        square_of_p = 0.0 if b.penalty is None else torch.dot(b.penalty, b.penalty).cpu()
        b = Coordinates(b.own.cpu(), None, None if b.across is None else b.across.cpu())

        def length(damping: float) -> float:
            d = damping + shift
            y = b.scaled(s, d)
            found = torch.linalg.vector_norm(y * s.sqrt() if wide else y)
            if b.across is None:
                return float(found)
            square = found.square() + 2 / d * torch.dot(b.across, y) + square_of_p / d**2
            return float(square.clamp_min(0).sqrt())

        return length


def gram(R: Tensor) -> Tensor:
    """RR' on and below its diagonal, which is all that factorisations read: half of a full product's work."""
    size = max(_BLOCK, -(-len(R) // _BLOCKS))
    found = R.new_zeros(len(R), len(R))
    for first in range(0, len(R), size):
        block = R[first : first + size]
        torch.mm(block, R[: first + size].t(), out=found[first : first + size, : first + size])
    return found


_BLOCK, _BLOCKS = 128, 8
"""The least rows of a block, and the most blocks."""


def cholesky(matrix: Tensor) -> Tensor:
    """The root of a positive definite matrix; where rounding has cost it its definiteness, its diagonal grows until it is
    back.

    Raises:
        ValueError: if it is not finite.
    """
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    step = torch.finfo(matrix.dtype).eps * matrix.diagonal().abs().max().item() if failed else 0.0
    while failed:
        if not 0 < step < float("inf"):
            raise ValueError("the matrix of the system is zero or not finite: it cannot be factorised; use solver='cg'")
        matrix.diagonal().add_(step)
        step *= 10.0
        root, failed = torch.linalg.cholesky_ex(matrix)
    return root
