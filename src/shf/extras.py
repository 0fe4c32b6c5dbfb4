"""What is beyond the paper, in one step: made from the settings, absent by default. See docs/fast.md."""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shf.autodamping import FLOOR, START
from shf.averaging import update_average
from shf.caution import Caution, iterations
from shf.config import Config
from shf.factored import FactorMemory, Renewal, Schedule
from shf.heldout import HeldOut
from shf.network import Network
from shf.preconditioner import Preconditioner
from shf.ranks import Ranks
from shf.remembered import OptimizerState
from shf.search import Backtracking
from shf.step import LEVENBERG_MARQUARDT, Rule, Solver, StepInfo
from shf.worth import not_worth, prices


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

    @property
    def rule(self) -> Rule:
        """λ's. Where unseen data judge, a ρ near 1 on the batch itself says nothing; a small one still raises λ."""
        if self.heldout is None:
            return replace(LEVENBERG_MARQUARDT, floor=self.floor)
        return Rule(self.heldout, high=math.inf, floor=self.floor)

    def write(self, before: Tensor, after: Tensor, info: StepInfo) -> dict[str, Any]:
        """Puts what is to be remembered into the optimizer's state; the numbers are the caller's to keep."""
        numbers: dict[str, Any] = {"damping_floor": self.floor} if self.floor else {}
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
    ranks: Ranks,
) -> Extras:
    """The extras that the settings ask for, at the optimizer's present state; λ begins by B's mean eigenvalue if given."""
    iteration, damping, floor = scalars["iteration"], scalars["damping"], scalars.get("damping_floor", 0.0)
    if mean_eigenvalue is not None:
        first, floor = START * mean_eigenvalue or 1.0, FLOOR * mean_eigenvalue
        damping = min(max(first, config.damping_min), config.damping_max)
    renewal = heldout = None
    if Preconditioner(config.preconditioner) is Preconditioner.KRONECKER:
        share = curvature_share(config, rows)
        schedule = Schedule(config.factor_average, config.factor_every, iterations(config, scalars), share)
        renewal = Renewal(memory, network, state, scalars, iteration, schedule)
    if config.damping_rule == "held-out":
        heldout = HeldOut(network, state, scalars, config.damping_factor, ranks)
    caution = None if config.cg_noise is None else Caution(config.cg_noise, scalars)
    return Extras(network, state, damping, iteration, renewal, heldout, caution, floor, config.averaging)


def make_solver(config: Config, scalars: dict[str, Any], rows: int) -> Solver:
    """CG's rules for short runs."""
    solver = Solver(most=iterations(config, scalars))
    if not config.cg_worth:
        return solver
    compared = Backtracking(config.backtracking) is Backtracking.ALL
    return replace(solver, stop=not_worth(*prices(curvature_share(config, rows), compared=compared)))


def curvature_share(config: Config, rows: int) -> float:
    return 1.0 if config.curvature_batch is None else min(1.0, config.curvature_batch / rows)
