"""One iteration of an optimizer: its parts put to work, and what comes of it written, or nothing."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shf.algorithm import State, shf_step
from shf.commit import all_or_nothing, assign_
from shf.composition import Config
from shf.data.batches import Batch
from shf.distributed.collective import Collective
from shf.errors import NonFiniteError
from shf.info import StepInfo
from shf.lastsolution import LastSolution
from shf.problems.shared import SharedProblem
from shf.runtime.guards import Guards
from shf.state import Memory, Move, OptimizerState
from shf.update import Update


@dataclass(frozen=True)
class Iteration:
    """What one iteration reads and writes: the optimizer's parts, its state parameter by parameter, its numbers in
    `group["shf"]`, the last solution; and a cache of what follows from them."""

    config: Config
    ranks: Collective
    state: OptimizerState
    group: MutableMapping[str, Any]
    last: LastSolution
    cache: MutableMapping[str, Any]

    @property
    def numbers(self) -> Mapping[str, Any]:
        """As they were before the step."""
        return self.group["shf"]  # type: ignore[no-any-return]

    def run(self, problem: SharedProblem, batch: Batch, described: str) -> StepInfo:
        """A step of Algorithm 1 on this process's part of the vectors, and the writes that follow it. Where steps are
        rejected, the batch is described, as what it is to the step."""
        numbers, network, guards = self.numbers, problem.part.network, self.config.part(Guards)
        memory = Memory(network, self.state, numbers, self.cache)
        method = self.config.method(memory, problem.part.curvature_share)
        gamma = float(numbers["cg_decay"]) if numbers["momentum"] else 0.0
        delta = self.last.read(network, self.state, self.ranks)
        state = State(delta, numbers["damping"], gamma, self.config.update_scale(numbers))
        try:
            moved, after, info, here = shf_step(problem, state, method, memory)
        except NonFiniteError as error:
            info = guards.pass_over(error, numbers["damping"])
            self.group["shf"] = {**numbers, **guards.count(numbers, info, batch, described)}
            return info
        theta = network.theta()
        theta_next = theta if moved is None else self.ranks.whole(moved, network.shapes.total)
        if info.accepted:
            self.config.part(Update).clip_(theta_next, network)
        if info.accepted and torch.equal(theta_next, theta):  # too short a step for the precision of θ
            info = replace(info, accepted=False, step_size=0.0, loss_after=info.loss_before)
        memory.keep(
            damping=after.damping,
            iteration=numbers["iteration"] + 1,
            epoch_loss=numbers["epoch_loss"] + info.loss_before / problem.part.scale,
            epoch_steps=numbers["epoch_steps"] + 1,
            **guards.count(numbers, info, batch, described),
        )
        move = Move(theta, theta_next, accepted=info.accepted)
        info = self.config.finish(method, move, info, here, problem.part.scale)
        with all_or_nothing(network, theta, self.state, self.group, self.last):
            assign_(network, theta_next)
            network.assign_buffers_(problem.buffers)
            self.last.write(after.delta, network, self.state, self.ranks)
            self.group["shf"] = memory.commit()
        return info
