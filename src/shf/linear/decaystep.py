"""A direction of weight decay that λ does not hold back.

Where B has no curvature, a damped step takes away only the share w/(w + λ) of the weights, and λ is often far above w. So
once the solver has found x, the model is minimised over one direction more,

    d = -P_w⁻¹Wθ,

P_w being the preconditioner damped by the weight decay w alone: -θ where there is no curvature, little where there is much.
λ weighs x and not d. With A = B + λI and b = -∇f, the step is δ = ax + cd where

    x'Ax a + x'Bd c = b'x,   x'Bd a + d'Bd c = b'd.

It costs a product, P_w⁻¹ and an evaluation: as long as it pays it is looked for in every step, else less and less often.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from shf.component import Component, flag, option
from shf.linear.solver import Path, Run
from shf.linear.system import LinearSystem

_DUE, _PAUSE = "decay_due", "decay_pause"
_PAYS = 0.1
"""What it must add to the solver's gain. Less than its share of the cost: of what a step gains on its batch most is lost on
other batches, of the penalty nothing."""
_LONGEST = 64
"""Steps from one look to the next, at most."""


@dataclass(frozen=True, kw_only=True)
class DecayStep(Component):
    """Whether steps have a direction of weight decay of their own, as often as that pays."""

    on: bool = option(
        False,
        flag,
        """minimise the model over -P_w⁻¹Wθ too, a direction of weight decay that λ does not damp, as often as that pays. It
        takes a Kronecker preconditioner; with another there is none (see [docs/fast.md](fast.md)).""",
        name="decay_direction",
    )

    @property
    def numbers(self) -> tuple[str, ...]:
        return (_DUE, _PAUSE) if self.on else ()

    def extend(
        self, path: Path, system: LinearSystem, downhill: Tensor, direction: Callable[[], Tensor | None], run: Run
    ) -> Path:
        """The path to x, and δ as one candidate more where there is a d and the model gains by it.

        Args:
            path: the solver's, which ends at x.
            system: A.
            downhill: b.
            direction: d, or None where no weight decays; it may be overwritten.
            run: whom to hand δ.
        """
        if not self.on or not path.steps:
            return path
        now = run.recall("iteration", 0)
        if now < run.recall(_DUE, 0) or (d := direction()) is None:
            return path
        x, q = path.last, path.values[-1]
        a, c, rise = minimum(system, downhill, x, q, d)
        pause = 0 if -rise > -_PAYS * q else min(max(2 * int(run.recall(_PAUSE, 0)), 1), _LONGEST)
        run.remember(_PAUSE, pause)
        run.remember(_DUE, now + 1 + pause)
        if rise < 0:
            delta = d.mul_(c).add_(x, alpha=a)
            square, xx = system.dots((delta, delta), (x, x))
            damped = q + rise + 0.5 * system.damping * (square - a * a * xx)
            run.visit(path.steps + 1, delta, damped)
        return replace(path, products=path.products + 1)


def minimum(system: LinearSystem, b: Tensor, x: Tensor, q: float, d: Tensor) -> tuple[float, float, float]:
    """a, c ≥ 0, and how far the model's value at ax + cd, λ weighing x alone, is above q, its value at x: 1, 0, 0 where d
    has nothing to add, is parallel to x to rounding, or where numbers are not finite."""
    Ad, lam = system.product(d), system.damping
    xd, dd, xAd, dAd, bx, bd = system.dots((x, d), (d, d), (x, Ad), (d, Ad), (b, x), (b, d))
    xBd, dBd = xAd - lam * xd, dAd - lam * dd
    xAx = 2 * (q + bx)
    determinant = xAx * dBd - xBd * xBd
    if not determinant > 1e-6 * xAx * dBd > 0:
        return 1.0, 0.0, 0.0
    a, c = (bx * dBd - bd * xBd) / determinant, (xAx * bd - xBd * bx) / determinant
    return (a, c, -0.5 * (a * bx + c * bd) - q) if c > 0 else (1.0, 0.0, 0.0)
