"""A toy problem for the methods of the laboratory: three noisy classes, a small rectifier network, a few batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shf.lab.baselines import METHODS, Method, MethodSpec
from shf.lab.initialisation import initialise_
from shf.lab.models import classifier

LOSS = nn.CrossEntropyLoss()
# Few cases, few steps: methods whose defaults are meant for long runs get settings for short ones.
QUICK: dict[str, dict[str, Any]] = {
    "adam": {"learning_rate": 0.01},
    "sgd": {"learning_rate": 0.1},
    "sgd-vi": {"learning_rate": 0.1},
    "dropout-sgd-all": {"learning_rate": 1.0},
    "dropout-sgd-last": {"learning_rate": 1.0},
    "vsgd": {"first_samples": 2},
    "hf": {"cg_iterations": 20},
    "ksd": {"dimensions": 5, "bfgs_iterations": 5},
    "lbfgs": {"iterations": 2},
    "prodigy": {"first_rate": 1e-3},
    "schedule-free": {"learning_rate": 0.03},
    "soap": {"learning_rate": 0.03},
    "shampoo": {"learning_rate": 0.1, "factor_every": 2},
}


def blobs(rows: int = 90, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three noisy classes in six dimensions."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(rows) % 3
    centres = 2 * torch.randn(3, 6, generator=generator)
    return centres[targets] + torch.randn(rows, 6, generator=generator), targets


def network(*, dropout: float = 0.0, sparse_input: bool = False) -> nn.Sequential:
    model = classifier((6, 8, 8, 3), input_dropout=dropout, hidden_dropout=dropout, sparse_input=sparse_input)
    initialise_(model, "normalised", generator=torch.Generator().manual_seed(1), bias=0.1)
    return model


def build(name: str, model: nn.Module, **settings: Any) -> Method:
    return METHODS[name].build(model, LOSS, {**QUICK.get(name, {}), **settings})


Step = Callable[[Method, int], dict[str, float]]


def stepper(spec: MethodSpec, inputs: Tensor, targets: Tensor, size: int = 30) -> Step:
    """Step k of a method: on batch k mod n, or on all batches where it wants them."""
    dense = inputs.layout == torch.strided
    parts = [slice(i, i + size) for i in range(0, len(targets), size)]
    rows = inputs if dense else inputs.to_dense()
    batches = [(rows[p] if dense else rows[p].to_sparse_csr(), targets[p]) for p in parts]

    def step(method: Method, k: int) -> dict[str, float]:
        if spec.reads_batches:
            return method.step(batches, None)
        return method.step(*batches[k % len(batches)])

    return step


def objective(model: nn.Module, inputs: Tensor, targets: Tensor, weight_decay: float = 0.0) -> float:
    with torch.no_grad():
        penalty = sum(p.square().sum().item() for p in model.parameters() if p.ndim >= 2)
        return LOSS(model(inputs), targets).item() + 0.5 * weight_decay * penalty


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
