"""Methods that torch already has: SGD with momentum schedules, Adagrad, Adam, Muon, L-BFGS."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shf.lab.baselines.objective import OnObjective, TrainingObjective
from shf.lab.baselines.protocol import COMMON, Loss, MethodSpec, Settings, State, costs
from shf.lab.experiments import ExperimentError

Schedule = Callable[[int], Mapping[str, float]]
"""From the number of updates made to the options that the optimizer's groups have in the next one."""


def constant(_: int) -> Mapping[str, float]:
    """No schedule."""
    return {}


class TorchMethod(OnObjective):
    """One or more torch optimizers that share a gradient, each with some of the parameters."""

    remembered = ("updates",)

    def __init__(
        self, objective: TrainingObjective, optimizers: Sequence[torch.optim.Optimizer], schedule: Schedule = constant
    ) -> None:
        super().__init__(objective)
        self.optimizers, self.schedule = list(optimizers), schedule
        self.updates = 0

    def step(self, inputs: Any, targets: Any) -> dict[str, float]:
        f = self.objective.backward(inputs, targets)
        options = self.schedule(self.updates)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update(options)
            optimizer.step()
            optimizer.zero_grad()
        self.updates += 1
        return {"objective": f, **options, **costs(gradients=1)}

    def state_dict(self) -> State:
        optimizers = copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers])
        return {**super().state_dict(), "optimizers": optimizers}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        for optimizer, its in zip(self.optimizers, copy.deepcopy(state["optimizers"]), strict=True):
            optimizer.load_state_dict(its)


