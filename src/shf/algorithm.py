"""Algorithm 1 of the paper as one function over flat vectors. It reads nothing but its arguments, and writes only to those
vectors that are said to be the step's to overwrite."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shf.candidates import Candidates
from shf.config import Config
from shf.damping.levenberg import DampingBound, adapt_damping, bound_reached, reduction_ratio, rounding
from shf.errors import NonFiniteError
from shf.linear.cg import CGResult, CGStop, Dot, LinearMap, conjugate_gradient, inner_product, keep_all, never
from shf.linear.flat import all_finite
from shf.linear.warmstart import conjugate_to_last
from shf.selection import Backtracking, Rate, line_search


@dataclass(frozen=True)
class State:
    """What one iteration hands to the next.

    Attributes:
        delta: δ^ζ, the last CG iterate of the previous iteration (not the chosen one); None before the first. It is the
            step's to overwrite.
        damping: λ.
        cg_decay: γ of this epoch.
        update_scale: β of this epoch.
    """

    delta: Tensor | None
    damping: float
    cg_decay: float
    update_scale: float


@dataclass(frozen=True)
class StepInfo:
    """What happened in one step, in Python numbers.

    Attributes:
        loss_before: f_0 = f(θ) on this batch with this step's masks, weight decay included.
        loss_after: f(θ + αδ) on the same batch and masks, before β and clipping; f_0 where the step was rejected, or where
            f rose by no more than rounding.
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


@dataclass(frozen=True)
class Expansion:
    """f(θ), ∇f(θ), the preconditioner r ↦ P⁻¹r and perhaps the gradient's noise, all on the gradient batch. They are the
    step's to overwrite."""

    value: float
    gradient: Tensor
    precondition: LinearMap
    noise: float | None = None


@dataclass(frozen=True)
class Curvature:
    """B at θ, on X^c, damped.

    Attributes:
        product: v ↦ (B + λI + λμS)v, μ = 0 without structural damping.
        quadratic: v ↦ v'(B + λI + λμS)v, where that costs less than a product.
        structural: v ↦ ½λμ v'Sv.
    """

    product: LinearMap
    quadratic: Callable[[Tensor], float] | None = None
    structural: Callable[[Tensor], float] = lambda vector: 0.0


class Problem(Protocol):
    """One iteration's objective: its batches, its masks, its network at θ."""

    def expand(self, damping: float) -> Expansion:
        """f, ∇f and, for this λ, the preconditioner at θ, on X^g."""

    def curvature(self, damping: float) -> Curvature:
        """Products at θ, on X^c, damped with this λ."""

    def point(self, delta: Tensor, rate: float) -> Tensor:
        """θ + rate·δ, in a vector that the next point, the next product or P⁻¹r may overwrite."""

    def value(self, theta: Tensor) -> float:
        """f at another θ, on X^g."""


@dataclass(frozen=True)
class Solver:
    """The rules of CG: which iterates to keep, when to stop before ζ, and a bound on the iterations if less than ζ."""

    keep: Callable[[int], bool] = keep_all
    stop: Callable[[Sequence[float]], bool] = never
    most: int = sys.maxsize


SHORT_RUNS = Solver()
"""§4.1: always ζ iterations, all iterates kept."""


Hear = Callable[[float, float, Tensor, Callable[[Tensor, float], float], Dot], float]
"""λ for this step from (λ, f here, -∇f here, (d, rate) ↦ f(θ + rate·d), inner product), all on this step's batch."""


def deaf(damping: float, value: float, downhill: Tensor, f: Callable[[Tensor, float], float], dot: Dot) -> float:
    """λ is what the last step left."""
    return damping


@dataclass(frozen=True)
class Rule:
    """How λ moves: what a step hears before it solves, the values of ρ beyond which it is raised or lowered after, and a
    floor above the settings' own."""

    hear: Hear = deaf
    low: float = 0.25
    high: float = 0.75
    floor: float = 0.0


LEVENBERG_MARQUARDT = Rule()
"""§4.2: by ρ on the batch of the step itself."""


