"""Levenberg-Marquardt damping (§4.2): the reduction ratio ρ and the rule that moves λ. Floats only."""

import enum
import math

_UNITS = 4.0
"""Units in the last place by which f differs from itself at points next to each other."""


def rounding(f: float, eps: float) -> float:
    """How much of a change of f may be rounding alone, in arithmetic of this precision."""
    return _UNITS * eps * abs(f)


def reduction_ratio(f_new: float, f_old: float, model_change: float, noise: float = 0.0) -> float:
    """ρ = (f(θ+δ) - f(θ)) / (M(δ) - M(0)): how much of the promised decrease came true.

    Args:
        f_new: the objective at θ + δ.
        f_old: the objective at θ.
        model_change: M(δ) - M(0) = ½ δ'Bδ + g'δ of the *undamped* model.
        noise: what f may change by through rounding alone.

    Returns:
        ρ; 1 where both the promise and what came of it are lost in rounding: that says nothing against the model, and a
        larger λ would only make the next step shorter still. -∞ where the objective rose or is not finite, or where the
        model promises no descent: both are failures that must raise λ, whatever the sign of the quotient.
    """
    change = f_new - f_old
    if abs(change) <= noise and -noise <= model_change < 0:
        return 1.0
    if not math.isfinite(change) or not math.isfinite(model_change) or change > 0 or model_change >= 0:
        return -math.inf
    return change / model_change


DAMPING_MIN = 1e-15
"""λ's default floor: below it (B + λI) is B to rounding."""
DAMPING_MAX = 1e15
"""λ's default ceiling: above it a step is zero to rounding."""

HELD_OUT_RISE = 4.0
"""The largest power of the factor by which the held-out rule raises λ in one step."""


class DampingBound(enum.Enum):
    """The end of its range that λ has come to."""

    FLOOR = "λ is at its floor"
    """`damping_min`, or that of `damping="auto"`."""
    CEILING = "λ is at its ceiling"
    """`damping_max`."""


def adapt_damping(
    damping: float,
    rho: float,
    factor: float,
    *,
    rise: float = 1.0,
    least: float = DAMPING_MIN,
    most: float = DAMPING_MAX,
    low: float = 0.25,
    high: float = 0.75,
) -> float:
    """λ ← λ/factor^rise if ρ < ¼, λ ← factor·λ if ρ > ¾, else λ unchanged; within [least, most] whatever ρ is.

    The paper's soft rule has factor 99/100 (§4.2), Martens' has 2/3; both rise as they fall.
    """
    if rho < low:
        damping /= factor**rise
    elif rho > high:
        damping *= factor
    return min(max(damping, least), most)


def bound_reached(damping: float, least: float, most: float) -> DampingBound | None:
    """Which end of [least, most] λ stands at, if any; the ceiling where there is but one value."""
    if damping >= most:
        return DampingBound.CEILING
    return DampingBound.FLOOR if damping <= least else None
