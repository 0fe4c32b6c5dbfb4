"""Diagonal preconditioners for CG: P = [diagonal + λ + w]^ξ, elementwise. No CG here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from shf.component import number, one_of, option
from shf.linear.cg import LinearMap, identity
from shf.linear.decay import Decay
from shf.losses import Reduction
from shf.model.percase import squared_vjp
from shf.model.shares import Rows, squared_shares
from shf.preconditioners.base import GradientPass, Preconditioner, Preparation, Space, Work
from shf.runtime.context import warn
from shf.state import Memory

_DEAR = 10.0
"""A preconditioner that makes a step so many times dearer gets a warning."""


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
    squares: str = option(
        "auto",
        one_of("auto", "exact", "sampled"),
        """what these two square: "exact", the gradient of each row, which takes backward passes of their own for layers
        without a formula and for all rows that influence each other; "sampled", each row's share of the gradient, partly
        estimated with random signs, at the cost of a gradient at most; "auto", the latter where rows influence each other or
        differ in size.""",
        name="preconditioner_squares",
    )

    def begin(self, memory: Memory, work: Work) -> Preparation:
        return Watched(self.pull, self.inverse, self.decay_step, type(self).__name__, memory, work)

    def squared(self, pass_: GradientPass) -> Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]:
        """u ↦ J'u and the sum of the rows' squares."""
        if self.squares == "sampled" or (self.squares == "auto" and (pass_.ragged or not pass_.separable)):
            rows = Rows(pass_.calls, pass_.separable, pass_.signs)
            return partial(squared_shares, pass_.jacobian, rows=rows)
        return partial(squared_vjp, pass_.jacobian, axes=pass_.axes, costs=pass_.costs)

    def inverse(self, diagonal: Tensor | None, space: Space) -> LinearMap:
        assert diagonal is not None
        return solve_diagonal(diagonal, space.damping, space.own_decay, self.exponent, space.out)


@dataclass(frozen=True, kw_only=True)
class EmpiricalFisher(Diagonal):
    """The diagonal is (1/B) Σ_j (∇L_j)², Martens' choice and the paper's. For a sum over rows, B times that."""

    def pull(self, pass_: GradientPass) -> tuple[Tensor, Tensor | None]:
        gradient, squares = self.squared(pass_)(pass_.expansion.gradient)
        # ∂L/∂z of a mean carries 1/B for each case: B² / B makes (1/B) Σ (∇L_j)² of it.
        return gradient, squares.mul_(pass_.jacobian.rows) if pass_.reduction is Reduction.MEAN else squares


@dataclass(frozen=True, kw_only=True)
class Jacobi(Diagonal):
    """The diagonal is an unbiased estimate of diag(J'L''J): squares of J_j'S_jξ_j with S S' = L'' and ξ = ±1 (Chapelle &
    Erhan, 2011)."""

    def pull(self, pass_: GradientPass) -> tuple[Tensor, Tensor | None]:
        root = pass_.expansion.hessian_root(pass_.signs)
        return pass_.gradient(), self.squared(pass_)(root)[1]


@dataclass(frozen=True)
class Watched:
    """A diagonal preconditioner in one step; one that makes steps ten times dearer says so before it does."""

    pull: Callable[[GradientPass], tuple[Tensor, Tensor | None]]
    inverse: Callable[[Tensor | None, Space], LinearMap]
    decay_step: Callable[[Space], Tensor | None]
    name: str
    memory: Memory
    work: Work
    record: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True

    def costs(self, evaluations: float) -> None:
        times = 1 + evaluations / self.work.evaluations
        if times > _DEAR and not self.memory.cache.get("warned of squares"):
            self.memory.cache["warned of squares"] = True
            warn(
                f"preconditioner {self.name}: squares of per-case gradients need backward passes worth {evaluations:.0f} "
                f"evaluations, which makes a step about {times:.0f} times as dear as without preconditioner; use "
                "preconditioner_squares='sampled' (an estimate at the cost of one gradient), or preconditioner=None"
            )


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
