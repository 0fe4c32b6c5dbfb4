"""The running average of the iterates, for evaluation. Beyond the paper; off by default.

Late in training the iterates move around a point more than towards it; their average is nearer to it than they are.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shf.component import Component, number, option
from shf.runtime.interrupts import deferred_interrupts, no_interrupts
from shf.state import Memory, OptimizerState, recall, remember

AVERAGE = "average"
"""Its name in the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class Averaging(Component):
    """A running average of θ, parameter by parameter."""

    decay: float = option(
        0.0,
        number(least=0.0, below=1.0),
        """the share of the running average of the iterates that a step keeps; 0 for no average. `SHF.averaged` puts the
        average in the parameters' place, for evaluation.""",
        name="averaging",
    )

    @property
    def tensors(self) -> tuple[str, ...]:
        return (AVERAGE,) if self.decay else ()

    def update(self, theta: Tensor, memory: Memory) -> None:
        """average ← d · average + (1 - d) · θ with d = min(decay, (k + 1)/(k + 10)) after step k = 0, 1, …: early iterates
        are soon forgotten. A parameter that is new begins with itself."""
        if not self.decay:
            return
        k = memory.numbers["iteration"]
        keep = min(self.decay, (k + 1) / (k + 10))
        values = memory.network.shapes.split(theta)
        memory.keep_pieces(
            AVERAGE,
            [
                value.clone() if old is None else torch.lerp(value, old, keep)
                for value, old in zip(values, memory.pieces(AVERAGE), strict=True)
            ],
        )


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
