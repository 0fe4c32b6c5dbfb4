"""PINA: a physics-informed solver that is trained by SHF, on the residuals of its conditions."""

from typing import Any

import torch
from pina.solver import PhysicsInformedSingleModelSolver
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import shf
from shf.integrations.residuals import joined, square


class SHFSolver(PhysicsInformedSingleModelSolver):
    """`PINN(problem, model)` without optimizer and scheduler: `**options` are SHF's, by default `shf.presets.residual`.

    The loss is the weighted sum of the conditions' mean squares. What a step reports is logged.
    """

    def __init__(self, problem: Any, model: nn.Module, *, weighting: Any = None, **options: Any) -> None:
        if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in model.modules()):
            raise ValueError(
                "a model with dropout: PINA's tensors do not let its masks be frozen for a step; leave it out"
            )
        super().__init__(problem=problem, model=model, weighting=weighting)
        self.automatic_optimization = False
        self._options = options or shf.presets.residual

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return shf.SHF(self.model, square, reduction="sum", **self._options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A step on all conditions."""
        weights = self._weights([name for name, _ in batch])

        def closure() -> Any:
            with _disable_current_modes():  # which its LabelTensor cannot be made in
                return evaluated()

        def evaluated() -> Any:
            residuals = []
            for name, data in batch:
                self._compute_condition_loss(self.problem.conditions[name], dict(data), batch_idx)
                residuals.append(self.residual_tensor.as_subclass(Tensor))
            return shf.evaluate(joined(residuals, weights))

        info = self.optimizers().step(closure)
        size = self.get_batch_size(batch)
        self.log("train_loss", info.loss_before, batch_size=size, **self.trainer.logging_kwargs)
        self.log_dict({f"shf/{k}": v for k, v in info.asdict().items()}, batch_size=size)
        return torch.tensor(info.loss_before)

    def _weights(self, names: list[str]) -> list[float]:
        """Of the conditions in the aggregated loss, which is linear in theirs."""
        losses = {name: torch.ones((), requires_grad=True) for name in names}
        total = self.weighting.aggregate(losses)
        return [g.item() for g in torch.autograd.grad(total, list(losses.values()))]
