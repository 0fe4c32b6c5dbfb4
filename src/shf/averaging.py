"""The running average of the iterates, for evaluation. Beyond the paper; off by default.

Late in training the iterates move around a point more than towards it; their average is nearer to it than they are. Early,
or where batches agree, it only lags behind. With "auto" new batches say which of the two it is, and more: where the average
fits them much better, steps go farther than what their batches know, and are made shorter.
"""

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shf.component import Component, number, option
from shf.local import Local
from shf.runtime.interrupts import deferred_interrupts, no_interrupts
from shf.state import OptimizerState, recall, remember

AVERAGE, GAIN, SHARE = "average", "average_gain", "step_share"
"""Their names in the optimizer's state: the average, its gain on new batches, and the share of an update that is made."""
_EVERY, _NEWEST = 10, 0.3
"""Steps from one look at the average to the next, and a look's share in what the average is taken to gain."""
_MUCH, _SHORTER, _LEAST = 0.05, 0.8, 0.05
"""A gain that says that steps are too long; how much shorter they become, or longer where it is less; their least share."""


@dataclass(frozen=True, kw_only=True)
class Averaging(Component):
    """A running average of θ, parameter by parameter."""

    decay: float | str = option(
        0.0,
        number(least=0.0, below=1.0, words=("auto",)),
        """the share of the running average of the iterates that a step keeps; 0 for no average. `SHF.averaged` puts the
        average in the parameters' place, for evaluation. "auto" averages over about the last ninth of all steps, leaves the
        iterates in place while they do better on new batches, and shortens steps while they do much worse.""",
        name="averaging",
    )

    @property
    def tensors(self) -> tuple[str, ...]:
        return (AVERAGE,) if self.decay else ()

    @property
    def numbers(self) -> tuple[str, ...]:
        return (GAIN, SHARE) if self.decay == "auto" else ()

    def update(self, theta: Tensor, here: Local) -> int:
        """average ← d · average + (1 - d) · θ with d = min(decay, (k + 1)/(k + 10)) after step k = 0, 1, …: early iterates
        are soon forgotten. A parameter that is new begins with itself.

        Returns:
            How many evaluations it took: with "auto" one in every tenth step, at the average before the step, on a batch
            that neither it nor the step's θ have seen.
        """
        if not self.decay:
            return 0
        memory = here.memory
        k, averages = memory.numbers["iteration"], memory.pieces(AVERAGE)
        looks = self.decay == "auto" and k % _EVERY == _EVERY - 1
        if looks:
            self._listen(averages, here)
        keep = (k + 1) / (k + 10) if isinstance(self.decay, str) else min(self.decay, (k + 1) / (k + 10))
        memory.keep_pieces(
            AVERAGE,
            [
                value.clone() if old is None else torch.lerp(value, old, keep)
                for value, old in zip(memory.network.shapes.split(theta), averages, strict=True)
            ],
        )
        return int(looks)

    def _listen(self, averages: Sequence[Tensor | None], here: Local) -> None:
        """What a new batch says of the average, and so of the length of steps."""
        memory = here.memory
        pairs = zip(averages, memory.network.parameters, strict=True)
        gain = _relative_gain(here, torch.cat([(p.detach() if a is None else a).reshape(-1) for a, p in pairs]))
        seen, share = memory.number(GAIN, 0.0), memory.number(SHARE, 1.0)
        share = max(share * _SHORTER, _LEAST) if gain > _MUCH else min(share / _SHORTER, 1.0)
        memory.keep(**{GAIN: seen + _NEWEST * (gain - seen), SHARE: share})

    def share(self, numbers: Mapping[str, Any]) -> float:
        """Of each update, that is made."""
        return float(numbers.get(SHARE, 1.0)) if self.decay == "auto" else 1.0

    def serves(self, numbers: Mapping[str, Any]) -> bool:
        """Whether the average is to stand in the parameters' place where one is asked for."""
        return bool(self.decay) and (self.decay != "auto" or numbers.get(GAIN, 0.0) > 0)


def _relative_gain(here: Local, average: Tensor) -> float:
    """What f gains on this batch at the average, in shares of f; -1 where it is not finite there."""
    value = here.at(here.own(average))
    size = abs(here.value) + abs(value)
    return ((here.value - value) / size if size else 0.0) if math.isfinite(value) else -1.0


def exchange_(parameters: Iterator[Tensor], state: OptimizerState, group: MutableMapping[str, Any]) -> None:
    """Each parameter and its average change places; which is where is noted in the group's numbers."""
    numbers = {**group["shf"], "averaged": not group["shf"].get("averaged")}
    with torch.no_grad(), deferred_interrupts(), no_interrupts():
        for p in parameters:
            if (average := recall(state, p, AVERAGE)) is not None:
                remember(state, p, **{AVERAGE: p.detach().clone()})
                p.copy_(average)
        group["shf"] = numbers if numbers["averaged"] else {k: v for k, v in numbers.items() if k != "averaged"}


@contextmanager
def swapped(parameters: Iterator[Tensor], state: OptimizerState) -> Iterator[None]:
    """Inside, the parameters that have an average are it; outside, whatever happened inside, they are themselves."""
    averages = [(p, recall(state, p, AVERAGE)) for p in parameters]
    held = [(p, p.detach().clone(), average) for p, average in averages if average is not None]
    try:
        with torch.no_grad():
            for p, _, average in held:
                p.copy_(average)
        yield
    finally:
        with torch.no_grad():
            for p, own, _ in held:
                p.copy_(own)
