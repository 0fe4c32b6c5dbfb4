"""Methods of other packages (the extra `opponents`): SOAP, Shampoo, and two that need no learning rate."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shf.lab.baselines.objective import Objective
from shf.lab.baselines.protocol import COMMON, Loss, MethodSpec, Settings
from shf.lab.baselines.torch_methods import BATCH, MATRIX_BATCH, TorchMethod
from shf.lab.experiments import ExperimentError

Build = Callable[[Any, Settings], torch.optim.Optimizer]
"""From parameters and settings to an optimizer."""


class ScheduleFreeMethod(TorchMethod):
    """An optimizer whose parameters are its average for evaluation, and another point for training."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        for optimizer in self.optimizers:
            optimizer.eval()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for optimizer in self.optimizers:
                optimizer.train()  # type: ignore[attr-defined]


def _class(package: str, distribution: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(package), name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        words = f"{name} is in the package {distribution}: pip install '.[lab,opponents]' in a clone"
        raise ExperimentError(words) from error


def _soap(parameters: Any, settings: Settings) -> torch.optim.Optimizer:
    optimizer = _class("pytorch_optimizer", "pytorch-optimizer", "SOAP")
    every = settings["factor_every"]
    return optimizer(parameters, lr=settings["learning_rate"], weight_decay=0.0, precondition_frequency=every)  # type: ignore[no-any-return]


def _shampoo(parameters: Any, settings: Settings) -> torch.optim.Optimizer:
    """Without momentum: what this package calls so adds preconditioned gradients to raw ones."""
    optimizer = _class("pytorch_optimizer", "pytorch-optimizer", "Shampoo")
    every = settings["factor_every"]
    return optimizer(parameters, lr=settings["learning_rate"], preconditioning_compute_steps=every)  # type: ignore[no-any-return]


def _prodigy(parameters: Any, settings: Settings) -> torch.optim.Optimizer:
    optimizer = _class("prodigyopt", "prodigyopt", "Prodigy")
    return optimizer(parameters, lr=settings["learning_rate"], d0=settings["first_rate"])  # type: ignore[no-any-return]


def _schedule_free(parameters: Any, settings: Settings) -> torch.optim.Optimizer:
    optimizer = _class("schedulefree", "schedulefree", "AdamWScheduleFree")(parameters, lr=settings["learning_rate"])
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _spec(
    name: str,
    summary: str,
    build: Build,
    rate: float,
    *,
    rates: tuple[float, ...] = (),
    batch: int = BATCH,
    method: type[TorchMethod] = TorchMethod,
    **settings: float,
) -> MethodSpec:
    def factory(model: nn.Module, loss: Loss, chosen: Settings) -> TorchMethod:
        objective = Objective.of(model, loss, chosen)
        return method(objective, [build(objective.parameters, chosen)])

    defaults = {"learning_rate": rate, **settings, **COMMON}
    return MethodSpec(name, summary, factory, defaults, {"learning_rate": rates} if rates else {}, batch)


SPECS: tuple[MethodSpec, ...] = (
    _spec(
        "soap",
        "SOAP (Vyas et al.): Adam in Shampoo's eigenbasis",
        _soap,
        0.003,
        rates=(0.1, 0.03, 0.01, 0.003, 0.001, 0.0003),
        batch=MATRIX_BATCH,
        factor_every=10,
    ),
    _spec(
        "shampoo",
        "Shampoo (Gupta et al.)",
        _shampoo,
        0.1,
        rates=(1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
        batch=MATRIX_BATCH,
        factor_every=20,
    ),
    _spec("prodigy", "Prodigy (Mishchenko & Defazio): Adam that finds its rate", _prodigy, 1.0, first_rate=1e-6),
    _spec(
        "schedule-free",
        "Schedule-Free AdamW (Defazio et al.) at its default rate",
        _schedule_free,
        0.0025,
        method=ScheduleFreeMethod,
    ),
)
