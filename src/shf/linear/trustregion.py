"""Steps as long as the model's word is kept: λ from a radius, the radius from a target for ρ, and a bend along the way.

For objectives that are exact (all rows, no noise) and nearly sums of squares. One factorisation gives the solution for
every λ, so that a radius Δ is as good as λ: ‖δ(λ)‖ = Δ. The longest step is taken whose ρ is at least the target, ½ in the
first one. A small target takes long steps: greed for this step's decrease loses the run.

Lengths are ‖sδ‖ with s_i = (B_ii / max_j B_jj)^¼, half way between one unit for all parameters and Marquardt's, in which
B's diagonal is constant.

A step along which the outputs bend is corrected to second order (geodesic acceleration, Transtrum & Sethna, 2012): with
z̈ = 2/h ((z(θ+hδ) - z(θ))/h - Jδ), one evaluation,

    δ ← δ + a,   a = -½ (B + λI)⁻¹ J'L''z̈,   ‖a‖ at most 3/8 of ‖δ‖.

Of δ(λ) a share is taken, which is 1 unless batches are drawn anew and the next one has another opinion (`unseen`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from shf.component import number, option
from shf.linear.cg import CGStop
from shf.linear.exact import MOST_NUMBERS
from shf.linear.flat import read
from shf.linear.roots import Roots
from shf.linear.sides import Side, smaller_side
from shf.linear.solver import LinearSolver, Path, Run
from shf.linear.system import LinearSystem
from shf.linear.unseen import NUMBERS, share, stepped

RADIUS, DAMPING = "radius", "radius_damping"
_WIDEN, _REACH, _PROBE, _BEND = 1.7, 3.0, 0.1, 0.75
_SHORTEST = 1e-14
_FIRST = 0.5
"""ρ that a first step must have: the length of none is known, and one that goes too far can end where nothing leads back."""
_GUESS = 1e-3
"""λ of a first step, in largest eigenvalues of B, where it has to be looked for."""
_LEAST_LENGTH = 1e-6
"""Of a column of R, in lengths of the longest."""


@dataclass(frozen=True)
class Trial:
    """A step of some length: δ, λ, ‖sδ‖ without its bend, ρ, the fall of f, and the undamped model's value."""

    radius: float
    length: float
    damping: float
    delta: Tensor
    rho: float
    fall: float
    model: float


@dataclass(frozen=True, kw_only=True)
class TrustRegion(LinearSolver):
    """The longest step whose ρ is at least `target_ratio`; λ follows from it, whatever the rule for λ says."""

    products: ClassVar[bool] = False
    searches: ClassVar[bool] = True

    target: float = option(
        0.1, number(above=0.0, below=1.0), "ρ that the longest step of a trust region must have.", name="target_ratio"
    )

    @property
    def numbers(self) -> tuple[str, ...]:
        return (RADIUS, DAMPING, *NUMBERS)

    def solve(self, system: LinearSystem, downhill: Tensor, run: Run, start: Tensor | None = None) -> Path:
        roots = system.written_out(MOST_NUMBERS, min(system.size) if system.even else system.size[1])
        units = _units(roots)
        if units is not None:
            roots, evaluate = roots.in_units(units), run.f
            run = replace(run, f=lambda delta: evaluate(delta / units))
        eta = share(run, torch.finfo(roots.rows.dtype).eps)
        known, near = float(run.recall(RADIUS, 0.0)), float(run.recall(DAMPING, 0.0))
        target = self.target if known > 0 else max(self.target, _FIRST)
        search = _Search(roots, smaller_side(roots, near), run, target, eta, near)
        best = search.from_radius(known if known > 0 else 1.0)
        run.remember(RADIUS, max(best.radius, _SHORTEST))
        run.remember(DAMPING, best.damping)
        stepped(run, max(best.fall, 0.0))
        if not best.fall > 0:
            return Path([], [], [], best.delta.zero_(), 0, search.trials, CGStop.ZERO_RESIDUAL)
        delta = best.delta if units is None else best.delta / units
        value = best.model + 0.5 * system.damping * torch.dot(delta, delta).item()
        run.visit(1, delta, value, run.value - best.fall)
        return Path([], [1], [value], delta, 1, search.trials, CGStop.ZERO_RESIDUAL)


