"""Lightning: a mixin whose `step` is a training step, and a callback that logs what steps report."""

from typing import Any

import lightning
import torch
from torch import Tensor

import shf


class SHFMixin:
    """Stands before `LightningModule` among a module's bases, whose `configure_optimizers` returns an `shf.SHF`.

    `training_step` returns `self.step(inputs, targets)`, in automatic and in manual optimization: Lightning counts the step,
    shows the loss before it, and checkpoints the optimizer as any other. Epochs of the optimizer follow Lightning's.
    """

    step_info: shf.StepInfo | None = None
    """What the last step returned."""

    def step(self, inputs: Any, targets: Any = None, optimizer: int = 0) -> Tensor:
        """A step of one of the optimizers; returns the objective before it."""
        wrapped = self.optimizers()  # type: ignore[attr-defined]
        chosen = wrapped[optimizer] if isinstance(wrapped, list) else wrapped
        own: shf.SHF = chosen.optimizer
        if own.epoch_index < self.current_epoch:  # type: ignore[attr-defined]
            own.next_epoch()  # here, because hooks of an epoch are not called on resuming
        given = shf.batch(inputs, targets)
        # in manual optimization Lightning counts by its wrapper, in automatic by its loop, which calls `optimizer_step`
        self.step_info = own.step(given) if self.automatic_optimization else chosen.step(given)  # type: ignore[attr-defined]
        return torch.tensor(self.step_info.loss_before)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Automatic optimization: runs `training_step`, which takes the step."""
        self._refuse_settings()
        before = self.step_info
        optimizer_closure()
        if self.step_info is before:
            raise TypeError(
                "training_step took no step: return self.step(inputs, targets) in place of the loss. See "
                "docs/integrations.md#lightning"
            )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """There is nothing to differentiate: the step is done."""

    def _refuse_settings(self) -> None:
        trainer = self.trainer  # type: ignore[attr-defined]
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): no gradients are accumulated; give a "
                "larger batch, and SHF(microbatch=...) to bound the memory"
            )


class StepLogger(lightning.Callback):
    """Logs what each step reports, by the trainer's own loggers.

    Args:
        names: which of `StepInfo.asdict()`; by default all.
        prefix: before their names.
    """

    def __init__(self, *names: str, prefix: str = "shf/") -> None:
        self._names, self._prefix = names, prefix

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for number, optimizer in enumerate(trainer.optimizers):
            if isinstance(optimizer, shf.SHF | shf.HF) and optimizer.info is not None:
                found, prefix = optimizer.info.asdict(), f"{self._prefix}{number}/" if number else self._prefix
                pl_module.log_dict({f"{prefix}{k}": v for k, v in found.items() if not self._names or k in self._names})
