"""Dropout SGD as the paper compares with it (Hinton et al. 2012): large decaying rate, rising momentum, max-norm weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shf.component import Component, number, option, whole
from shf.lab.baselines.objective import OnObjective, TrainingObjective
from shf.lab.baselines.protocol import Loss, MethodSpec, Settings, costs, defaults_of
from shf.lab.models import incoming_weights, weight_layers


@dataclass(frozen=True, kw_only=True)
class DropoutSGDSettings(Component):
    """The schedules, by epoch e counted from 0."""

    learning_rate: float = option(10.0, number(above=0), "a_0; a_e = a_0 · rate_decay^e.")
    rate_decay: float = option(0.998, number(above=0, most=1), "of the learning rate, per epoch.")
    first_momentum: float = option(0.5, number(least=0, below=1), "p at epoch 0.")
    last_momentum: float = option(0.99, number(least=0, below=1), "p from `momentum_epochs` on; linear between.")
    momentum_epochs: int = option(500, whole(least=1), "how many epochs p rises.")
    max_norm: float | None = option(
        15.0, number(above=0, words=(None,)), "the bound on each unit's *squared* incoming norm; None for no bound."
    )

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
    own = DropoutSGDSettings.from_flat("dropout SGD", settings)
    return DropoutSGD(TrainingObjective.of(model, loss, settings), own)


SPECS: tuple[MethodSpec, ...] = tuple(
    MethodSpec(
        f"dropout-sgd-{dropout}",
        f"SGD with dropout on the inputs and {where}, max-norm weights",
        _build,
        defaults_of(DropoutSGDSettings),
        {"learning_rate": (30.0, 10.0, 3.0, 1.0, 0.3, 0.1)},
        batch=100,
        dropout=dropout,
        checks_itself=True,
    )
    for dropout, where in (("all", "all hidden layers"), ("last", "the last hidden layer"))
)
