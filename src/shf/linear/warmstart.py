"""δ-momentum (§4.1): how the last solution comes into the next, and γ's schedule.

The paper starts CG from γδ, and γ is a schedule. With exact momentum CG starts from zero, and its solution x is followed
by one iteration more, along the last update d made conjugate to x:

    d⊥ = d - t x,   t = x'Ad / x'Ax,   δ = x + c d⊥,   c = b'd⊥ / d⊥'Ad⊥.

x is the minimum along itself, so δ is the minimum over the plane of x and d: how much of the last update comes along is
solved for, step by step. With ζ = 1 this is the momentum of Martens & Grosse (2015, §7). It costs one product.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shf.component import Component, flag, number, one_of, option
from shf.linear.cg import LinearMap
from shf.linear.flat import Dots
from shf.linear.solver import LinearSolver, Path, Run
from shf.linear.system import LinearSystem


@dataclass(frozen=True, kw_only=True)
class Momentum(Component):
    """γ_e = min(1.01 γ_{e-1}, 0.99) of the last solution is where the next begins (§4.1); γ off when training diverges
    (§5.2)."""

    kind: str = option(
        "start",
        one_of("start", "exact"),
        """how the last solution δ comes in. "start": CG starts from γδ, the paper's. "exact": CG starts from zero, and the
        model is minimised over its solution and δ together, unless γ is 0 (see [docs/fast.md](fast.md)).""",
        name="delta_momentum",
    )
    decay: float = option(
        0.5,
        number(least=0.0, most=1.0),
        "the share of the last CG solution that CG starts from, in the first epoch [γ_1].",
        name="cg_decay",
    )
    growth: float = option(
        1.01, number(least=1.0), "γ is multiplied by this at every following epoch.", name="cg_decay_growth"
    )
    most: float = option(0.99, number(least=0.0, most=1.0), "γ's ceiling.", name="cg_decay_max")
    off_on_divergence: bool = option(
        False,
        flag,
        """set γ to 0 for good once an epoch's mean objective is above the previous one's twice running (§5.2); the objective
        per row, where the loss is a sum over rows.""",
        name="momentum_off_on_divergence",
    )

    def first(self) -> dict[str, Any]:
        return {
            "cg_decay": float(self.decay),
            "momentum": True,
            "epoch_loss": 0.0,
            "epoch_steps": 0,
            "last_mean_loss": None,
            "rises": 0,
        }

    def next_epoch(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"cg_decay": min(self.growth * numbers["cg_decay"], self.most)}
        if numbers["epoch_steps"]:
            mean = numbers["epoch_loss"] / numbers["epoch_steps"]
            rose = numbers["last_mean_loss"] is not None and mean > numbers["last_mean_loss"]
            rises = numbers["rises"] + 1 if rose else 0
            found |= {"rises": rises, "last_mean_loss": mean, "epoch_loss": 0.0, "epoch_steps": 0}
            if self.off_on_divergence and rises >= 2:
                found["momentum"] = False
        return found

    def solve(
        self, solver: LinearSolver, system: LinearSystem, downhill: Tensor, last: Tensor | None, gamma: float, run: Run
    ) -> Path:
        """The path from γδ; or from zero, and δ one direction more. δ is overwritten."""
        last = last if gamma > 0 else None
        if last is None or self.kind == "start":
            return solver.solve(system, downhill, run, None if last is None else last.mul_(gamma))
        path = solver.solve(system, downhill, run, None)
        if not path.steps:
            return path
        delta, value = conjugate_to_last(system.product, downhill, path.last, path.values[-1], last, system.dots)
        if delta is not path.last:
            run.visit(path.steps + 1, delta, value)
        return replace(path, last=delta, products=path.products + 1)


def conjugate_to_last(
    product: LinearMap, rhs: Tensor, x: Tensor, value: float, last: Tensor, dots: Dots
) -> tuple[Tensor, float]:
    """δ and q(δ); x itself where d has nothing to add.

    Args:
        product: v ↦ Av.
        rhs: b.
        x: CG's solution from zero: the minimum of q along itself.
        value: q(x) = ½x'Ax - b'x.
        last: d, which becomes δ: it is overwritten.
        dots: the inner products of pairs.
    """
    Ad = product(last)
    xAd, dAd, bx, bd = dots((x, Ad), (last, Ad), (rhs, x), (rhs, last))
    xAx = 2 * (value + bx)
    t = xAd / xAx if xAx > 0 else math.nan
    slope, curvature = bd - t * bx, dAd - t * xAd
    numbers = torch.finfo(x.dtype)
    if not curvature > numbers.eps * dAd:  # parallel to rounding, or not a number
        return x, value
    c = slope / curvature
    if not max(abs(c), abs(1 - c * t)) <= numbers.max:
        return x, value
    return last.mul_(c).add_(x, alpha=1 - c * t), value - 0.5 * slope * c