def _units(roots: Roots) -> Tensor | None:
    """s; None where the space of rows would lose the weight decay that all parameters have in common."""
    if roots.wide and not isinstance(roots.weights, Tensor) and roots.weights > 0:
        return None
    lengths = torch.linalg.vector_norm(roots.rows, dim=0)
    most = lengths.max()
    return (lengths / most).clamp_min_(_LEAST_LENGTH).sqrt_() if most > 0 else None


class _Search:
    """Trials of one step: each costs two evaluations, and a factorisation where the matrix is large."""

    def __init__(
        self, roots: Roots, side: Side, run: Run, target: float, share: float = 1.0, near: float = 0.0
    ) -> None:
        self._roots, self._side, self._run, self._target = roots, side, run, target
        penalty = None if roots.penalty is None else share * roots.penalty
        self._coordinates = side.of_rows(share * roots.residual, penalty)
        self._gradient = roots.gradient()
        self.trials = 0  # each looks at the outputs once, which costs about what a product does
        self._near = near if near > 0 else _GUESS * side.largest

    def from_radius(self, radius: float) -> Trial:
        """Widens while ρ is at least the target; else narrows until it is, and further until f falls."""
        now = self._trial(radius)
        if now.rho >= self._target:
            while now.radius * _WIDEN <= radius * _REACH and now.damping > self._side.least:
                wider = self._trial(now.radius * _WIDEN)
                if wider.rho < self._target:
                    break
                now = wider
        else:
            for narrower in self._narrower(radius):
                now = self._trial(narrower)
                if now.rho >= self._target or (narrower <= radius / _REACH and now.fall > 0):
                    break
        if now.damping <= self._side.least:  # the whole step fits: the radius is its length
            now = replace(now, radius=min(now.radius, 2 * now.length))
        return now

    def _narrower(self, radius: float) -> Iterator[float]:
        for k in count(1):
            narrower = radius / (_WIDEN**k if _WIDEN**k <= _REACH else _REACH ** (k - 1))
            if narrower < _SHORTEST:
                return
            yield narrower

    def _trial(self, radius: float) -> Trial:
        roots, lam = self._roots, self._side.damping(self._coordinates, radius, self._near)
        self.trials += 1
        self._near = lam
        delta = self._side.solve(self._coordinates, lam).neg_()
        along = roots.rows @ delta
        a, norm = self._bend(delta, along, lam), torch.linalg.vector_norm
        model, length, bend = read(self._model(delta, along), norm(delta), norm(a))
        share = 2 * bend / max(length, _SHORTEST**2)
        if not math.isfinite(share):  # a cannot be had
            a.zero_()
        bent = delta + (a.mul_(_BEND / share) if share > _BEND else a)
        fall = self._run.value - self._run.f(bent)
        if not math.isfinite(fall):
            return Trial(radius, length, lam, bent, -math.inf, -math.inf, model)
        rho = fall / -model if model < 0 else -1.0
        return Trial(radius, length, lam, bent, rho, fall, min(self._model(bent, roots.rows @ bent).item(), model))

    def _model(self, delta: Tensor, along: Tensor) -> Tensor:
        """½δ'Bδ + ∇f'δ, with Rδ at hand."""
        curved = torch.dot(along, along) + torch.dot(delta, self._roots.weights * delta)
        return 0.5 * curved + torch.dot(self._gradient, delta)

    def _bend(self, delta: Tensor, along: Tensor, lam: float) -> Tensor:
        """a, which may be more than a correction."""
        second = (2 / _PROBE) * (self._roots.change(_PROBE * delta) / _PROBE - along)
        return self._side.solve(self._side.of_rows(second), lam).mul_(-0.5)
