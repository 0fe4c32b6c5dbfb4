"""Methods of other packages (the extra `opponents`): SOAP, Shampoo, and two that need no learning rate."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shf.lab.baselines.objective import TrainingObjective
from shf.lab.baselines.protocol import MethodSpec, Settings
from shf.lab.baselines.torch_methods import MATRIX_BATCH, Make, TorchMethod, rated
from shf.lab.experiments import ExperimentError


class ScheduleFreeMethod(TorchMethod):
    """An optimizer whose parameters are its average for evaluation, and another point for training."""

    def __init__(self, objective: TrainingObjective, optimizers: Sequence[Any]) -> None:
        super().__init__(objective, optimizers)
        for optimizer in optimizers:
            optimizer.train()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        for optimizer in self.optimizers:
            optimizer.eval()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for optimizer in self.optimizers:
                optimizer.train()  # type: ignore[attr-defined]


def _borrowed(distribution: str, name: str, **options: str | float) -> Make:
    """A class of a package: its learning rate, and other options, either a number or the name of a setting."""

    def make(parameters: Any, settings: Settings) -> list[torch.optim.Optimizer]:
        package = distribution.replace("-", "_")
        try:
            optimizer = getattr(importlib.import_module(package), name)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            words = f"{name} is in the package {distribution}: pip install '.[lab,opponents]' in a clone"
            raise ExperimentError(words) from error
        given = {option: settings[v] if isinstance(v, str) else v for option, v in options.items()}
        return [optimizer(parameters, lr=settings["learning_rate"], **given)]

    return make


SPECS: tuple[MethodSpec, ...] = (
    rated(
        "soap",
        "SOAP (Vyas et al.): Adam in Shampoo's eigenbasis",
        _borrowed("pytorch-optimizer", "SOAP", weight_decay=0.0, precondition_frequency="factor_every"),
        0.003,
        (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003),
        batch=MATRIX_BATCH,
        factor_every=10,
    ),
    rated(  # without momentum: what this package calls so adds preconditioned gradients to raw ones
        "shampoo",
        "Shampoo (Gupta et al.)",
        _borrowed("pytorch-optimizer", "Shampoo", preconditioning_compute_steps="factor_every"),
        0.1,
        (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
        batch=MATRIX_BATCH,
        factor_every=20,
    ),
    rated(
        "prodigy",
        "Prodigy (Mishchenko & Defazio): Adam that finds its rate",
        _borrowed("prodigyopt", "Prodigy", d0="first_rate"),
        1.0,
        first_rate=1e-6,
    ),
    rated(
        "schedule-free",
        "Schedule-Free AdamW (Defazio et al.) at its default rate",
        _borrowed("schedulefree", "AdamWScheduleFree"),
        0.0025,
        method=ScheduleFreeMethod,
    ),
)
