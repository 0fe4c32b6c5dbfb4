"""Methods that torch already has: SGD with momentum schedules, Adagrad, Adam, Muon, L-BFGS."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shf.lab.baselines.objective import Objective
from shf.lab.baselines.protocol import COMMON, Loss, MethodSpec, Settings, State, costs
from shf.lab.experiments import ExperimentError

Schedule = Callable[[int], Mapping[str, float]]
"""From the number of updates made to the options that the optimizer's groups have in the next one."""


def constant(_: int) -> Mapping[str, float]:
    """No schedule."""
    return {}


class TorchMethod:
    """One or more torch optimizers that share a gradient.

    Args:
        objective: what is minimised.
        optimizers: each owns some of the parameters.
        schedule: options of their groups by the number of updates.
    """

    def __init__(
        self, objective: Objective, optimizers: Sequence[torch.optim.Optimizer], schedule: Schedule = constant
    ) -> None:
        self.objective, self.optimizers, self.schedule = objective, list(optimizers), schedule
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

    def next_epoch(self) -> None:
        """Nothing here goes by epochs."""

    def state_dict(self) -> State:
        return copy.deepcopy(
            {
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "updates": self.updates,
                "stream": self.objective.stream,
            }
        )

    def load_state_dict(self, state: State) -> None:
        state = copy.deepcopy(state)
        for optimizer, its in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(its)
        self.updates, self.objective.stream = state["updates"], state["stream"]


