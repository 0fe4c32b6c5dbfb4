"""Solvers that factorise: the same δ = -(B + λI)⁻¹∇f, by parameters or by rows, whichever is asked for or is smaller.

With a start s (γ of the last solution) what is solved for is the correction, (B + λI)(δ - s) = -(∇f + Bs): λ then holds δ
near s instead of near zero (SPRING, Goldshlager et al., 2024).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shf.linear.cg import CGStop
from shf.linear.roots import Roots, cholesky, gram
from shf.linear.solver import CG, LinearSolver, Path, Run
from shf.linear.system import LinearSystem

MOST_NUMBERS = 2**29
"""Numbers that R may have: 4 GiB in double precision."""


@dataclass(frozen=True, kw_only=True)
class Exact(LinearSolver):
    """Solves by a factorisation, where `inverse` says which."""

    products: ClassVar[bool] = False

    def solve(self, system: LinearSystem, downhill: Tensor, run: Run, start: Tensor | None = None) -> Path:
        roots = system.written_out(MOST_NUMBERS, self.side(*system.size))
        residual, penalty = roots.residual, roots.penalty
        if start is not None:
            residual = residual + roots.rows @ start
            decayed = roots.weights * start
            penalty = decayed if penalty is None else penalty + decayed
        delta = self.inverse(roots, residual, penalty, system.damping).neg_()
        if start is not None:
            delta += start
        value = 0.5 * torch.dot(delta, roots.product(delta) + system.damping * delta) - torch.dot(downhill, delta)
        model = value.item()
        run.visit(1, delta, model)
        return Path([], [1], [model], delta, 1, 0, CGStop.ZERO_RESIDUAL)

    def side(self, rows: int, parameters: int) -> int:
        """Of the matrix that is factorised."""
        return min(rows, parameters)

    def inverse(self, roots: Roots, residual: Tensor, penalty: Tensor | None, damping: float) -> Tensor:
        """(B + λI)⁻¹(R'r + p)."""
        raise TypeError(f"{type(self).__name__} does not say how it factorises: define inverse")


@dataclass(frozen=True, kw_only=True)
class Dense(Exact):
    """By parameters: Cholesky of R'R + W + λI, of size parameters²."""

    def side(self, rows: int, parameters: int) -> int:
        return parameters

    def inverse(self, roots: Roots, residual: Tensor, penalty: Tensor | None, damping: float) -> Tensor:
        matrix = gram(roots.rows.t())
        matrix.diagonal().add_(roots.weights + damping)
        b = roots.rows.t() @ residual
        b = b if penalty is None else b + penalty
        return torch.cholesky_solve(b[:, None], cholesky(matrix))[:, 0]


@dataclass(frozen=True, kw_only=True)
class Rows(Exact):
    """By rows: with D = W + λI and K = I + R D⁻¹ R', of size (rows × outputs)²,

        (R'R + D)⁻¹(R'r + p) = D⁻¹R' K⁻¹ r + D⁻¹p - D⁻¹R' K⁻¹ R D⁻¹p.

    Of R'r no difference of large numbers is taken, so that λ → 0 is sound; Wθ, of p, is zero where w is, and only the slope
    of a loss where it has no curvature is divided by λ alone. Where w is the same for all parameters λ(K) = λI + RR' is
    factorised instead, which λ → 0 leaves as it is.
    """

    def side(self, rows: int, parameters: int) -> int:
        return rows

    def inverse(self, roots: Roots, residual: Tensor, penalty: Tensor | None, damping: float) -> Tensor:
        R = roots.rows
        if not isinstance(roots.weights, Tensor):
            d = roots.weights + damping
            solve = _row_solver(gram(R), d)
            found = R.t() @ solve(residual)
            return found if penalty is None else found + (penalty - R.t() @ solve(R @ penalty)) / d
        D = roots.weights + damping
        scaled = R / D
        inner = scaled @ R.t()
        inner.diagonal().add_(1.0)
        root = cholesky(inner)
        found = scaled.t() @ torch.cholesky_solve(residual[:, None], root)[:, 0]
        if penalty is not None:
            p = penalty / D
            found += p - scaled.t() @ torch.cholesky_solve((R @ p)[:, None], root)[:, 0]
        return found


def _row_solver(products: Tensor, damping: float) -> Callable[[Tensor], Tensor]:
    """r ↦ (RR' + dI)⁻¹r. Where d is lost in rounding beside RR', which may be singular (more rows than parameters), by its
    eigenvectors, those of eigenvalue zero left out: R' has nothing to say about them."""
    largest = products.diagonal().max().item()
    if damping > _SOUND * len(products) * torch.finfo(products.dtype).eps * largest:
        products.diagonal().add_(damping)
        root = cholesky(products)
        return lambda r: torch.cholesky_solve(r[:, None], root)[:, 0]
    values, vectors = torch.linalg.eigh(products)
    kept = values > len(products) * torch.finfo(products.dtype).eps * values[-1]
    inverse = torch.where(kept, 1 / (values + damping), torch.zeros_like(values))
    return lambda r: vectors @ (inverse * (vectors.t() @ r))


_SOUND = 1e4
"""How far above rounding λ must be for a Cholesky factorisation by rows."""


@dataclass(frozen=True, kw_only=True)
class Auto(CG):
    """By the smaller side where both sides fit, counted and not timed; CG with `cg_iterations` where they do not."""

    products: ClassVar[bool] = False

    def solve(self, system: LinearSystem, downhill: Tensor, run: Run, start: Tensor | None = None) -> Path:
        rows, parameters = system.size
        if min(rows, parameters) > _LARGEST_SIDE or rows * parameters > MOST_NUMBERS or system.roots is None:
            return super().solve(system, downhill, run, start)
        exact = Dense() if parameters <= rows else Rows()
        return exact.solve(system, downhill, run, start)


_LARGEST_SIDE = 8192
"""Of the matrix that is factorised: beyond it a factorisation costs more than hundreds of products."""
