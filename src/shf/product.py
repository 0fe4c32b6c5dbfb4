"""Products with a model's Gauss-Newton matrix, for use outside of the optimizers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shf.data.batches import Batch
from shf.data.draws import Draws, preserved_global_state
from shf.distributed.collective import SINGLE
from shf.hessian.expansion import LossExpansion
from shf.linear.cg import LinearMap
from shf.losses import Loss
from shf.model.jacobian import Jacobian
from shf.model.network import Forward, Network, call_model, unwrap
from shf.probing.derivatives import refuse_single_derivatives
from shf.probing.layout import refuse_blind_spots
from shf.probing.unsupported import refuse_unsupported
from shf.runtime.context import twice_differentiable_kernels


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
        loss: `loss(outputs, targets)`; a mean or a sum over rows, as it says. Where it is not convex in the outputs, the
            positive part of L'' or a Fisher information stands for L''.
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
        hessian = LossExpansion(Loss(loss), jacobian.outputs, targets).hessian()

    def product(vector: Tensor) -> Tensor:
        with preserved_global_state(), torch.inference_mode(False), twice_differentiable_kernels(network.device):
            return jacobian.vjp(hessian(jacobian.jvp(vector)))

    return product
