"""Products with the generalized Gauss-Newton matrix B = J'L''J. No decay, no damping, no CG."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shf.data.batches import Batch
from shf.data.draws import Draws, preserved_global_state
from shf.distributed.collective import SINGLE
from shf.linear.cg import LinearMap
from shf.losses import HessianMap, Loss
from shf.model.jacobian import Jacobian
from shf.model.network import Forward, Network, call_model, unwrap
from shf.probing.derivatives import refuse_single_derivatives
from shf.probing.layout import refuse_blind_spots
from shf.probing.unsupported import refuse_unsupported
from shf.runtime.context import twice_differentiable_kernels


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


def gauss_newton_product(
    model: nn.Module,
    loss: Any,
    inputs: Any,
    targets: Any,
    *,
    params: Iterable[nn.Parameter] | None = None,
    forward: Forward = call_model,
    seed: int = 0,
) -> LinearMap:
    """The map v ↦ J'L''J v of a model and a loss on one batch, at the model's present parameters.

    The graphs are built once; each product is then two backward passes. Vectors are flat, in the order of
    `model.parameters()` (or of `params`). Dropout masks are drawn once, from `seed`, and are the same in every product.

    Args:
        model: the module, in the mode (train or eval) that is wanted.
        loss: `loss(outputs, targets)`, convex in the outputs; a mean or a sum over rows, as it says.
        inputs: a tensor, a tuple (`model(*inputs)`) or a dict (`model(**inputs)`).
        targets: whatever the loss takes.
        params: the parameters to differentiate by; by default all that require grad.
        forward: how to call the model, `forward(model, inputs)`.
        seed: of the random draws inside the model.

    Example:
        >>> model, x, t = nn.Linear(3, 2), torch.randn(8, 3), torch.randn(8, 2)
        >>> product = gauss_newton_product(model, nn.MSELoss(), x, t)
        >>> product(torch.ones(8)).shape
        torch.Size([8])
    """
    model = unwrap(model)
    parameters = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
    if not parameters:
        raise ValueError(
            "gauss_newton_product: no parameter to differentiate by: none requires grad, or params is empty"
        )
    network = Network(model, parameters, forward)
    refuse_unsupported(network, SINGLE)
    batch = Batch.of(inputs, targets)
    with (
        preserved_global_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
        twice_differentiable_kernels(network.device),
    ):
        refuse_blind_spots(network, batch, seed)
        jacobian = Jacobian(network, batch, Draws(seed, batch.rows))
        refuse_single_derivatives(jacobian)
        hessian = Loss(loss).expand(jacobian.outputs, targets).hessian()

    def product(vector: Tensor) -> Tensor:
        with preserved_global_state(), torch.inference_mode(False), twice_differentiable_kernels(network.device):
            return jacobian.vjp(hessian(jacobian.jvp(vector)))

    return product
