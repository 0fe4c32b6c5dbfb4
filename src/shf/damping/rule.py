"""What a rule for λ is, where λ begins, and its range."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shf.component import Component, number, option
from shf.local import Local
from shf.state import Move

DAMPING_MIN = 1e-15
"""λ's default floor: below it (B + λI) is B to rounding."""
DAMPING_MAX = 1e15
"""λ's default ceiling: above it a step is zero to rounding."""

START, FLOOR = 10.0, 0.01
"""λ at the start and at the least, in mean eigenvalues of B, where the curvature chooses.

B's few large eigenvalues carry the trace and its many small ones the mean, so that λ begins between them: directions of
large curvature are left to CG, the others are damped until ρ has said better. Far below the mean λ damps nothing that
carries a signal; steps then fit the noise of their batch, on which ρ stays near 1 and would let λ sink for ever.
"""
_LOOKS = 10
"""Batches without curvature after which λ is left to ρ alone: the loss has none."""
_FLOOR, _UNSETTLED = "damping_floor", "damping_unsettled"


@dataclass(frozen=True, kw_only=True)
class Damping(Component):
    """A rule for λ. Of a step it sees the beginning (`begin`, `listen`), ρ (`end`), and what came of it (`moved`).

    A rule of one's own is a subclass with `end`; see docs/extending.md.
    """

    initial: float | str = option(
        1.0,
        number(above=0.0, words=("auto",)),
        """initial damping strength [λ], on the scale of the loss: a loss that is k times larger wants a λ that is k times
        larger. "auto" takes it, and a floor for it, from the curvature of the first batch (see [docs/fast.md](fast.md)).
        Or a rule of `shf.damping`.""",
        name="damping",
    )
    least: float = option(DAMPING_MIN, number(above=0.0), "λ's floor.", name="damping_min")
    most: float = option(
        DAMPING_MAX,
        number(above=0.0),
        "λ's ceiling; `StepInfo.damping_bound` says when either is reached.",
        name="damping_max",
    )

    def check(self, say: Callable[[str], str]) -> None:
        if self.most < self.least:
            raise ValueError(f"{say('most')}): must be a number at least {self.least:g}")
        if isinstance(self.initial, float | int) and not self.least <= self.initial <= self.most:
            raise ValueError(f"{say('initial')}): must be between {say('least')} and {say('most')}")

    @property
    def numbers(self) -> tuple[str, ...]:
        return (_FLOOR, _UNSETTLED) if self.initial == "auto" else ()

    def first(self) -> dict[str, Any]:
        """λ before the first step; nan where that is yet to choose it."""
        return {"damping": math.nan if isinstance(self.initial, str) else float(self.initial)}

    def bounds(self, here: Local) -> tuple[float, float]:
        """λ's range in this step."""
        return min(max(self.least, here.memory.number(_FLOOR, 0.0)), self.most), self.most

    def begin(self, damping: float, here: Local) -> tuple[float, int]:
        """λ with which a step begins, and the products that it took to find it: what the last step left, or, where the
        curvature is to choose, 10 tr(B)/n with a floor of 0.01 tr(B)/n.

        The choice is made in the first step, and again after steps on batches without curvature (all of their rows masked,
        say), as long as these are but the first.
        """
        if not math.isnan(damping) and not here.memory.number(_UNSETTLED):
            return damping, 0
        mean, products = here.mean_eigenvalue()
        first = START * mean or (1.0 if math.isnan(damping) else damping)
        settled = mean > 0 or here.memory.number("iteration", 0) + 1 >= _LOOKS
        here.memory.keep(**{_FLOOR: FLOOR * mean} if mean else {}, **{_UNSETTLED: not settled})
        return min(max(first, self.least), self.most), products

    def listen(self, damping: float, here: Local) -> float:
        """λ for this step, before it solves; what the step began with unless a rule knows better."""
        return damping

    def end(self, damping: float, rho: float, least: float, most: float) -> float:
        """λ for the next step, within its range, from this one's and ρ; -∞ where the step failed, nan where it says
        nothing."""
        return min(max(damping, least), most)

    def moved(self, move: Move, gain: float, here: Local) -> None:
        """The step is done: `gain` is what f fell by on its own batch. What is to be remembered goes into `here.memory`."""
