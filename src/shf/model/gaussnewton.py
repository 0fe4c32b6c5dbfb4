"""Products with the generalized Gauss-Newton matrix B = J'L''J. No decay, no damping, no CG."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shf.hessian.expansion import HessianMap
from shf.model.jacobian import Jacobian


class GaussNewton:
    """v ↦ Bv with B = s·J'L''J, flat vectors (§3). Weight decay is no part of it.

    With structural damping v ↦ (B + w·J_h'J_h)v, from the same passes: J_h = ∂h/∂θ of the tensors that the model holds
    steady.

    Args:
        jacobian: J on the curvature batch.
        hessian: u ↦ L''u at that batch's outputs.
        scale: s. 1 for a mean over rows; B/B_c for a sum, so that the subset stands for the whole batch.
        steadiness: w, for structural damping λμ/C with C curvature rows; the Jacobian must then know J_h.
        out: where products are put; by default in a vector of their own.
    """

    def __init__(
        self,
        jacobian: Jacobian,
        hessian: HessianMap,
        scale: float = 1.0,
        steadiness: float = 0.0,
        out: Tensor | None = None,
    ) -> None:
        self._jacobian = jacobian
        self._hessian = hessian
        self._scale = scale
        self._steadiness = steadiness
        self._out = out

    def __call__(self, vector: Tensor) -> Tensor:
        """Bv, or (B + w·J_h'J_h)v. The result is overwritten by the next call."""
        Jv, J_hv = self._jacobian.push(vector)
        HJv = self._hessian(Jv)
        del Jv  # as large as the outputs: not to be alive beside what J' makes
        weight = self._steadiness / self._scale
        held = [[weight * h for h in chunk] for chunk in J_hv] if weight else ()
        self._out = self._jacobian.vjp(HJv, held, out=self._out)
        if self._scale != 1:
            self._out.mul_(self._scale)
        return self._out

    def quadratic(self, vector: Tensor) -> float:
        """v'Bv = s·(Jv)'L''(Jv), or v'(B + w·J_h'J_h)v: J' is not needed."""
        Jv, J_hv = self._jacobian.push(vector)
        along = [torch.dot(u.reshape(-1), Hu.reshape(-1)) for u, Hu in zip(Jv, self._hessian(Jv), strict=True)]
        return self._scale * torch.stack(along).sum().item() + (self._steadied(J_hv) if self._steadiness else 0.0)

    def structural(self, vector: Tensor) -> float:
        """½ w ‖J_h v‖²: what structural damping adds to the quadratic model at v."""
        return 0.5 * self._steadied(self._jacobian.push(vector)[1])

    def _steadied(self, J_hv: Sequence[Sequence[Tensor]]) -> float:
        squares = torch.stack([h.square().sum() for chunk in J_hv for h in chunk])
        return self._steadiness * squares.sum().item()
