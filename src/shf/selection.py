"""CG backtracking and the line search of Algorithm 1. Both see the objective as a callable of an index or a rate."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass


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
