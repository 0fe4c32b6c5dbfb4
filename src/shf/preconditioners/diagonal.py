"""Diagonal preconditioners for CG: P = [diagonal + λ + w]^ξ, elementwise. No CG here."""

import enum

import torch
from torch import Tensor

from shf.data.draws import generator
from shf.linear.cg import LinearMap, identity
from shf.losses import LossExpansion, Reduction, Signs
from shf.model.jacobian import Jacobian
from shf.model.percase import CallAxes, squared_vjp
from shf.problems.decay import Decay


class Preconditioner(enum.Enum):
    """What P is made of."""

    EMPIRICAL_FISHER = "empirical-fisher"
    """(1/B) Σ_j (∇L_j)², Martens' choice and the paper's. For a sum over rows, B times that."""
    JACOBI = "jacobi"
    """An unbiased estimate of diag(J'L''J): squares of J_j'S_jξ_j with S S' = L'' and ξ = ±1 (Chapelle & Erhan, 2011)."""
    KRONECKER = "kronecker"
    """Two factors for each linear or convolution layer, running averages; a Jacobi diagonal for all else."""
    NONE = None
    """P = 1."""

    @property
    def diagonal(self) -> bool:
        """Whether every step computes a diagonal."""
        return self in (Preconditioner.EMPIRICAL_FISHER, Preconditioner.JACOBI)


def gradient_and_diagonal(
    kind: Preconditioner,
    jacobian: Jacobian,
    expansion: LossExpansion,
    reduction: Reduction,
    axes: CallAxes | None,
    signs: Signs,
) -> tuple[Tensor, Tensor | None]:
    """∇L = J'∂L/∂z and the diagonal of P before damping, from passes over the same graph.

    Args:
        jacobian: J on the gradient batch.
        expansion: L at its outputs.
        axes: see `squared_vjp`.
        signs: ξ.
    """
    if not kind.diagonal:
        return jacobian.vjp(expansion.gradient), None
    if kind is Preconditioner.EMPIRICAL_FISHER:
        gradient, squares = squared_vjp(jacobian, expansion.gradient, axes=axes)
        # ∂L/∂z of a mean carries 1/B for each case: B² / B makes (1/B) Σ (∇L_j)² of it.
        return gradient, squares.mul_(jacobian.rows) if reduction is Reduction.MEAN else squares
    root = expansion.hessian_root(signs)
    return jacobian.vjp(expansion.gradient), squared_vjp(jacobian, root, axes=axes)[1]


def random_signs(like: Tensor, seed: int) -> Tensor:
    """Independent ±1."""
    signs = torch.empty_like(like, memory_format=torch.contiguous_format)
    return signs.bernoulli_(0.5, generator=generator(like.device, seed)).mul_(2).sub_(1)


def solve_diagonal(
    diagonal: Tensor | None, damping: float, decay: Decay, exponent: float, out: Tensor | None = None
) -> LinearMap:
    """r ↦ P⁻¹r with P = [diagonal + λ + w]^ξ, into `out`; the result is overwritten by the next call, the diagonal by
    this one."""
    if diagonal is None:
        return identity
    inverse = inverse_diagonal_(diagonal, damping, decay, exponent)
    result = torch.empty_like(inverse) if out is None else out
    return lambda r: torch.mul(r, inverse, out=result)


def inverse_diagonal_(diagonal: Tensor, damping: float, decay: Decay, exponent: float) -> Tensor:
    """P⁻¹ itself, in the diagonal's place: exp(-ξ log(·)), for which there are faster kernels than for powers."""
    return decay.add_diagonal_(diagonal, damping).log_().mul_(-exponent).exp_()
