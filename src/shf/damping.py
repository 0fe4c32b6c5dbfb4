"""Levenberg-Marquardt damping (§4.2): the reduction ratio ρ and the rule that moves λ. Floats only."""

import math


def reduction_ratio(f_new: float, f_old: float, model_change: float) -> float:
    """ρ = (f(θ+δ) - f(θ)) / (M(δ) - M(0)): how much of the promised decrease came true.

    Args:
        f_new: the objective at θ + δ.
        f_old: the objective at θ.
        model_change: M(δ) - M(0) = ½ δ'Bδ + g'δ of the *undamped* model.

    Returns:
        ρ, or -∞ where the objective rose or is not finite, or where the model promises no descent: both are failures
        that must raise λ, whatever the sign of the quotient.
    """
    change = f_new - f_old
    if not math.isfinite(change) or not math.isfinite(model_change) or change > 0 or model_change >= 0:
        return -math.inf
    return change / model_change


def adapt_damping(damping: float, rho: float, factor: float, *, low: float = 0.25, high: float = 0.75) -> float:
    """λ ← λ/factor if ρ < ¼, λ ← factor·λ if ρ > ¾, else λ unchanged.

    The paper's soft rule has factor 99/100 (§4.2), Martens' has 2/3. The result stays within float64's normal range.
    """
    if rho < low:
        return min(damping / factor, DAMPING_MAX)
    if rho > high:
        return max(damping * factor, DAMPING_MIN)
    return damping


DAMPING_MIN = 1e-15
"""λ's floor: below it (B + λI) is B to rounding."""
DAMPING_MAX = 1e15
"""λ's ceiling: above it a step is zero to rounding."""
