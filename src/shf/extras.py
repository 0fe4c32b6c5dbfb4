"""What is beyond the paper, in one step: made from the settings, absent by default. See docs/fast.md."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shf.algorithm import LEVENBERG_MARQUARDT, Rule, Solver, StepInfo
from shf.averaging import AVERAGE, update_average
from shf.config import Config
from shf.damping.heldout import HELD_OUT_NUMBERS, MOVED, HeldOut
from shf.damping.initial import FLOOR, START
from shf.distributed.collective import Collective
from shf.linear.caution import CAUTIOUS, Caution, iterations
from shf.linear.stopping import marginal_value, prices
from shf.model.network import Network
from shf.preconditioners.diagonal import Preconditioner
from shf.preconditioners.kronecker import FACTOR_NUMBERS, FACTORS, FactorMemory, Renewal, Schedule
from shf.selection import Backtracking
from shf.state import OptimizerState, remember

_FLOOR, _UNSETTLED = "damping_floor", "damping_unsettled"
_LOOKS = 10
"""Batches without curvature after which λ is left to ρ alone: the loss has none."""


@dataclass(frozen=True)
class Extras:
    """The extras of one step.

    Attributes:
        network: with its present parameters.
        state: the optimizer's.
        damping: λ to begin with.
        iteration: number of the step.
        renewal: the Kronecker preconditioner.
        heldout: the rule that hears the next batch.
        caution: the rule that holds CG to one iteration.
        floor: λ's, from the curvature; 0 where the settings' own is all there is.
        settled: whether λ's beginning is chosen; None where nothing was to be chosen in this step.
        averaging: what the running average of iterates keeps; 0 for none.
    """

    network: Network
    state: OptimizerState
    damping: float
    iteration: int
    renewal: Renewal | None = None
    heldout: HeldOut | None = None
    caution: Caution | None = None
    floor: float = 0.0
    averaging: float = 0.0
    settled: bool | None = None

    @property
    def rule(self) -> Rule:
        """λ's. Where unseen data judge, a ρ near 1 on the batch itself says nothing; a small one still raises λ."""
        if self.heldout is None:
            return replace(LEVENBERG_MARQUARDT, floor=self.floor)
        return Rule(self.heldout, high=math.inf, floor=self.floor)

    def write(self, before: Tensor, after: Tensor, info: StepInfo) -> dict[str, Any]:
        """Puts what is to be remembered into the optimizer's state; the numbers are the caller's to keep."""
        numbers: dict[str, Any] = {_FLOOR: self.floor} if self.floor else {}
        if self.settled is not None:
            numbers[_UNSETTLED] = not self.settled
        if self.renewal is not None:
            numbers |= self.renewal.write()
        if self.heldout is not None:
            numbers |= self.heldout.write(after - before if info.accepted else None, info.loss_before - info.loss_after)
        if self.caution is not None:
            numbers |= self.caution.write(info)
        if self.averaging:
            update_average(self.network, after, self.state, self.averaging, self.iteration)
        return numbers


def make_extras(
    config: Config,
    memory: FactorMemory,
    network: Network,
    state: OptimizerState,
    scalars: dict[str, Any],
    mean_eigenvalue: float | None,
    rows: int,
    ranks: Collective,
) -> Extras:
    """The extras that the settings ask for, at the optimizer's present state; λ begins by B's mean eigenvalue if given."""
    iteration, damping, floor = scalars["iteration"], scalars["damping"], scalars.get(_FLOOR, 0.0)
    settled = None
    if mean_eigenvalue is not None:
        first = START * mean_eigenvalue or (1.0 if math.isnan(damping) else damping)
        damping, floor = min(max(first, config.damping_min), config.damping_max), FLOOR * mean_eigenvalue
        settled = mean_eigenvalue > 0 or iteration + 1 >= _LOOKS
    renewal = heldout = None
    if Preconditioner(config.preconditioner) is Preconditioner.KRONECKER:
        share = curvature_share(config, rows)
        schedule = Schedule(config.factor_average, config.factor_every, iterations(config, scalars), share)
        renewal = Renewal(memory, network, state, scalars, iteration, schedule)
    if config.damping_rule == "held-out":
        heldout = HeldOut(network, state, scalars, config.damping_factor, ranks)
    caution = None if config.cg_noise is None else Caution(config.cg_noise, scalars)
    return Extras(network, state, damping, iteration, renewal, heldout, caution, floor, config.averaging, settled)


def is_unsettled(scalars: Mapping[str, Any]) -> bool:
    """Whether λ's beginning is yet to be chosen: before the first step, and after steps on batches without curvature (all
    of their rows masked, say), as long as these are but the first."""
    return math.isnan(scalars["damping"]) or bool(scalars.get(_UNSETTLED))


def forget_switched_off(config: Config, state: OptimizerState, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Removes from a state what options that are off have left in it: it would be stale once they are on again. Returns the
    scalars that stay."""
    # of each option: whether it is on, its entries of parameters, its numbers
    kept: list[tuple[bool, Sequence[str], Sequence[str]]] = [
        (config.averaging > 0, (AVERAGE,), ()),
        (config.damping_rule == "held-out", (MOVED,), HELD_OUT_NUMBERS),
        (Preconditioner(config.preconditioner) is Preconditioner.KRONECKER, FACTORS, FACTOR_NUMBERS),
        (config.cg_noise is not None, (), (CAUTIOUS,)),
        (config.damping == "auto", (), (_FLOOR, _UNSETTLED)),
    ]
    entries = [name for on, names, _ in kept if not on for name in names]
    for p in list(state):
        remember(state, p, **dict.fromkeys(entries))
    numbers = {name for on, _, names in kept if not on for name in names}
    return {name: value for name, value in scalars.items() if name not in numbers}


def make_solver(config: Config, scalars: dict[str, Any], rows: int) -> Solver:
    """CG's rules for short runs."""
    solver = Solver(most=iterations(config, scalars))
    if not config.cg_worth:
        return solver
    compared = Backtracking(config.backtracking) is Backtracking.ALL
    return replace(solver, stop=marginal_value(*prices(curvature_share(config, rows), compared=compared)))


def curvature_share(config: Config, rows: int) -> float:
    return 1.0 if config.curvature_batch is None else min(1.0, config.curvature_batch / rows)
