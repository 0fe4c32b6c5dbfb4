"""Dropout SGD as the paper compares with it (Hinton et al. 2012): large decaying rate, rising momentum, max-norm weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shf.lab.baselines.objective import OnObjective, TrainingObjective
from shf.lab.baselines.protocol import (
    ABOVE_0,
    FRACTION,
    Loss,
    MethodSpec,
    OwnSettings,
    Settings,
    at_least,
    costs,
    setting,
)
from shf.lab.models import incoming_weights, weight_layers


@dataclass(frozen=True)
class DropoutSGDSettings(OwnSettings):
    """The schedules, by epoch e counted from 0.

    Attributes:
        learning_rate: a_0; a_e = a_0 · rate_decay^e.
        rate_decay: per epoch.
        first_momentum: p at epoch 0.
        last_momentum: p from epoch `momentum_epochs` on; linear between.
        momentum_epochs: how many epochs p rises.
        max_norm: the bound on each unit's *squared* incoming norm; None for no bound.
    """

    learning_rate: float = setting(10.0, ABOVE_0, grid=(30.0, 10.0, 3.0, 1.0, 0.3, 0.1))
    rate_decay: float = setting(0.998, (lambda v: 0 < v <= 1, "in (0, 1]"))
    first_momentum: float = setting(0.5, FRACTION)
    last_momentum: float = setting(0.99, FRACTION)
    momentum_epochs: int = setting(500, at_least(1))
    max_norm: float | None = setting(15.0, (lambda v: v is None or v > 0, "above 0, or None"))

    def rate(self, epoch: int) -> float:
        return self.learning_rate * self.rate_decay**epoch

    def momentum(self, epoch: int) -> float:
        done = min(epoch / self.momentum_epochs, 1.0)
        return (1.0 - done) * self.first_momentum + done * self.last_momentum


class DropoutSGD(OnObjective):
    """Δθ ← p Δθ - (1-p) a ∇f;  θ ← θ + Δθ;  then every unit with Σ w² > max_norm is scaled back to the bound.

    torch's SGD keeps the sum of gradients and multiplies by the present rate; here the rate is inside the sum.
    """

    remembered = ("deltas", "epoch")

    def __init__(self, objective: TrainingObjective, settings: DropoutSGDSettings) -> None:
        super().__init__(objective)
        self.settings = settings
        self.deltas = [torch.zeros_like(p) for p in objective.parameters]
        self.epoch = 0

    @torch.no_grad()
    def step(self, inputs: Any, targets: Any) -> dict[str, float]:
        a, p = self.settings.rate(self.epoch), self.settings.momentum(self.epoch)
        with torch.enable_grad():
            f, gradients = self.objective.gradient(inputs, targets)
        for theta, delta, g in zip(self.objective.parameters, self.deltas, gradients, strict=True):
            delta.mul_(p).add_(g, alpha=-(1.0 - p) * a)
            theta.add_(delta)
        if self.settings.max_norm is not None:
            clip_incoming_(self.objective.model, self.settings.max_norm)
        return {"objective": f, "learning_rate": a, "momentum": p, **costs(gradients=1)}

    def next_epoch(self) -> None:
        self.epoch += 1


@torch.no_grad()
def clip_incoming_(model: nn.Module, max_norm: float) -> None:
    """Scales every unit of every linear layer whose squared incoming norm exceeds `max_norm` back to it."""
    for layer in weight_layers(model):
        weights = incoming_weights(layer)
        weights.copy_(torch.renorm(weights, p=2, dim=0, maxnorm=max_norm**0.5))


def _build(model: nn.Module, loss: Loss, settings: Settings) -> DropoutSGD:
    return DropoutSGD(TrainingObjective.of(model, loss, settings), DropoutSGDSettings.of(settings))


def _spec(name: str, summary: str, dropout: str) -> MethodSpec:
    return MethodSpec(
        name, summary, _build, **DropoutSGDSettings.described(), batch=100, dropout=dropout, may_be_none=("max_norm",)
    )


SPECS: tuple[MethodSpec, ...] = (
    _spec("dropout-sgd-all", "SGD with dropout on the inputs and all hidden layers, max-norm weights", "all"),
    _spec("dropout-sgd-last", "SGD with dropout on the inputs and the last hidden layer, max-norm weights", "last"),
)
