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