class LBFGSMethod(OnObjective):
    """Full-batch L-BFGS with a strong Wolfe line search; one step is `iterations` iterations on all batches.

    With dropout, one set of masks is drawn per step, so that the line search sees one function. The end of a step and the
    beginning of the next evaluate the same point unless masks changed, hence several iterations per step.
    """

    def __init__(self, objective: TrainingObjective, *, iterations: int, history: int) -> None:
        super().__init__(objective)
        self.optimizer = torch.optim.LBFGS(
            objective.parameters, max_iter=iterations, history_size=history, line_search_fn="strong_wolfe"
        )

    def step(self, inputs: Iterable[tuple[Any, Any]], targets: Any = None) -> dict[str, float]:
        passes, batches = 0, 0

        def closure() -> float:
            nonlocal passes, batches
            f, gradients, batches = self.objective.gradient_over(inputs, replay=passes > 0)
            passes += 1
            for p, g in zip(self.objective.parameters, gradients, strict=True):
                p.grad = g
            return f

        f = float(self.optimizer.step(closure))
        self.optimizer.zero_grad()
        return {"objective": f, **costs(gradients=passes * batches)}

    def state_dict(self) -> State:
        return {**super().state_dict(), "optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def momentum_schedule(t: int, maximum: float, *, final_from: float = math.inf) -> float:
    """Sutskever et al. 2013: μ_t = min(1 - 2^(-1 - log2(⌊t/250⌋ + 1)), μ_max), and at most 0.9 near the end.

    Args:
        t: updates made so far.
        maximum: μ_max.
        final_from: the update from which μ is reduced.
    """
    mu: float = min(1.0 - 2.0 ** (-1.0 - math.log2(t // 250 + 1)), maximum)
    return min(mu, 0.9) if t >= final_from else mu


_RATES = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
BATCH, MATRIX_BATCH = 200, 500
"""Rows that a method wants: a larger batch where most of a step is work on matrices, whatever the batch."""

Make = Callable[[Any, Settings], Sequence[torch.optim.Optimizer]]
"""From parameters and settings to optimizers that share them."""


def rated(
    name: str,
    summary: str,
    make: Make,
    rate: float,
    rates: tuple[float, ...] = (),
    *,
    batch: int = BATCH,
    initialisation: str | None = None,
    method: type[TorchMethod] = TorchMethod,
    **settings: float,
) -> MethodSpec:
    """A method with a learning rate, and with the rates that tuning tries."""

    def factory(model: nn.Module, loss: Loss, chosen: Settings) -> TorchMethod:
        objective = TrainingObjective.of(model, loss, chosen)
        return method(objective, make(objective.parameters, chosen))

    defaults = {"learning_rate": rate, **settings, **COMMON}
    grid = {"learning_rate": rates} if rates else {}
    return MethodSpec(name, summary, factory, defaults, grid, batch, initialisation=initialisation)


def _simple(optimizer: Callable[..., torch.optim.Optimizer]) -> Make:
    """An optimizer of torch whose learning rate is all there is to set."""
    return lambda parameters, settings: [optimizer(parameters, lr=settings["learning_rate"])]


def _muon(parameters: Sequence[Tensor], settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and AdamW for the rest; updates of equal RMS, so one learning rate serves both."""
    if not hasattr(torch.optim, "Muon"):
        raise ExperimentError(f"torch {torch.__version__} has no torch.optim.Muon: it needs torch 2.9 or newer")
    rate = settings["learning_rate"]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices := [p for p in parameters if p.ndim == 2]:
        optimizers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    if others := [p for p in parameters if p.ndim != 2]:
        optimizers.append(torch.optim.AdamW(others, lr=rate, weight_decay=0.0))
    return optimizers


def _momentum(
    name: str, summary: str, maximum: float, *, nesterov: bool = False, grid: Settings = MappingProxyType({})
) -> MethodSpec:
    """SGD with momentum μ_t. With Nesterov's, torch's parameters are the look-ahead point θ + μv of the paper."""

    def factory(model: nn.Module, loss: Loss, settings: Settings) -> TorchMethod:
        objective = TrainingObjective.of(model, loss, settings)
        total, last = settings["total_updates"], settings["final_updates"]
        final_from = math.inf if total is None else total - min(last, total // 10)  # at most the last tenth of a run

        def schedule(t: int) -> Mapping[str, float]:
            return {"momentum": momentum_schedule(t, settings["max_momentum"], final_from=final_from)}

        rate, first = settings["learning_rate"], schedule(0)["momentum"]
        sgd = torch.optim.SGD(objective.parameters, lr=rate, momentum=first, nesterov=nesterov)
        return TorchMethod(objective, [sgd], schedule)

    defaults = {"learning_rate": 0.01, "max_momentum": maximum, "total_updates": None, "final_updates": 1000, **COMMON}
    return MethodSpec(name, summary, factory, defaults, {"learning_rate": _RATES, **grid}, BATCH)


def _lbfgs(model: nn.Module, loss: Loss, settings: Settings) -> LBFGSMethod:
    objective = TrainingObjective.of(model, loss, settings)
    return LBFGSMethod(objective, iterations=settings["iterations"], history=settings["history"])


SPECS: tuple[MethodSpec, ...] = (
    _momentum(
        "nag",
        "Nesterov's accelerated gradient, momentum schedule of Sutskever et al.",
        0.99,
        nesterov=True,
        grid={"max_momentum": (0.99, 0.999)},
    ),
    _momentum("momentum-0.99", "SGD with classical momentum rising to 0.99", 0.99),
    _momentum("momentum-0.9", "SGD with classical momentum rising to 0.9", 0.9),
    rated("sgd", "plain stochastic gradient descent", _simple(torch.optim.SGD), 0.01, _RATES),
    rated(
        "sgd-vi",
        "SGD from the normalised initialisation",
        _simple(torch.optim.SGD),
        0.01,
        _RATES,
        initialisation="normalised",
    ),
    rated("adagrad", "Adagrad (Duchi et al.)", _simple(torch.optim.Adagrad), 0.01, _RATES[1:-1]),
    rated("adam", "Adam (Kingma & Ba)", _simple(torch.optim.Adam), 0.001, (*_RATES[3:], 0.0001)),
    rated("muon", "Muon for matrices, AdamW for biases", _muon, 0.003, _RATES[3:], batch=MATRIX_BATCH),
    MethodSpec(
        "lbfgs",
        "full-batch L-BFGS, strong Wolfe line search",
        _lbfgs,
        {"iterations": 10, "history": 20, **COMMON},
        reads_batches=True,
    ),
)
