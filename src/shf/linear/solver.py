"""What a linear solver is: from the system, its right-hand side and a start to a path of candidates for the update."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shf.component import Component, option, whole
from shf.linear.cg import CGResult, LinearMap, Visit, conjugate_gradient, identity, keep_all, never
from shf.linear.system import LinearSystem

Path = CGResult
"""What a solver leaves behind: its last iterate, the model's values on the way, why it stopped, and what it cost. The
iterates themselves were handed to `Run.visit`."""


@dataclass(frozen=True)
class Run:
    """What one run of a solver is given besides the system.

    Attributes:
        visit: is handed each candidate for the update as it is made: its number from 1, x, the damped model's value there,
            ½x'(B + λI)x + ∇f'x, and f there if it is known. x may be overwritten afterwards.
        keep: which of the iterates are to be handed over, by number; the last always is.
        stop: sees the model's value at the start and after every iteration; true ends the run.
        precondition: r ↦ P⁻¹r.
        most: iterations, where fewer than the solver's own are wanted.
        f: δ ↦ f(θ + δ), an evaluation, and
        value: f(θ), for solvers that look at them.
        recall: (name, default) ↦ a number that the solver remembers, and
        remember: (name, number), what it is to remember.
    """

    visit: Visit
    f: Callable[[Tensor], float] = lambda delta: math.nan
    value: float = math.nan
    keep: Callable[[int], bool] = keep_all
    stop: Callable[[Sequence[float]], bool] = never
    precondition: LinearMap = identity
    most: int = sys.maxsize
    recall: Callable[[str, float], float] = lambda name, default: default
    remember: Callable[[str, float], None] = lambda name, number: None


@dataclass(frozen=True, kw_only=True)
class LinearSolver(Component):
    """Solves (B + λI)δ = -∇f. One of one's own is a subclass with `solve`; see docs/extending.md."""

    products: ClassVar[bool] = True
    """Whether it takes products in every step, rather than B written out."""

    searches: ClassVar[bool] = False
    """Whether it has judged its steps by f itself: they are taken whole, and no line search follows."""

    def solve(self, system: LinearSystem, downhill: Tensor, run: Run, start: Tensor | None = None) -> Path:
        """The path to δ.

        Args:
            system: B + λI.
            downhill: -∇f.
            run: whom to hand the iterates, and how long.
            start: γδ of the last step, or None for zero; it may be overwritten.
        """
        raise TypeError(f"{type(self).__name__} does not say how it solves: define solve(system, downhill, run, start)")


@dataclass(frozen=True, kw_only=True)
class CG(LinearSolver):
    """Preconditioned conjugate gradients, a few iterations (§4.1)."""

    iterations: int = option(
        3,
        whole(least=1),
        "CG iterations per step [ζ]: 3-5 for classification, 25-50 for deep autoencoders.",
        name="cg_iterations",
    )

    def solve(self, system: LinearSystem, downhill: Tensor, run: Run, start: Tensor | None = None) -> Path:
        return conjugate_gradient(
            system.product,
            downhill,
            start=start,
            out=start,
            iterations=min(self.iterations, run.most),
            precondition=run.precondition,
            keep=run.keep,
            visit=run.visit,
            stop=run.stop,
            dots=system.dots,
            quadratic=system.quadratic,
        )
