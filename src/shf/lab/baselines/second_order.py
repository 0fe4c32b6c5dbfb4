"""The project's own optimizers behind the laboratory's protocol: SHF (the paper) and HF (Martens)."""

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import islice
from typing import Any

from torch import nn

import shf
from shf.data.batches import count_rows
from shf.data.growing import BatchSize
from shf.lab.baselines.protocol import COMMON, Loss, MethodSpec, Settings, State, costs


class SHFMethod:
    """`shf.SHF`. Products are counted by rows: one on a tenth of the batch is a tenth of a pass."""

    def __init__(self, optimizer: shf.SHF) -> None:
        self.optimizer = optimizer

    def step(self, inputs: Any, targets: Any) -> dict[str, float]:
        before = _schedules(self.optimizer)
        info = self.advance(inputs, targets)
        rows, curvature = count_rows(inputs), self.optimizer.config.curvature_batch
        share = 1.0 if curvature is None else min(curvature / rows, 1.0)
        account = costs(gradients=info.gradients, evaluations=info.evaluations, products=share * info.products)
        return {**_report(info), **before, **account}

    def advance(self, inputs: Any, targets: Any) -> shf.StepInfo:
        """The step itself: where several processes take it together, each on its rows."""
        return self.optimizer.step(inputs, targets)

    def next_epoch(self) -> None:
        self.optimizer.next_epoch()

    def state_dict(self) -> State:
        return copy.deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state: State) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(state))


class FastMethod(SHFMethod):
    """`shf.SHF` beyond the paper: judged by the average of its iterates, on batches that grow where `growing` asks for it.

    The batch grows at the end of an epoch, from what the epoch's steps said of their gradients' noise.
    """

    def __init__(self, optimizer: shf.SHF, *, growing: bool = False) -> None:
        super().__init__(optimizer)
        self._growing = growing
        self._size: BatchSize | None = None

    @property
    def batch_size(self) -> int | None:
        """Rows of the next epoch's batches; None to leave them as they are."""
        return self._size.size if self._growing and self._size is not None else None

    def step(self, inputs: Any, targets: Any) -> dict[str, float]:
        report = super().step(inputs, targets)
        rows, noise = count_rows(inputs), report.get("gradient_noise")
        if self._growing:
            size = BatchSize(rows, max(rows, _LARGEST)) if self._size is None else self._size
            self._size = size.hear(noise, rows)
        return report

    def averaged(self) -> AbstractContextManager[None]:
        return self.optimizer.averaged() if self.optimizer.config.averaging else nullcontext()

    def state_dict(self) -> State:
        size = None if self._size is None else asdict(self._size)
        return {"optimizer": super().state_dict(), "batch_size": size}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state["optimizer"])
        self._size = None if state["batch_size"] is None else BatchSize(**state["batch_size"])


_LARGEST = 10_000
"""Rows that batches grow to at most; batches that begin with more stay as they are."""


class HFMethod:
    """`shf.HF`. Unless given one, the curvature batch of step k is batch k of the data, in turn."""

    def __init__(self, optimizer: shf.HF) -> None:
        self.optimizer = optimizer
        self.steps = 0

    def step(self, inputs: Iterable[tuple[Any, Any]], targets: Any = None) -> dict[str, float]:
        before, count = _schedules(self.optimizer), sum(1 for _ in inputs)
        curvature = next(islice(inputs, self.steps % count, None)) if targets is None and count else targets
        info = self.optimizer.step(inputs, curvature)
        self.steps += 1
        account = costs(gradients=count * info.gradients, evaluations=count * info.evaluations, products=info.products)
        return {**_report(info), **before, **account}

    def next_epoch(self) -> None:
        self.optimizer.next_epoch()

    def state_dict(self) -> State:
        return copy.deepcopy({"optimizer": self.optimizer.state_dict(), "steps": self.steps})

    def load_state_dict(self, state: State) -> None:
        state = copy.deepcopy(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def _schedules(optimizer: shf.SHF | shf.HF) -> dict[str, float]:
    """γ and β as the next step will use them."""
    return {"cg_decay": optimizer.cg_decay, "update_scale": optimizer.update_scale}


def _report(info: shf.StepInfo) -> dict[str, float]:
    """What a step tells, in numbers under the laboratory's names."""
    names = ("loss_after", "gradient_norm", "reduction_ratio", "damping", "step_size", "chosen_iterate", "cg_steps")
    noise = {} if info.gradient_noise is None else {"gradient_noise": info.gradient_noise}
    return {
        **noise,
        "objective": info.loss_before,
        **{name: float(getattr(info, name)) for name in names},
        "accepted": float(info.accepted),
        **({} if info.skipped is None else {"skipped": 1.0}),
    }


def _fast(model: nn.Module, loss: Loss, settings: Settings) -> FastMethod:
    own, growing = {name: value for name, value in settings.items() if name != "growing"}, settings["growing"]
    if not isinstance(growing, bool):
        raise ValueError(f"fast(growing={growing!r}): must be True or False")
    return FastMethod(shf.SHF(model, loss, **own), growing=growing)


def _defaults(config: type[shf.Config]) -> dict[str, Any]:
    return {**config.defaults(), **COMMON}


SPECS: tuple[MethodSpec, ...] = (
    MethodSpec(
        "shf",
        "stochastic Hessian-free optimization (the paper's)",
        lambda model, loss, settings: SHFMethod(shf.SHF(model, loss, **settings)),
        _defaults(shf.Config),
        checks_itself=True,
    ),
    MethodSpec(
        "fast",
        "SHF beyond the paper (shf.presets.fast)",
        _fast,
        {**_defaults(shf.Config), **shf.presets.fast, "growing": True},
        batch=500,
        checks_itself=True,
    ),
    MethodSpec(
        "hf",
        "Hessian-free optimization (Martens), full batch",
        lambda model, loss, settings: HFMethod(shf.HF(model, loss, **settings)),
        _defaults(shf.HFConfig),
        reads_batches=True,
        checks_itself=True,
    ),
)
