"""Algorithm 1 of the paper as one function over flat vectors. It reads nothing but its arguments, and writes only to those
vectors that are said to be the step's to overwrite. What it is made of (the rule for λ, the preconditioner, the linear
solver, the choice among its iterates) it knows by their protocols."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shf.damping.levenberg import reduction_ratio, rounding
from shf.errors import NonFiniteError
from shf.info import StepInfo, bound_reached
from shf.linear.cg import CGStop
from shf.linear.flat import finite
from shf.linear.solver import Run
from shf.linear.system import LinearSystem
from shf.local import Expansion, Local
from shf.method import Method
from shf.preconditioners.base import Preparation
from shf.selection import Rate
from shf.state import Memory


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


class Problem(Protocol):
    """One iteration's objective: its batches, its masks, its network at θ."""

    def dots(self, *pairs: tuple[Tensor, Tensor]) -> list[float]:
        """The inner products of pairs of vectors such as δ, where each is but a part of a longer one."""

    def linearise(self, preparation: Preparation) -> Expansion:
        """f, ∇f and the preconditioner at θ, on X^g."""

    def system(self, damping: float) -> LinearSystem:
        """Products at θ, on X^c, damped with this λ."""

    def point(self, delta: Tensor, rate: float) -> Tensor:
        """θ + rate·δ, in a vector that the next point, the next product or P⁻¹r may overwrite."""

    def value(self, theta: Tensor) -> float:
        """f at another θ, on X^g."""

    def own(self, vector: Tensor) -> Tensor:
        """The part of a whole vector that is held here."""

    def mean_eigenvalue(self) -> tuple[float, int]:
        """tr(B)/n, and how many products it took."""


@torch.no_grad()
def shf_step(
    problem: Problem, state: State, method: Method, memory: Memory
) -> tuple[Tensor | None, State, StepInfo, Local]:
    """One iteration: δ_{k-1} and λ in; θ (None where it stays what it is), δ_k and λ out.

    Args:
        problem: f at and around θ on the gradient batch X^g, B on the curvature batch X^c, dropout units already sampled.
        state: what the previous iteration left; the epoch's γ and β.
        method: what solves, chooses and damps.
        memory: what the parts of the method remember.
    """
    beta, dots = state.update_scale, problem.dots
    trials: list[float] = []

    def f(delta: Tensor, rate: float = 1.0) -> float:
        trials.append(problem.value(problem.point(delta, rate)))
        return trials[-1]

    def remember(name: str, number: float) -> None:
        memory.keep(**{name: number})

    # f_{k-1}, ∇f on X^g
    expansion = problem.linearise(method.preparation)
    f_old, downhill = expansion.value, expansion.gradient.neg_()
    gradient_norm = math.sqrt(*dots((downhill, downhill)))
    if not (math.isfinite(f_old) and (math.isfinite(gradient_norm) or finite(downhill, dots=dots)[0])):
        raise NonFiniteError.of_sum(f_old, gradient_norm)
    noise = rounding(f_old, torch.finfo(downhill.dtype).eps)
    here = Local(
        f_old, downhill, f, problem.value, problem.system, memory, dots, noise, problem.own, problem.mean_eigenvalue
    )

    # λ, and P at it
    lam, looks = method.damping.begin(state.damping, here)
    precondition = expansion.precondition(lam)
    least, most = method.damping.bounds(here)
    lam = min(max(method.damping.listen(lam, here), least), most)

    # Solve (B + λI) δ = -∇f by CG(γ δ_{k-1}^ζ, ∇f, P, ζ), products on X^c
    system = problem.system(lam)  # v ↦ (B + λI)v; with structural damping (B + λI + λμS)v
    candidates = method.selection.candidates(f, method.stopping.keep())
    stop = method.stopping.stop(system.share, compared=method.selection.compares_all)
    run = Run(candidates.visit, f, f_old, candidates.keep, stop, precondition, method.most, memory.number, remember)
    path = method.momentum.solve(method.solver, system, downhill, state.delta, state.cg_decay, run)
    path = method.decay.extend(path, system, downhill, expansion.decay_step, run)

    # CG backtracking: f_k, δ_k
    best = candidates.choose()
    if best is None:
        rho, rate, theta_next = -math.inf, Rate(0.0, f_old), None
    else:
        # ρ ← (f_k - f_{k-1}) / (½ δ'Bδ + ∇f'δ)
        square, along = dots((best.delta, best.delta), (downhill, best.delta))
        rho = reduction_ratio(best.value, f_old, system.undamped(best.model, best.delta, square), noise)
        # α: f(θ + αδ) ≤ f_{k-1} + .01 α ∇f'δ
        if method.solver.searches:
            rate = Rate(1.0, best.value)
        else:
            rate = method.selection.rate(partial(f, best.delta), f_old, best.value, -along, noise)
        # θ ← θ + β α δ
        theta_next = problem.point(best.delta, beta * rate.alpha) if rate.alpha else None
    if gradient_norm == 0:  # a batch that asks for nothing (all of it masked, say) tells nothing of λ
        rho = math.nan

    points = [path.last] if theta_next is None else [path.last, theta_next]
    last_finite, *next_finite = finite(*points, dots=dots)
    accepted = next_finite == [True]
    failed_trials = sum(not math.isfinite(value) for value in trials)
    # ρ < ¼ raises λ, ρ > ¾ lowers it; a trial that is not finite raises it, whatever ρ is
    trusted = failed_trials == 0 and path.stop is not CGStop.NON_FINITE
    lam_next = min(max(method.damping.end(lam, rho if trusted else -math.inf, here), least), most)
    info = StepInfo(
        loss_before=f_old,
        loss_after=rate.value if accepted else f_old,
        gradient_norm=gradient_norm,
        reduction_ratio=rho,
        damping=lam,
        step_size=rate.alpha if accepted else 0.0,
        chosen_iterate=0 if best is None else best.number,
        cg_steps=path.steps,
        cg_stop=path.stop,
        accepted=accepted,
        evaluations=len(trials),
        failed_trials=failed_trials,
        gradients=1,
        products=path.products + looks,
        damping_bound=bound_reached(lam_next, least, most),
        gradient_noise=expansion.noise,
        terms=expansion.terms,
    )
    after = replace(state, delta=path.last if last_finite else None, damping=lam_next)
    return theta_next if accepted else None, after, info, here
