"""What is measured: the paper's networks at the paper's batch sizes, and three other kinds of network, on random data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

import shf
from shf.lab.baselines.protocol import Loss
from shf.lab.initialisation import initialise_
from shf.lab.models import autoencoder, classifier

_DIRECTIONS = 12
"""Random images of the autoencoders vary along this many directions."""


@dataclass(frozen=True)
class Workload:
    """A model, its loss and one batch."""

    model: nn.Module
    loss: Loss
    inputs: Tensor
    targets: Tensor

    def gradient(self) -> Sequence[Tensor]:
        """∇f as torch computes it: what every cost is compared with."""
        value = self.loss(self.model(self.inputs), self.targets)
        return torch.autograd.grad(value, list(self.model.parameters()))


@dataclass(frozen=True)
class FeedForward:
    """A network of matrix products with the settings of its experiment.

    Attributes:
        sizes: units from inputs to outputs; of an autoencoder, to the code.
        mirrored: whether it is an autoencoder.
        rows: B, the gradient batch.
        curvature_rows: the curvature batch; None for the gradient batch.
        cg_iterations: ζ.
        damping: λ.
        weight_decay: w.
        line_search_steps: ω; 0 where every step must do the same work.
        density: the share of inputs that is not zero; 1 for dense inputs.
        sparse: whether the inputs are a CSR matrix.
    """

    name: str
    sizes: tuple[int, ...]
    mirrored: bool
    rows: int
    curvature_rows: int | None
    cg_iterations: int
    damping: float = 1.0
    weight_decay: float = 0.0
    line_search_steps: int = 60
    density: float = 1.0
    sparse: bool = False

    @property
    def units(self) -> tuple[int, ...]:
        """Units of every layer, the decoder's included."""
        return (*self.sizes, *reversed(self.sizes[:-1])) if self.mirrored else self.sizes

    @property
    def parameters(self) -> int:
        return sum((n_in + 1) * n_out for n_in, n_out in pairwise(self.units))

    def problem(self, seed: int = 0) -> Workload:
        source = torch.Generator().manual_seed(seed)
        model = autoencoder(self.sizes) if self.mirrored else classifier(self.sizes, sparse_input=self.sparse)
        initialise_(model, "sparse", generator=source, bias=0.0 if self.mirrored else 0.1)
        if self.mirrored:
            codes = torch.randn(self.rows, _DIRECTIONS, generator=source)
            images = torch.sigmoid(codes @ torch.randn(_DIRECTIONS, self.sizes[0], generator=source))
            return Workload(model, shf.losses.per_case(nn.BCEWithLogitsLoss()), images, images)
        inputs = torch.randn(self.rows, self.sizes[0], generator=source)
        if self.density < 1:
            inputs *= torch.rand(inputs.shape, generator=source) < self.density
        targets = torch.randint(self.sizes[-1], (self.rows,), generator=source)
        return Workload(model, nn.CrossEntropyLoss(), _to_csr(inputs) if self.sparse else inputs, targets)

    def optimizer(
        self, problem: Workload, *, cg_iterations: int | None = None, microbatch: int | None = None
    ) -> shf.SHF:
        return shf.SHF(
            problem.model,
            problem.loss,
            damping=self.damping,
            cg_iterations=cg_iterations or self.cg_iterations,
            curvature_batch=self.curvature_rows,
            weight_decay=self.weight_decay,
            line_search_steps=self.line_search_steps,
            microbatch=microbatch,
            seed=0,
        )

    def shrunk(self) -> FeedForward:
        """The same kind of network in a size that takes no time: for tests."""
        sizes = tuple(max(2, size // 64) for size in self.sizes)
        rows = None if self.curvature_rows is None else 8
        return replace(self, sizes=sizes, rows=32, curvature_rows=rows, cg_iterations=min(self.cg_iterations, 3))


def _to_csr(matrix: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return matrix.to_sparse_csr()


CURVES = FeedForward("CURVES autoencoder", (784, 400, 200, 100, 50, 25, 6), True, 2000, None, 25, damping=10.0)
MNIST_AUTOENCODER = FeedForward("MNIST autoencoder", (784, 1000, 500, 250, 30), True, 3000, None, 50)
MNIST = FeedForward("MNIST classifier", (784, 1200, 1200, 10), False, 1000, 100, 3, weight_decay=5e-4)
USPS = FeedForward("USPS classifier", (256, 500, 500, 10), False, 1000, 100, 3, weight_decay=5e-4)
REUTERS = FeedForward("Reuters classifier", (18933, 65), False, 1000, 100, 3, weight_decay=5e-4, density=0.0025)

FEED_FORWARD = {"curves": CURVES, "mnist-autoencoder": MNIST_AUTOENCODER, "mnist": MNIST, "usps": USPS}


@dataclass(frozen=True)
class Other:
    """A network that is more than matrix products, for products against gradients only."""

    name: str
    make: Callable[[int, torch.Generator], tuple[nn.Module, Tensor]]
    rows: int
    classes: int = 10

    def problem(self, seed: int = 0) -> Workload:
        source = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, inputs = self.make(self.rows, source)
        targets = torch.randint(self.classes, (self.rows,), generator=source)
        return Workload(model, nn.CrossEntropyLoss(), inputs, targets)

    def shrunk(self) -> Other:
        return replace(self, rows=4)


def _convolutional(rows: int, source: torch.Generator) -> tuple[nn.Module, Tensor]:
    layers = [
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    ]
    return nn.Sequential(*layers), torch.rand(rows, 1, 28, 28, generator=source)


class _Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


def _recurrent(rows: int, source: torch.Generator) -> tuple[nn.Module, Tensor]:
    last_state = _Apply(lambda found: found[0][:, -1])
    model = nn.Sequential(nn.LSTM(28, 128, batch_first=True), last_state, nn.Linear(128, 10))
    return model, torch.rand(rows, 28, 28, generator=source)


def _transformer(rows: int, source: torch.Generator) -> tuple[nn.Module, Tensor]:
    block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.Sequential(block, _Apply(lambda tokens: tokens.mean(1)), nn.Linear(128, 10))
    return model, torch.randn(rows, 32, 128, generator=source)


OTHER: dict[str, Other] = {
    "cnn": Other("small CNN", _convolutional, 256),
    "lstm": Other("LSTM", _recurrent, 128),
    "transformer": Other("transformer block", _transformer, 64),
}

PRODUCTS: dict[str, FeedForward | Other] = {**FEED_FORWARD, **OTHER}
"""All networks whose products are measured against their gradients."""