@torch.no_grad()
def shf_step(
    problem: Problem,
    state: State,
    config: Config,
    solver: Solver = SHORT_RUNS,
    dot: Dot = inner_product,
    rule: Rule = LEVENBERG_MARQUARDT,
) -> tuple[Tensor | None, State, StepInfo]:
    """One iteration: δ_{k-1} and λ in; θ (None where it stays what it is), δ_k and λ out.

    Args:
        problem: f at and around θ on the gradient batch X^g, B on the curvature batch X^c, dropout units already sampled.
        state: what the previous iteration left; the epoch's γ and β.
        config: ζ, ξ, ω and the rest.
        solver: CG's rules.
        dot: the inner product of vectors such as δ, where each is but a part of a longer one.
        rule: λ's.
    """
    lam, beta = state.damping, state.update_scale
    trials: list[float] = []

    def f(delta: Tensor, rate: float = 1.0) -> float:
        trials.append(problem.value(problem.point(delta, rate)))
        return trials[-1]

    # f_{k-1}, ∇f, P on X^g
    here = problem.expand(lam)
    f_old, downhill = here.value, here.gradient.neg_()
    gradient_norm = math.sqrt(dot(downhill, downhill))
    if not (math.isfinite(f_old) and (math.isfinite(gradient_norm) or all_finite(downhill, dot))):
        raise NonFiniteError.of_sum(f_old, gradient_norm)
    noise = rounding(f_old, torch.finfo(downhill.dtype).eps)
    most = config.damping_max
    least = min(max(config.damping_min, rule.floor), most)
    lam = min(max(rule.hear(lam, f_old, downhill, f, dot), least), most)

    # Solve (B + λI) δ = -∇f by CG(γ δ_{k-1}^ζ, ∇f, P, ζ), products on X^c
    A = problem.curvature(lam)  # v ↦ (B + λI)v; with structural damping (B + λI + λμS)v
    candidates = Candidates(f, Backtracking(config.backtracking), solver.keep)
    cg = _solve(A, downhill, here.precondition, state, config, solver, candidates, dot)

    # CG backtracking: f_k, δ_k
    best = candidates.choose()
    if best is None:
        rho, rate, theta_next = -math.inf, Rate(0.0, f_old), None
    else:
        # ρ ← (f_k - f_{k-1}) / (½ δ'Bδ + ∇f'δ): CG's value is the damped model's, ½λ(δ'δ + μδ'Sδ) above
        undamped = best.model - 0.5 * lam * dot(best.delta, best.delta) - A.structural(best.delta)
        rho = reduction_ratio(best.value, f_old, undamped, noise)
        # α: f(θ + αδ) ≤ f_{k-1} + .01 α ∇f'δ
        slope = -dot(downhill, best.delta)
        rate = line_search(
            partial(f, best.delta), f_old, best.value, slope, steps=config.line_search_steps, noise=noise
        )
        # θ ← θ + β α δ
        theta_next = problem.point(best.delta, beta * rate.alpha) if rate.alpha else None
    if gradient_norm == 0:  # a batch that asks for nothing (all of it masked, say) tells nothing of λ
        rho = math.nan

    accepted = theta_next is not None and all_finite(theta_next, dot)
    failed_trials = sum(not math.isfinite(value) for value in trials)
    # ρ < ¼ raises λ, ρ > ¾ lowers it; a trial that is not finite raises it, whatever ρ is
    trusted = failed_trials == 0 and cg.stop is not CGStop.NON_FINITE
    seen = rho if trusted else -math.inf
    lam_next = adapt_damping(
        lam, seen, config.damping_factor, rise=config.damping_rise, low=rule.low, high=rule.high, least=least, most=most
    )
    info = StepInfo(
        loss_before=f_old,
        loss_after=rate.value if accepted else f_old,
        gradient_norm=gradient_norm,
        reduction_ratio=rho,
        damping=lam,
        step_size=rate.alpha if accepted else 0.0,
        chosen_iterate=0 if best is None else best.number,
        cg_steps=cg.steps,
        cg_stop=cg.stop,
        accepted=accepted,
        evaluations=len(trials),
        failed_trials=failed_trials,
        gradients=1,
        products=cg.products,
        damping_bound=bound_reached(lam_next, least, most),
        gradient_noise=here.noise,
    )
    after = replace(state, delta=cg.last if all_finite(cg.last, dot) else None, damping=lam_next)
    return theta_next if accepted else None, after, info


def _solve(
    A: Curvature,
    downhill: Tensor,
    precondition: LinearMap,
    state: State,
    config: Config,
    solver: Solver,
    candidates: Candidates,
    dot: Dot,
) -> CGResult:
    """CG from γ δ_{k-1}^ζ, its iterates candidates for the update; or from zero, and δ_{k-1} one direction more."""
    last = state.delta if state.cg_decay > 0 else None
    exact = config.delta_momentum == "exact"
    start = last.mul_(state.cg_decay) if last is not None and not exact else None
    cg = conjugate_gradient(
        A.product,
        downhill,
        start=start,
        out=start,
        iterations=min(config.cg_iterations, solver.most),
        precondition=precondition,
        keep=candidates.keep,
        visit=candidates.visit,
        stop=solver.stop,
        dot=dot,
        quadratic=A.quadratic,
    )
    if not exact or last is None or not cg.steps:
        return cg
    delta, value = conjugate_to_last(A.product, downhill, cg.last, cg.values[-1], last, dot)
    if delta is not cg.last:
        candidates.visit(cg.steps + 1, delta, value)
    return replace(cg, last=delta, products=cg.products + 1)
