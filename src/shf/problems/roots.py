"""A batch's curvature written out, B = R'R, for solvers that factorise."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shf.data.tree import leaves
from shf.linear.roots import Roots
from shf.losses import LossExpansion
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
    J = row_jacobian(jacobian, separable=separable, most=most).view(*S.shape[:2], -1)
    rows = J.mul_(S.unsqueeze(2)) if S.ndim == 2 else S.transpose(1, 2) @ J
    residual = _pseudo_solve(S, _by_row(expansion.gradient), name)
    here = _by_row([z for z in leaves(jacobian.outputs) if z.is_floating_point()])
    shapes = jacobian.network.shapes

    def change(delta: Tensor) -> Tensor:
        values = [p + d for p, d in zip(theta, shapes.split(delta), strict=True)]
        there = _by_row([z for z in leaves(outputs_at(values)) if z.is_floating_point()])
        return _apply(S, there - here).reshape(-1)

    return Roots(rows.reshape(-1, J.shape[-1]), 0.0, residual.reshape(-1), None, change)


def _by_row(outputs: Sequence[Tensor]) -> Tensor:
    """(rows, K): everything that belongs to a case."""
    return torch.cat([z.reshape(len(z), -1) for z in outputs], 1)


def _apply(S: Tensor, z: Tensor) -> Tensor:
    """S'z, case by case."""
    return S * z if S.ndim == 2 else (S.transpose(1, 2) @ z.unsqueeze(2)).squeeze(2)


def _pseudo_solve(S: Tensor, u: Tensor, name: str) -> Tensor:
    """r with Sr = u.

    Raises:
        ValueError: where there is none: the loss has a slope in a direction in which it has no curvature.
    """
    if S.ndim == 2:
        r = torch.where(S > 0, u / S, torch.zeros_like(u))
        left = u - S * r
    else:
        r = (torch.linalg.pinv(S) @ u.unsqueeze(2)).squeeze(2)
        left = u - (S @ r.unsqueeze(2)).squeeze(2)
    if torch.linalg.vector_norm(left) > torch.finfo(u.dtype).eps ** 0.5 * torch.linalg.vector_norm(u):
        raise ValueError(
            f"loss {name} has a slope where it has no curvature: exact solvers need a loss such as the mean squared error, "
            "whose slope vanishes with its curvature; use solver='cg'"
        )
    return r
