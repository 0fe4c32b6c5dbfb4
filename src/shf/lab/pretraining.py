"""Greedy layerwise pretraining, a starting point for any optimizer: every layer learns to reconstruct its own inputs.

A layer is trained as a denoising autoencoder with tied weights (Vincent et al. 2008) or as a restricted Boltzmann machine
with one step of contrastive divergence (Hinton & Salakhutdinov 2006; rectified units: Nair & Hinton 2010), then its
outputs are the inputs of the next. An autoencoder is unrolled at the end: decoders are the transposed encoders.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from shf.component import Component, number, option, whole
from shf.lab.models import Autoencoder, weight_layers

EpochReport = Callable[[int, int, float], None]
"""Called after each epoch with the layer (from 1), the epoch (from 1) and the mean squared reconstruction error per case."""


class Unit(Enum):
    """What a unit does with its summed input, and what values it has."""

    LOGISTIC = "logistic"
    RECTIFIER = "rectifier"
    LINEAR = "linear"

    def mean(self, z: Tensor) -> Tensor:
        """The deterministic output."""
        if self is Unit.LOGISTIC:
            return z.sigmoid()
        return z.relu() if self is Unit.RECTIFIER else z

    def sample(self, z: Tensor, generator: torch.Generator) -> Tensor:
        """A random state: Bernoulli(σ(z)), max(0, z + N(0, σ(z))), or z + N(0, 1)."""
        if self is Unit.LOGISTIC:
            return torch.bernoulli(z.sigmoid(), generator=generator)
        noise = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        return (z + noise * z.sigmoid().sqrt()).relu() if self is Unit.RECTIFIER else z + noise


@dataclass(frozen=True)
class Layer:
    """A layer and the kinds of units on its two sides. Visible units are logistic (data in [0, 1]) or linear."""

    linear: nn.Linear
    visible: Unit
    hidden: Unit
    visible_bias: Tensor

    def reconstruction(self, h: Tensor) -> Tensor:
        """The summed input of the visible units: W'h + c."""
        return h @ self.linear.weight + self.visible_bias

    @property
    def bounded(self) -> bool:
        """Whether units on both sides are logistic, which bears a larger learning rate."""
        return self.visible is Unit.LOGISTIC and self.hidden is Unit.LOGISTIC


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(Component):
    """What both methods leave to choose."""

    epochs: int = option(10, whole(least=1), "passes over the data, per layer.")
    batch_size: int = option(100, whole(least=1), "rows of an update.")
    learning_rate: float | None = option(
        None,
        number(above=0, words=(None,)),
        """None for the method's own: Adam at 0.001 for denoising; for RBMs SGD at 0.1 between logistic units and 0.001
        else.""",
    )
    corruption: float = option(
        0.3, number(least=0, below=1), "the probability with which denoising sets an input to 0."
    )


def pretrain_(
    model: nn.Sequential,
    inputs: Tensor,
    *,
    method: str = "denoising",
    generator: torch.Generator,
    report: EpochReport | None = None,
    **chosen: Any,
) -> None:
    """Pretrains the hidden layers of a classifier, or the encoder of an autoencoder and with it the decoder, in place.

    Layers begin from small random weights of their own, whatever the model had; a classifier's last layer is left alone.

    Args:
        model: made by `shf.lab.models.classifier` or `autoencoder`.
        inputs: dense rows; values in [0, 1] are treated as probabilities of pixels, all else as real numbers.
        method: "denoising" or "rbm".
        generator: the source of all randomness.
        chosen: fields of `PretrainingSettings`.
        report: is told the reconstruction error after each epoch.
    """
    if method not in _METHODS:
        raise ValueError(f"pretrain_(method={method!r}): must be one of {', '.join(_METHODS)}")
    if inputs.layout != torch.strided:
        raise ValueError("pretrain_: inputs are sparse; pretraining reconstructs every input and needs dense ones")
    settings = PretrainingSettings(**chosen)
    x = inputs.detach()
    with torch.enable_grad():
        for number, layer in enumerate(_layers(model, x), start=1):
            train = _METHODS[method](layer, settings, generator)
            for epoch in range(settings.epochs):
                error = _epoch(train, x, epoch, settings, generator)
                if not math.isfinite(error):
                    raise ArithmeticError(
                        f"pretraining of layer {number} diverged; lower learning_rate ({settings.learning_rate})"
                    )
                if report is not None:
                    report(number, epoch + 1, error)
            with torch.no_grad():
                x = layer.hidden.mean(layer.linear(x))
            _unroll(model, number, layer)


