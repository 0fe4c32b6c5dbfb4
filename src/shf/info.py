"""What a step reports."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shf.linear.cg import CGStop


class DampingBound(enum.Enum):
    """The end of its range that λ has come to."""

    FLOOR = "λ is at its floor"
    """`damping_min`, or that of `damping="auto"`."""
    CEILING = "λ is at its ceiling"
    """`damping_max`."""


def bound_reached(damping: float, least: float, most: float) -> DampingBound | None:
    """Which end of [least, most] λ stands at, if any; the ceiling where there is but one value."""
    if damping >= most:
        return DampingBound.CEILING
    return DampingBound.FLOOR if damping <= least else None


@dataclass(frozen=True)
class StepInfo:
    """What happened in one step, in Python numbers.

    Attributes:
        loss_before: f_0 = f(θ) on this batch with this step's masks, weight decay included.
        loss_after: f(θ + αδ) on the same batch and masks, before β, clipping and what `averaging="auto"` takes off; f_0
            where the step was rejected, or where f rose by no more than rounding.
        gradient_norm: ‖∇f(θ)‖.
        reduction_ratio: ρ; -inf where f rose or the model promised no descent, nan where the gradient is zero.
        damping: the λ used in this step.
        step_size: α; 0 where the step was rejected.
        chosen_iterate: number of the CG iterate that was taken, from 1; cg_steps + 1 for the one that exact momentum adds;
            0 if there is none, or none with a finite objective.
        cg_steps: CG iterations done.
        cg_stop: why CG ended.
        accepted: whether the parameters moved.
        evaluations: objective evaluations of this step besides the gradient's own.
        failed_trials: those of them that were not finite; they raise λ.
        gradients: gradient passes.
        products: Gauss-Newton products.
        damping_bound: the floor or ceiling that λ stands at after this step; None if at neither.
        skipped: why the batch was passed over, in words (`nonfinite="skip"`); None if it was not.
        gradient_noise: trace of the gradient's covariance over ‖∇f(θ)‖², where it was measured.
        terms: what each term has in `loss_before`, by name and times its weight; None where the loss is one. The rest is
            weight decay.
    """

    loss_before: float
    loss_after: float
    gradient_norm: float
    reduction_ratio: float
    damping: float
    step_size: float
    chosen_iterate: int
    cg_steps: int
    cg_stop: CGStop
    accepted: bool
    evaluations: int
    failed_trials: int
    gradients: int
    products: int
    damping_bound: DampingBound | None = None
    skipped: str | None = None
    gradient_noise: float | None = None
    terms: Mapping[str, float] | None = None

    def __str__(self) -> str:
        """The step in a line, for `print(info)`."""
        if self.skipped is not None:
            return f"skipped: {self.skipped}"
        f = f"f {self.loss_before:.6g} " + (f"→ {self.loss_after:.6g}" if self.accepted else "stays")
        steps = f"{self.cg_steps} CG iteration{'s' * (self.cg_steps != 1)}"
        return f"{f}, ρ {self.reduction_ratio:.2f}, λ {self.damping:.3g}, α {self.step_size:g}, {steps}"

    def asdict(self) -> dict[str, float]:
        """Numbers alone, flat, as loggers take them: terms by `term/name`, a floor or ceiling of λ as -1 or 1, no entry for
        what was not measured."""
        found = {f"term/{name}": value for name, value in (self.terms or {}).items()}
        bounds = {DampingBound.FLOOR: -1.0, DampingBound.CEILING: 1.0}
        found["damping_bound"] = bounds[self.damping_bound] if self.damping_bound else 0.0
        found["skipped"] = float(self.skipped is not None)
        return {k: float(v) for k, v in vars(self).items() if isinstance(v, int | float)} | found

    @classmethod
    def of_skipped(cls, damping: float, why: str) -> "StepInfo":
        """Of a batch that was passed over: one gradient pass, and nothing moved."""
        return cls(
            loss_before=math.nan,
            loss_after=math.nan,
            gradient_norm=math.nan,
            reduction_ratio=-math.inf,
            damping=damping,
            step_size=0.0,
            chosen_iterate=0,
            cg_steps=0,
            cg_stop=CGStop.NON_FINITE,
            accepted=False,
            evaluations=0,
            failed_trials=0,
            gradients=1,
            products=0,
            skipped=why,
        )
