"""CG's iterates as candidates for the update, and the choice among them (CG backtracking, Algorithm 1)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from shf.linear.cg import keep_last
from shf.selection import Backtracking, backtrack


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

    def visit(self, number: int, x: Tensor, q: float) -> None:
        if self._rule is not Backtracking.ALL:
            self._kept.append(Candidate(number, x.clone(), q))
            return
        value = self._f(x)
        if math.isfinite(value) and not (self._kept and value > self._kept[0].value):
            delta = self._kept[0].delta.copy_(x) if self._kept else x.clone()
            self._kept = [Candidate(number, delta, q, value)]

    def choose(self) -> Candidate | None:
        """The iterate to take; None if f is finite at none."""
        if self._rule is Backtracking.ALL:
            return self._kept[0] if self._kept else None
        choice = backtrack(lambda j: self._f(self._kept[j].delta), len(self._kept))
        return None if choice.index is None else replace(self._kept[choice.index], value=choice.value)