def _layers(model: nn.Sequential, inputs: Tensor) -> Iterator[Layer]:
    """The layers to pretrain, from the inputs on."""
    linear = [m for m in weight_layers(model) if isinstance(m, nn.Linear)]
    count = len(linear) // 2 if isinstance(model, Autoencoder) else len(linear) - 1
    if count < 1 or len(linear) < len(list(weight_layers(model))):
        raise ValueError("pretrain_: the model has no hidden layer between dense inputs and its outputs")
    pixels = bool((inputs.min() >= 0) and (inputs.max() <= 1))
    visible = Unit.LOGISTIC if pixels else Unit.LINEAR
    for layer in linear[:count]:
        hidden = _unit_after(model, layer)
        yield Layer(
            layer, visible, hidden, torch.zeros(layer.in_features, dtype=layer.weight.dtype, requires_grad=True)
        )
        visible = Unit.LOGISTIC if hidden is Unit.LOGISTIC else Unit.LINEAR


def _unit_after(model: nn.Sequential, layer: nn.Linear) -> Unit:
    following = next((b for a, b in pairwise(model) if a is layer), None)
    if isinstance(following, nn.Sigmoid):
        return Unit.LOGISTIC
    return Unit.RECTIFIER if isinstance(following, nn.ReLU) else Unit.LINEAR


@torch.no_grad()
def _unroll(model: nn.Sequential, number: int, layer: Layer) -> None:
    """The decoder's mirror of encoder layer `number` takes its transposed weights and visible biases."""
    if isinstance(model, Autoencoder):
        mirror = list(weight_layers(model))[-number]
        mirror.weight.copy_(layer.linear.weight.T)
        mirror.bias.copy_(layer.visible_bias)


Train = Callable[[Tensor, int], Tensor]
"""One update from a batch in an epoch; returns the reconstruction."""


def _epoch(train: Train, x: Tensor, epoch: int, settings: PretrainingSettings, generator: torch.Generator) -> float:
    total = 0.0
    for rows in torch.randperm(len(x), generator=generator).split(settings.batch_size):
        batch = x[rows]
        total += (train(batch, epoch) - batch).square().sum().item()
    return total / len(x)


@torch.no_grad()
def _start(layer: Layer, deviation: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's parameters W, b, c, drawn anew: weights ~ N(0, deviation²), biases 0."""
    W, b = layer.linear.weight, layer.linear.bias
    W.copy_(deviation * torch.randn(W.shape, generator=generator))
    b.zero_()
    return W, b, layer.visible_bias


def _denoising(layer: Layer, settings: PretrainingSettings, generator: torch.Generator) -> Train:
    """x̂ from a corrupted x: cross-entropy for logistic visible units, ½‖x - x̂‖² for linear ones, summed over units."""
    W, b, c = _start(layer, math.sqrt(2.0 / sum(layer.linear.weight.shape)), generator)
    adam = torch.optim.Adam([W, b, c], lr=settings.learning_rate or 0.001)

    def train(x: Tensor, epoch: int) -> Tensor:
        keep = torch.empty_like(x).bernoulli_(1.0 - settings.corruption, generator=generator)
        z = layer.reconstruction(layer.hidden.mean(layer.linear(x * keep)))
        if layer.visible is Unit.LOGISTIC:
            loss = binary_cross_entropy_with_logits(z, x, reduction="sum") / len(x)
        else:
            loss = 0.5 * (z - x).square().sum() / len(x)
        adam.zero_grad()
        loss.backward()
        adam.step()
        return layer.visible.mean(z.detach())

    return train


def _rbm(layer: Layer, settings: PretrainingSettings, generator: torch.Generator) -> Train:
    """CD-1: Δ ∝ ⟨h v'⟩ of the data minus that of the reconstruction; momentum 0.5, then 0.9 from the sixth epoch on."""
    W, b, c = _start(layer, 0.1 if layer.bounded else 0.01, generator)
    rate = settings.learning_rate or (0.1 if layer.bounded else 0.001)
    groups: list[dict[str, Any]] = [{"params": [W], "weight_decay": 2e-4}, {"params": [b, c]}]
    sgd = torch.optim.SGD(groups, lr=rate, momentum=0.5)

    @torch.no_grad()
    def train(v0: Tensor, epoch: int) -> Tensor:
        z0 = layer.linear(v0)
        h0 = layer.hidden.mean(z0)
        v1 = layer.visible.mean(layer.reconstruction(layer.hidden.sample(z0, generator)))
        h1 = layer.hidden.mean(layer.linear(v1))
        W.grad = (h1.T @ v1 - h0.T @ v0) / len(v0)
        b.grad = (h1 - h0).mean(0)
        c.grad = (v1 - v0).mean(0)
        for group in sgd.param_groups:
            group["momentum"] = 0.5 if epoch < 5 else 0.9
        sgd.step()
        return v1

    return train


_METHODS: dict[str, Callable[[Layer, PretrainingSettings, torch.Generator], Train]] = {
    "denoising": _denoising,
    "rbm": _rbm,
}
