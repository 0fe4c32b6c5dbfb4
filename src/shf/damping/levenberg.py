"""Levenberg-Marquardt damping (§4.2): the reduction ratio ρ and the rule that moves λ. Floats only."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from shf.component import number, option
from shf.damping.rule import Damping
from shf.local import Local

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


def adapt_damping(
    damping: float,
    rho: float,
    factor: float,
    *,
    rise: float = 1.0,
    low: float = 0.25,
    high: float = 0.75,
) -> float:
    """λ ← λ/factor^rise if ρ < ¼, λ ← factor·λ if ρ > ¾, else λ unchanged. Its range is held by `algorithm.shf_step`.

    The paper's soft rule has factor 99/100 (§4.2), Martens' has 2/3; both rise as they fall.
    """
    if rho < low:
        damping /= factor**rise
    elif rho > high:
        damping *= factor
    return damping


@dataclass(frozen=True, kw_only=True)
class LevenbergMarquardt(Damping):
    """λ ← factor·λ where ρ > ¾, λ ← λ/factor^rise where ρ < ¼, ρ on the batch of the step itself (§4.2)."""

    factor: float = option(
        0.99,
        number(above=0.0, most=1.0),
        "λ is multiplied or divided by this after a step [99/100].",
        name="damping_factor",
    )
    rise: float = option(
        1.0,
        number(least=1.0),
        """where λ rises, it is divided by `damping_factor` to this power. 1 is the paper's: it rises as fast as it
        falls.""",
        name="damping_rise",
    )

    def check(self, say: Callable[[str], str]) -> None:
        super().check(say)
        power = max(self.rise, self._largest_rise())
        if self.factor**power < 1e-15:
            raise ValueError(
                f"{say('factor')}): λ may rise by its power {power:g} in one step ({say('rise')}), which is more than 1e15; "
                "give a larger factor"
            )

    def end(self, damping: float, rho: float, here: Local) -> float:
        return adapt_damping(damping, rho, self.factor, rise=self.rise)

    def _largest_rise(self) -> float:
        """The largest power of the factor by which λ rises in one step, besides `rise`."""
        return 1.0
