"""transformers: a Trainer whose training step is one of SHF's."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

import shf

_SETTINGS = {"gradient_accumulation_steps": 1, "label_smoothing_factor": 0.0, "fp16": False, "bf16": False}
"""What a Trainer's loop would do beside the step, and cannot do for it."""


class TakenSHF(shf.SHF):
    """Takes its step when the Trainer has the batch; the Trainer's call of `step`, which comes after it, does nothing."""

    def take(self, inputs: Any, targets: Any) -> shf.StepInfo:
        return super().step(inputs, targets)

    def step(self, *given: Any, **named: Any) -> shf.StepInfo | None:  # type: ignore[override]
        return self.info


class SHFTrainer(Trainer):
    """`transformers.Trainer` with SHF: `options` are its own. Logs have what the last step reported, and no learning rate.

    The loss is the model's own where it is one of those below, made sure of on the first batch, or `compute_loss_func`.
    With `averaging` evaluation is at the average of the iterates, and so are checkpoints that are saved after it.
    """

    def __init__(self, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = dict(options or {})
        self._own_loss: Callable[[Any, Tensor], Tensor] | None = None
        for name, right in _SETTINGS.items():
            if (given := getattr(self.args, name)) != right:
                raise ValueError(
                    f"TrainingArguments({name}={given!r}): must be {right!r} for SHF. See docs/integrations.md#transformers"
                )
        self.add_callback(_Epochs())

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:  # type: ignore[has-type]
            decay = {"weight_decay": self.args.weight_decay, **self._options}
            self.optimizer = TakenSHF(self.model, self._loss, forward=self._forward, **decay)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = _NoSchedule()
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        optimizer = _own(self.optimizer)
        optimizer.train()
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        if self._own_loss is None:
            self._own_loss = self._find_loss(inputs, labels)
        return torch.tensor(optimizer.take(inputs, labels).loss_before, device=self.args.device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        logs.pop("grad_norm", None)  # of .grad, which is not written
        if logs.pop("learning_rate", None) is not None and (info := _own(self.optimizer).info) is not None:
            logs |= info.asdict()
        super().log(logs, *args, **kwargs)

    def _forward(self, model: nn.Module, inputs: Any) -> Any:
        outputs = model(**inputs)
        return outputs["logits"] if self.compute_loss_func is None else outputs

    def _loss(self, outputs: Any, labels: Tensor) -> Tensor:
        assert self._own_loss is not None
        return self._own_loss(outputs, labels)

    @torch.no_grad()
    def _find_loss(self, inputs: Any, labels: Tensor) -> Callable[[Any, Tensor], Tensor]:
        """The loss, as a function of the outputs, that the model computes inside itself."""
        if (given := self.compute_loss_func) is not None:
            return lambda outputs, labels: given(outputs, labels, num_items_in_batch=None)
        outputs = self.model(**inputs, labels=labels)
        for loss in (next_tokens, classes, values, several_classes):
            try:
                found = loss(outputs["logits"], labels)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            if torch.allclose(found, outputs["loss"], rtol=1e-4):
                return loss
        raise ValueError(
            f"{type(self.model).__name__} computes a loss of its own, which is not known as a function of its outputs: give "
            "SHFTrainer(compute_loss_func=lambda outputs, labels, num_items_in_batch: ...)"
        )


def next_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each token given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def classes(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, of rows or of tokens."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def values(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean square of the error."""
    return F.mse_loss(logits.reshape(labels.shape), labels)


def several_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each class whether it is there."""
    return F.binary_cross_entropy_with_logits(logits, labels)


class _NoSchedule:
    """There is no learning rate."""

    def step(self) -> None: ...

    def get_last_lr(self) -> list[float]:
        return [float("nan")]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Epochs(TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _own(kwargs["optimizer"]).next_epoch()


def _own(optimizer: Any) -> TakenSHF:
    """Out of Accelerate's wrapper."""
    found: TakenSHF = getattr(optimizer, "optimizer", optimizer)
    return found
