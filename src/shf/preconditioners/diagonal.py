"""Diagonal preconditioners for CG: P = [diagonal + λ + w]^ξ, elementwise. No CG here."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shf.component import number, option
from shf.linear.cg import LinearMap, identity
from shf.linear.decay import Decay
from shf.losses import Reduction
from shf.model.percase import squared_vjp
from shf.preconditioners.base import GradientPass, Preconditioner, Space


@dataclass(frozen=True, kw_only=True)
class Identity(Preconditioner):
    """P = 1."""

    def inverse(self, diagonal: Tensor | None, space: Space) -> LinearMap:
        return identity


@dataclass(frozen=True, kw_only=True)
class Diagonal(Preconditioner):
    """P = [diagonal + λ + w]^ξ, where `pull` makes the diagonal."""

    record: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True

    exponent: float = option(
        0.75,
        number(least=0.0, most=1.0),
        """[ξ] of the two diagonal preconditioners, "empirical-fisher" and "jacobi".""",
        name="preconditioner_exponent",
    )

    def inverse(self, diagonal: Tensor | None, space: Space) -> LinearMap:
        assert diagonal is not None
        return solve_diagonal(diagonal, space.damping, space.own_decay, self.exponent, space.out)


@dataclass(frozen=True, kw_only=True)
class EmpiricalFisher(Diagonal):
    """The diagonal is (1/B) Σ_j (∇L_j)², Martens' choice and the paper's. For a sum over rows, B times that."""

    def pull(self, pass_: GradientPass) -> tuple[Tensor, Tensor | None]:
        gradient, squares = squared_vjp(pass_.jacobian, pass_.expansion.gradient, axes=pass_.axes)
        # ∂L/∂z of a mean carries 1/B for each case: B² / B makes (1/B) Σ (∇L_j)² of it.
        return gradient, squares.mul_(pass_.jacobian.rows) if pass_.reduction is Reduction.MEAN else squares


@dataclass(frozen=True, kw_only=True)
class Jacobi(Diagonal):
    """The diagonal is an unbiased estimate of diag(J'L''J): squares of J_j'S_jξ_j with S S' = L'' and ξ = ±1 (Chapelle &
    Erhan, 2011)."""

    def pull(self, pass_: GradientPass) -> tuple[Tensor, Tensor | None]:
        root = pass_.expansion.hessian_root(pass_.signs)
        return pass_.gradient(), squared_vjp(pass_.jacobian, root, axes=pass_.axes)[1]


def solve_diagonal(
    diagonal: Tensor, damping: float, decay: Decay, exponent: float, out: Tensor | None = None
) -> LinearMap:
    """r ↦ P⁻¹r with P = [diagonal + λ + w]^ξ, into `out`; the result is overwritten by the next call, the diagonal by
    this one."""
    inverse = inverse_diagonal_(diagonal, damping, decay, exponent)
    result = torch.empty_like(inverse) if out is None else out
    return lambda r: torch.mul(r, inverse, out=result)


def inverse_diagonal_(diagonal: Tensor, damping: float, decay: Decay, exponent: float) -> Tensor:
    """P⁻¹ itself, in the diagonal's place: exp(-ξ log(·)), for which there are faster kernels than for powers."""
    return decay.add_diagonal_(diagonal, damping).log_().mul_(-exponent).exp_()
