"""DeepXDE: a model that is compiled with SHF, on the residuals of its equations and conditions."""

from typing import Any

import deepxde
from torch import Tensor

import shf
from shf.integrations.residuals import joined, square


def compile(model: deepxde.Model, *, loss_weights: Any = None, metrics: Any = None, **options: Any) -> shf.SHF:
    """Compiles a model as `model.compile` does, with SHF for the optimizer; `model.train(iterations=...)` is as ever.

    Args:
        model: of the PyTorch backend; its loss is the mean square of each residual.
        loss_weights: as of `model.compile`.
        metrics: likewise.
        **options: of SHF; by default `shf.presets.residual`, which wants `deepxde.config.set_default_float("float64")`.

    Returns:
        The optimizer.
    """
    if deepxde.backend.backend_name != "pytorch":
        raise RuntimeError(f"DeepXDE's backend is {deepxde.backend.backend_name}: set DDE_BACKEND=pytorch")
    if model.net.regularizer is not None:
        raise ValueError("the network has a regularizer: leave it out, and give weight_decay=... here")
    found: list[Tensor] = []

    def mean_square(target: Tensor, value: Tensor) -> Tensor:
        found.append(value - target)
        return found[-1].square().mean()

    optimizer = shf.SHF(model.net, square, reduction="sum", **(options or shf.presets.residual))
    model.compile(optimizer, loss=mean_square, loss_weights=loss_weights, metrics=metrics)
    if model.external_trainable_variables:
        raise ValueError("external trainable variables are no part of the network, which is all that is trained")

    def train_step(inputs: Any, targets: Any, auxiliary_vars: Any) -> None:
        def closure() -> Any:
            found.clear()
            model.outputs_losses_train(inputs, targets, auxiliary_vars)
            weights = [1.0] * len(found) if model.loss_weights is None else list(map(float, model.loss_weights))
            return shf.evaluate(joined(found, weights))

        optimizer.step(closure)

    model.train_step = train_step
    return optimizer
