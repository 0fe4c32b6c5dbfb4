"""CG's iterates as candidates for the update, the choice among them (CG backtracking), and the line search of Algorithm 1.

All of it sees the objective as a callable."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from shf.component import Component, one_of, option, whole
from shf.linear.cg import keep_last


class Backtracking(enum.Enum):
    """How an iterate is chosen from those CG kept."""

    ALL = "all"
    """Compare all of them and keep the best (the paper); among equals, the last."""
    FIRST_WORSE = "first-worse"
    """Walk down from the last and stop at the first that is worse (the author's program; Martens)."""
    LAST = None
    """Take the last."""


@dataclass(frozen=True)
class Choice:
    """An iterate (0-based index into the kept ones; None if none has a finite objective) and f there."""

    index: int | None
    value: float


def backtrack(value_at: Callable[[int], float], count: int) -> Choice:
    """Chooses among iterates 0 … count-1: walks down from the last, and stops at the first that is worse.

    A non-finite value is a failed trial: that iterate is passed over.
    """
    best = Choice(None, math.inf)
    for index in reversed(range(count)):
        value = value_at(index)
        if math.isfinite(value) and value > best.value:
            break
        if math.isfinite(value) and value < best.value:
            best = Choice(index, value)
    return best


@dataclass(frozen=True)
class Rate:
    """The line search's outcome: α (0 if every trial failed) and f(θ + αδ)."""

    alpha: float
    value: float


def line_search(
    value_at: Callable[[float], float],
    f_old: float,
    f_full: float,
    slope: float,
    *,
    steps: int,
    noise: float = 0.0,
    shrink: float = 0.8,
    sufficient: float = 0.01,
) -> Rate:
    """Backtracking (Armijo) line search: the largest α = 0.8^j with f(θ+αδ) ≤ f_0 + 0.01 α min(g'δ, 0).

    A warm-started δ can point uphill (g'δ > 0); the test as printed would then accept a rise, hence the minimum with 0.
    Where neither the slope nor the change of f is more than rounding, trials would pass by chance alone: α = 1, and f counts
    as not having risen.

    Args:
        value_at: α ↦ f(θ + αδ).
        f_old: f_0 = f(θ).
        f_full: f(θ + δ), already known.
        slope: g'δ.
        steps: ω, the trials after α = 1. When all fail the step is rejected: α = 0.
        noise: what f may change by through rounding alone.
    """
    if abs(slope) <= noise and abs(f_full - f_old) <= noise:
        return Rate(1.0, min(f_full, f_old))
    slope = min(slope, 0.0)
    alpha, value = 1.0, f_full
    for trial in range(steps + 1):
        if math.isfinite(value) and value <= f_old + sufficient * alpha * slope:
            return Rate(alpha, value)
        if trial < steps:
            alpha *= shrink
            value = value_at(alpha)
    return Rate(0.0, f_old)


@dataclass(frozen=True)
class Candidate:
    """A CG iterate δ: its number, the damped model's value there, and f(θ + δ) once it is known."""

    number: int
    delta: Tensor
    model: float
    value: float = math.nan


class Candidates:
    """CG's iterates as candidates for the update.

    Where all of them are compared, f is evaluated as CG makes them and only the best is kept: one vector instead of ζ.
    Among equals the later one is taken. Where the last is to be taken, it alone is kept.
    """

    def __init__(self, f: Callable[[Tensor], float], rule: Backtracking, keep: Callable[[int], bool]) -> None:
        self.keep = keep_last if rule is Backtracking.LAST else keep
        self._f = f
        self._rule = rule
        self._kept: list[Candidate] = []

    def visit(self, number: int, x: Tensor, q: float, value: float | None = None, /) -> None:
        if self._rule is not Backtracking.ALL:
            self._kept.append(Candidate(number, x.clone(), q, math.nan if value is None else value))
            return
        value = self._f(x) if value is None else value
        if math.isfinite(value) and not (self._kept and value > self._kept[0].value):
            delta = self._kept[0].delta.copy_(x) if self._kept else x.clone()
            self._kept = [Candidate(number, delta, q, value)]

    def choose(self) -> Candidate | None:
        """The iterate to take; None if f is finite at none."""
        if self._rule is Backtracking.ALL:
            return self._kept[0] if self._kept else None
        choice = backtrack(self._value, len(self._kept))
        return None if choice.index is None else replace(self._kept[choice.index], value=choice.value)

    def _value(self, index: int) -> float:
        """f at an iterate that was kept."""
        known = self._kept[index].value
        return self._f(self._kept[index].delta) if math.isnan(known) else known


@dataclass(frozen=True, kw_only=True)
class Selection(Component):
    """Which CG iterate is taken, and how far along it (Algorithm 1)."""

    backtracking: str | None = option(
        "all",
        one_of("all", "first-worse", None),
        """which CG iterate is taken: "all" (the best of all), "first-worse", or None (the last; what exact momentum adds to
        it is taken unless the objective is higher there).""",
    )
    line_search_steps: int = option(60, whole(least=0), "trials of the line search before a step is rejected [ω].")

    @property
    def compares_all(self) -> bool:
        """Whether f is evaluated at every iterate."""
        return Backtracking(self.backtracking) is Backtracking.ALL

    def candidates(self, f: Callable[[Tensor], float], keep: Callable[[int], bool]) -> Candidates:
        return Candidates(f, Backtracking(self.backtracking), keep)

    def rate(self, f: Callable[[float], float], f_old: float, f_full: float, slope: float, noise: float) -> Rate:
        """α, and f there."""
        return line_search(f, f_old, f_full, slope, steps=self.line_search_steps, noise=noise)
