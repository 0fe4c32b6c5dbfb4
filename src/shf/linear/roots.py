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
        residual: r with R'r = ∇f - Wθ, where the gradient is over the same rows.
        penalty: Wθ; None where nothing decays.
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

    def gradient(self) -> Tensor:
        """∇f."""
        g = self.rows.t() @ self.residual
        return g if self.penalty is None else g + self.penalty

    def product(self, vector: Tensor) -> Tensor:
        """Bv."""
        return self.rows.t() @ (self.rows @ vector) + self.weights * vector


class SmallSide:
    """(B + λI)⁻¹ for any λ from one eigendecomposition, of the smaller of R'R and RR'.

    With V diag(s) V' = R'R + W the solution for b is V (V'b / (s + λ)). In the space of rows, U diag(s) U' = RR', it is
    R'U (c / (s + λ)) for b = R'Uc: no number is divided by λ alone, so that λ may be as small as rounding allows. There w
    must be the same for all parameters: it is then a part of λ.
    """

    def __init__(self, roots: Roots) -> None:
        self.roots, self.wide = roots, roots.wide
        R = roots.rows
        if self.wide:
            if isinstance(roots.weights, Tensor):
                raise ValueError(
                    f"{R.shape[0]} rows and {R.shape[1]} parameters with weight decay on some of them: expected decay on "
                    "all (parameter groups) or none in the space of rows; use weight_decay=0 or solver='cg'"
                )
            self.shift = float(roots.weights)
            gram = R @ R.t()
        else:
            self.shift, gram = 0.0, R.t() @ R
            gram.diagonal().add_(roots.weights)
        values: Tensor
        vectors: Tensor
        values, vectors = torch.linalg.eigh(gram)
        self.values, self.vectors = values.clamp_min_(0), vectors

    @property
    def largest(self) -> float:
        """B's largest eigenvalue."""
        return float(self.values[-1]) + self.shift

    def of_rows(self, residual: Tensor, penalty: Tensor | None = None) -> Tensor:
        """The coordinates of R'r + Wθ, for `solve`."""
        if self.wide:
            found = self.vectors.t() @ residual
            if penalty is not None and self.shift:
                raise ValueError("weight decay in the space of rows: use weight_decay=0 or solver='cg'")
            return found
        b = self.roots.rows.t() @ residual
        return self.vectors.t() @ (b if penalty is None else b + penalty)

    def solve(self, coordinates: Tensor, damping: float) -> Tensor:
        """(B + λI)⁻¹ b."""
        part = self.vectors @ (coordinates / (self.values + (damping + self.shift)))
        return self.roots.rows.t() @ part if self.wide else part

    def length(self, coordinates: Tensor, damping: float) -> float:
        """‖(B + λI)⁻¹ b‖, from the coordinates alone."""
        scaled = coordinates / (self.values + (damping + self.shift))
        if self.wide:
            scaled = scaled * self.values.sqrt()
        return float(torch.linalg.vector_norm(scaled))


def cholesky(matrix: Tensor) -> Tensor:
    """The root of a positive definite matrix; where rounding has cost it its definiteness, its diagonal grows until it is
    back.

    Raises:
        ValueError: if it is not finite.
    """
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    step = torch.finfo(matrix.dtype).eps * matrix.diagonal().abs().max().item()
    while failed:
        if not 0 < step < float("inf"):
            raise ValueError("the matrix of the system is zero or not finite: it cannot be factorised; use solver='cg'")
        matrix.diagonal().add_(step)
        step *= 10.0
        root, failed = torch.linalg.cholesky_ex(matrix)
    return root
