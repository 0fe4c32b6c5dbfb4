"""A batch's curvature written out, B = R'R, for solvers that factorise."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shf.data.tree import leaves
from shf.hessian.expansion import LossExpansion
from shf.linear.roots import Roots
from shf.model.jacobian import Jacobian
from shf.model.rowjacobian import row_jacobian


def write_out(
    jacobian: Jacobian,
    expansion: LossExpansion,
    outputs_at: Callable[[Sequence[Tensor]], object],
    theta: Sequence[Tensor],
    *,
    separable: bool,
    name: str,
    most: int,
) -> Roots:
    """R = S'J, r with R'r = J'∂L/∂z, and how S'z changes along a step; without decay.

    Where the loss has a slope and no curvature, S has no part of ∂L/∂z there: that part of the gradient stands beside R'r.

    Args:
        jacobian: J on all rows.
        expansion: L at its outputs.
        outputs_at: parameters' values ↦ the model's outputs there.
        theta: the present values.
        separable: whether each row's output depends on that row alone.
        name: the loss's, for errors.
        most: numbers that R may have.
    """
    S = expansion.row_roots()
    if not bool(S.any()):
        raise ValueError(
            f"loss {name} has no curvature in the outputs: exact solvers need a loss such as the mean squared error; use "
            "solver='cg'"
        )
    J = row_jacobian(jacobian, separable=separable, most=most).view(*S.shape[:2], -1)
    slope = _by_row(expansion.gradient).view(S.shape[:2])
    residual = _pseudo_solve(S, slope)
    left = slope - _apply(S, residual)
    flat = torch.linalg.vector_norm(left) > torch.finfo(left.dtype).eps ** 0.5 * torch.linalg.vector_norm(slope)
    beside = J.flatten(0, 1).t() @ left.reshape(-1) if flat else None
    rows = J.mul_(S.unsqueeze(2)) if S.ndim == 2 else S.mT @ J
    here = _by_row([z for z in leaves(jacobian.outputs) if z.is_floating_point()])
    shapes = jacobian.network.shapes

    def change(delta: Tensor) -> Tensor:
        values = [p + d for p, d in zip(theta, shapes.split(delta), strict=True)]
        there = _by_row([z for z in leaves(outputs_at(values)) if z.is_floating_point()])
        return _apply(S.mT if S.ndim == 3 else S, (there - here).view(S.shape[:2])).reshape(-1)

    return Roots(rows.reshape(-1, J.shape[-1]), 0.0, residual.reshape(-1), beside, change)


def _by_row(outputs: Sequence[Tensor]) -> Tensor:
    """(rows, K): everything that belongs to a case."""
    return torch.cat([z.reshape(len(z), -1) for z in outputs], 1)


def _apply(S: Tensor, z: Tensor) -> Tensor:
    """Sz, block by block."""
    return S * z if S.ndim == 2 else (S @ z.unsqueeze(2)).squeeze(2)


def _pseudo_solve(S: Tensor, u: Tensor) -> Tensor:
    """The shortest r with Sr nearest to u."""
    if S.ndim == 2:
        return torch.where(S > 0, u / S, torch.zeros_like(u))
    return _apply(torch.linalg.pinv(S), u)
