"""A perceptron with one of three losses, trained on a table: exact steps on all rows, or batches where that is too much."""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shf import SHF, GrowingLoader, StepInfo
from shf.errors import FloorWarning
from shf.nn.sparse import SparseLinear

ACTIVATIONS = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
EXACT_SIDE, EXACT_NUMBERS = 2500, 2**27
"""The matrix that an exact step factorises has at most so many rows, and J at most so many numbers (1 GiB): beyond it a
step takes more than some ten seconds of one core."""


@dataclass(frozen=True)
class Table:
    """Rows to train on.

    Attributes:
        inputs: scaled; dense, or sparse CSR.
        targets: numbers, labels' 0 and 1, or numbers of classes.
        weights: of the rows, with mean 1.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor


class Weighted(nn.Module):
    """Σ_i w_i ℓ(z_i, t_i) / n, where targets are (t, w). The w have mean 1."""

    reduction = "mean"

    def forward(self, outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        wanted, weights = targets
        return (weights * self.each(outputs, wanted)).mean()

    def each(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """ℓ of every row."""
        raise NotImplementedError


class HalfSquares(Weighted):
    """ℓ = ½‖z - t‖²."""

    def each(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return 0.5 * (outputs - wanted).square().sum(1)


class Logistic(Weighted):
    """ℓ = Σ_k of the cross-entropies of independent labels."""

    def each(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none").sum(1)


class Softmax(Weighted):
    """ℓ = the cross-entropy of one class among several."""

    def each(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(outputs, wanted, reduction="none")


def build(sizes: Sequence[int], activation: str, source: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Glorot's uniform weights (inputs, outputs), and intercepts of zero."""
    pairs = []
    for before, after in pairwise(sizes):
        bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (before + after))
        weight = torch.empty(before, after, dtype=torch.float64).uniform_(-bound, bound, generator=source)
        pairs.append((weight, torch.zeros(after, dtype=torch.float64)))
    return pairs


def network_of(pairs: Sequence[tuple[Tensor, Tensor]], activation: str, *, sparse: bool) -> nn.Sequential:
    """With copies of these weights; its first layer takes CSR batches where asked."""
    layers: list[nn.Module] = []
    for number, (weight, bias) in enumerate(pairs):
        first = sparse and not number
        linear = (SparseLinear if first else nn.Linear)(*weight.shape).double()
        with torch.no_grad():
            linear.weight.copy_(weight if first else weight.t())
            linear.bias.copy_(bias)
        layers += [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def is_exact(rows: int, outputs: int, parameters: int) -> bool:
    """Whether steps by factorisation are affordable, counted."""
    return min(rows * outputs, parameters) <= EXACT_SIDE and rows * outputs * parameters <= EXACT_NUMBERS


class Training:
    """A network, its loss and what moves it.

    Args:
        network: trained in place.
        loss: without the penalty.
        decay: w of ½w‖θ‖², on all parameters.
        seed: of the order of rows.
        settings: of the optimizer.
    """

    def __init__(
        self, network: nn.Sequential, loss: Weighted, decay: float, seed: int, settings: Mapping[str, Any]
    ) -> None:
        self._network = network
        groups = [{"params": list(network.parameters()), "weight_decay": decay}]
        self._optimizer = SHF(network, loss, groups, seed=seed, process_group=None, **settings)

    def step(self, table: Table) -> StepInfo:
        """One step on all rows of a table."""
        with warnings.catch_warnings():  # who uses an estimator cannot follow this advice
            warnings.simplefilter("ignore", FloorWarning)
            return self._optimizer.step(table.inputs, (table.targets, table.weights))

    def iterate(self, table: Table) -> float:
        """One iteration on the whole of it; f as it was last seen."""
        return self.step(table).loss_after

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Matrix (inputs, outputs) and intercepts of every layer, copied; their averages where there are any."""
        with self._optimizer.averaged() if self._optimizer.config.averaging else nullcontext():
            layers = [layer for layer in self._network if isinstance(layer, nn.Linear | SparseLinear)]
            pairs = [(m.weight if isinstance(m, SparseLinear) else m.weight.t(), m.bias) for m in layers]
            return [(weight.detach().clone(), bias.detach().clone()) for weight, bias in pairs]


class BatchTraining(Training):
    """An iteration is an epoch of growing batches."""

    _loader: GrowingLoader | None = None

    def iterate(self, table: Table) -> float:
        tensors, rows, losses = (table.inputs, table.targets, table.weights), len(table.targets), []
        if self._loader is None:
            self._loader = GrowingLoader(tensors, batch_size=min(500, math.ceil(rows / 3)))
        for inputs, targets, weights in self._optimizer.epoch(self._loader):
            info = self.step(Table(inputs, targets, weights))
            self._loader.hear(info)
            losses.append(info.loss_before)
        return sum(losses) / len(losses)