class LBFGSMethod:
    """Full-batch L-BFGS with a strong Wolfe line search; one step is `iterations` iterations on all batches.

    With dropout, one set of masks is drawn per step, so that the line search sees one function. The end of a step and the
    beginning of the next evaluate the same point unless masks changed, hence several iterations per step.
    """

    def __init__(self, objective: Objective, *, iterations: int, history: int) -> None:
        self.objective = objective
        self.optimizer = torch.optim.LBFGS(
            objective.parameters, max_iter=iterations, history_size=history, line_search_fn="strong_wolfe"
        )

    def step(self, inputs: Iterable[tuple[Any, Any]], targets: Any = None) -> dict[str, float]:
        first, passes, batches = True, 0, 0

        def closure() -> float:
            nonlocal first, passes, batches
            f, gradients, batches = self.objective.gradient_over(inputs, replay=not first)
            first, passes = False, passes + 1
            for p, g in zip(self.objective.parameters, gradients, strict=True):
                p.grad = g
            return f

        f = float(self.optimizer.step(closure))
        self.optimizer.zero_grad()
        return {"objective": f, **costs(gradients=passes * batches)}

    def next_epoch(self) -> None:
        """Nothing here goes by epochs."""

    def state_dict(self) -> State:
        return copy.deepcopy({"optimizer": self.optimizer.state_dict(), "stream": self.objective.stream})

    def load_state_dict(self, state: State) -> None:
        state = copy.deepcopy(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.objective.stream = state["stream"]


def momentum_schedule(t: int, maximum: float, *, final: float = 0.9, final_from: float = math.inf) -> float:
    """Sutskever et al. 2013: μ_t = min(1 - 2^(-1 - log2(⌊t/250⌋ + 1)), μ_max), and at most `final` near the end.

    Args:
        t: updates made so far.
        maximum: μ_max.
        final: what μ is reduced to.
        final_from: the update from which it is.
    """
    mu: float = min(1.0 - 2.0 ** (-1.0 - math.log2(t // 250 + 1)), maximum)
    return min(mu, final) if t >= final_from else mu


def _momentum(nesterov: bool) -> Callable[[nn.Module, Loss, Settings], TorchMethod]:
    """SGD with momentum μ_t. With Nesterov's, torch's parameters are the look-ahead point θ + μv of the paper."""

    def factory(model: nn.Module, loss: Loss, settings: Settings) -> TorchMethod:
        objective = Objective.of(model, loss, settings)
        total, last = settings["total_updates"], settings["final_updates"]
        final_from = math.inf if total is None else total - min(last, total // 10)  # at most the last tenth of a run

        def schedule(t: int) -> Mapping[str, float]:
            return {"momentum": momentum_schedule(t, settings["max_momentum"], final_from=final_from)}

        sgd = torch.optim.SGD(
            objective.parameters, lr=settings["learning_rate"], momentum=schedule(0)["momentum"], nesterov=nesterov
        )
        return TorchMethod(objective, [sgd], schedule)

    return factory


def _simple(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module, Loss, Settings], TorchMethod]:
    """An optimizer of torch whose learning rate is all there is to set."""

    def factory(model: nn.Module, loss: Loss, settings: Settings) -> TorchMethod:
        objective = Objective.of(model, loss, settings)
        return TorchMethod(objective, [optimizer(objective.parameters, lr=settings["learning_rate"])])

    return factory


def _muon(model: nn.Module, loss: Loss, settings: Settings) -> TorchMethod:
    """Muon for the matrices and AdamW for the rest; updates of equal RMS, so one learning rate serves both."""
    if not hasattr(torch.optim, "Muon"):
        raise ExperimentError(f"torch {torch.__version__} has no torch.optim.Muon: it needs torch 2.9 or newer")
    objective = Objective.of(model, loss, settings)
    rate = settings["learning_rate"]
    matrices: list[Tensor] = [p for p in objective.parameters if p.ndim == 2]
    others: list[Tensor] = [p for p in objective.parameters if p.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=rate, weight_decay=0.0))
    return TorchMethod(objective, optimizers)


def _lbfgs(model: nn.Module, loss: Loss, settings: Settings) -> LBFGSMethod:
    return LBFGSMethod(
        Objective.of(model, loss, settings), iterations=settings["iterations"], history=settings["history"]
    )


_RATES = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
BATCH, MATRIX_BATCH = 200, 500
"""Rows that a method wants: a larger batch where most of a step is work on matrices, whatever the batch."""


def _momentum_spec(name: str, summary: str, maximum: float, *, nesterov: bool = False, **rest: Any) -> MethodSpec:
    defaults = {"learning_rate": 0.01, "max_momentum": maximum, "total_updates": None, "final_updates": 1000, **COMMON}
    grid = {"learning_rate": _RATES, **rest.pop("grid", {})}
    return MethodSpec(name, summary, _momentum(nesterov), defaults, grid, BATCH, **rest)


def _simple_spec(
    name: str, summary: str, optimizer: Callable[..., torch.optim.Optimizer], rates: tuple[float, ...], **rest: Any
) -> MethodSpec:
    defaults = {"learning_rate": rest.pop("rate", 0.01), **COMMON}
    return MethodSpec(name, summary, _simple(optimizer), defaults, {"learning_rate": rates}, BATCH, **rest)


SPECS: tuple[MethodSpec, ...] = (
    _momentum_spec(
        "nag",
        "Nesterov's accelerated gradient, momentum schedule of Sutskever et al.",
        0.99,
        nesterov=True,
        grid={"max_momentum": (0.99, 0.999)},
    ),
    _momentum_spec("momentum-0.99", "SGD with classical momentum rising to 0.99", 0.99),
    _momentum_spec("momentum-0.9", "SGD with classical momentum rising to 0.9", 0.9),
    _simple_spec("sgd", "plain stochastic gradient descent", torch.optim.SGD, _RATES),
    _simple_spec(
        "sgd-vi", "SGD from the normalised initialisation", torch.optim.SGD, _RATES, initialisation="normalised"
    ),
    _simple_spec("adagrad", "Adagrad (Duchi et al.)", torch.optim.Adagrad, (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)),
    _simple_spec(
        "adam",
        "Adam (Kingma & Ba)",
        torch.optim.Adam,
        (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
        rate=0.001,
    ),
    MethodSpec(
        "muon",
        "Muon for matrices, AdamW for biases",
        _muon,
        {"learning_rate": 0.003, **COMMON},
        {"learning_rate": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)},
        MATRIX_BATCH,
    ),
    MethodSpec(
        "lbfgs",
        "full-batch L-BFGS, strong Wolfe line search",
        _lbfgs,
        {"iterations": 10, "history": 20, **COMMON},
        reads_batches=True,
    ),
)
