"""The laboratory's one training loop: steps that are timed, until it is enough or training has diverged.

The runner, the search for settings and the contests train in it. What they do between two steps, such as evaluating, does
not count.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shf import NonFiniteError
from shf.lab.clock import Clock

Report = Mapping[str, Any]


@dataclass
class Spent:
    """What training has taken so far: seconds and steps."""

    elapsed: float = 0.0
    iteration: int = 0


@dataclass
class Loop:
    """Takes steps. One that meets numbers that are not finite is the last: `diverged` is then the method's error, or ""
    where it reported such an objective."""

    step: Callable[[], Report]
    clock: Clock
    spent: Spent = field(default_factory=Spent)
    diverged: str | None = None

    def until(self, enough: Callable[[Spent], bool]) -> Iterator[Report]:
        """What the steps report, one by one."""
        while self.diverged is None and not enough(self.spent):
            started = self.clock()
            try:
                report = self.step()
            except NonFiniteError as error:
                self.diverged = str(error)
                return
            self.spent.elapsed += self.clock() - started
            self.spent.iteration += 1
            if not math.isfinite(report.get("objective", 0.0)) and not report.get("skipped"):
                self.diverged = ""
            yield report


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the network is in evaluation mode, and no gradients are taken."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def judged(method: Any) -> AbstractContextManager[None]:
    """Inside, the network is what a method would have judged: for one that averages its iterates, the average."""
    context: AbstractContextManager[None] = getattr(method, "averaged", nullcontext)()
    return context
