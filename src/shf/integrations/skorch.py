"""skorch: nets whose training step is one of SHF's."""

from typing import Any

import torch
from skorch.dataset import unpack_data
from skorch.utils import to_tensor
from torch import Tensor, nn

import shf


class SHFMixin:
    """Stands before `skorch.NeuralNet`, or one of its kind, among a net's bases.

    `optimizer__...` are SHF's options; `optimizer` and `lr` mean nothing to it. What each step reports is in the net's
    history, batch by batch. With `optimizer__averaging`, validation and predictions are the averages'.
    """

    def initialize_optimizer(self, triggered_directly: Any = None) -> Any:
        """Of module and criterion, as they are now."""
        criterion: Any = self.criterion_  # type: ignore[attr-defined]
        by_itself = type(self).get_loss.__module__.startswith("skorch.")  # type: ignore[attr-defined]
        direct = by_itself and not isinstance(criterion, nn.NLLLoss)  # of which skorch takes the logarithm first
        self.optimizer_ = shf.SHF(
            self.module_,  # type: ignore[attr-defined]
            criterion if direct else self._loss,
            forward=self._forward,
            reduction=getattr(criterion, "reduction", None),
            **self.get_params_for("optimizer"),  # type: ignore[attr-defined]
        )
        return self

    def set_params(self, **params: Any) -> Any:
        """skorch's; options of the optimizer, which skorch would put into parameter groups, hold from the next `fit` on."""
        own = {name: value for name, value in params.items() if name.startswith("optimizer__")}
        super().set_params(**{name: value for name, value in params.items() if name not in own})  # type: ignore[misc]
        vars(self).update(own)
        self._params_to_validate.update(own)  # type: ignore[attr-defined]
        return self

    def train_step(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """A step on the batch."""
        if fit_params:
            raise TypeError(f"fit({', '.join(fit_params)}=...): give the module what it takes in X, as a dict")
        self._set_training(True)  # type: ignore[attr-defined]
        self.optimizer_.train()
        info = self.optimizer_.step(*(to_tensor(part, self.device) for part in unpack_data(batch)))  # type: ignore[attr-defined]
        for name, value in info.asdict().items():
            self.history.record_batch(name, value)  # type: ignore[attr-defined]
        return {"loss": torch.tensor(info.loss_before), "y_pred": None}

    def evaluation_step(self, batch: Any, training: bool = False) -> Any:
        """skorch's, at the average of the iterates where there is one."""
        if not training:
            self.optimizer_.eval()
        return super().evaluation_step(batch, training)  # type: ignore[misc]

    def __getstate__(self) -> Any:
        """The optimizer by its state alone: it refers to the net."""
        other = object.__new__(type(self))
        other.__dict__ = dict(self.__dict__)
        if "optimizer_" in other.__dict__:
            other.__dict__["optimizer_"] = self.optimizer_.state_dict()
        return super(SHFMixin, other).__getstate__()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if "optimizer_" in self.__dict__:
            saved = self.__dict__.pop("optimizer_")
            self.initialize_optimizer()
            self.optimizer_.load_state_dict(saved)

    def on_epoch_end(self, net: Any, *args: Any, **kwargs: Any) -> None:
        self.optimizer_.next_epoch()
        super().on_epoch_end(net, *args, **kwargs)  # type: ignore[misc]

    def _forward(self, module: Any, inputs: Any) -> Any:
        return self.infer(inputs)  # type: ignore[attr-defined]

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        loss: Tensor = self.get_loss(outputs, targets, training=True)  # type: ignore[attr-defined]
        return loss
