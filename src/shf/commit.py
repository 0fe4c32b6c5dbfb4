"""The writes at the end of a step: all of them, or nothing."""

import copy
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shf.lastsolution import LastSolution
from shf.model.network import Network
from shf.runtime.interrupts import no_interrupts
from shf.state import OptimizerState


@contextmanager
def all_or_nothing(
    network: Network, theta: Tensor, state: OptimizerState, group: MutableMapping[str, Any], last: LastSolution
) -> Iterator[None]:
    """Around the writes of a step, which nothing interrupts; if one of them fails, what was written is taken back: `theta`
    as it was before, the optimizer's state, its numbers in `group["shf"]`, and the last solution.
    """
    buffers, numbers, solution, states = network.buffers(), group["shf"], copy.copy(last), dict(state)
    with no_interrupts():
        try:
            yield
        except BaseException:
            assign_(network, theta)
            network.assign_buffers_(buffers)
            state.clear()
            state.update(states)
            last.part, last.network = solution.part, solution.network
            group["shf"] = numbers
            raise


@torch.no_grad()
def assign_(network: Network, theta: Tensor) -> None:
    """θ into the parameters."""
    for p, value in zip(network.parameters, network.shapes.split(theta), strict=True):
        p.copy_(value)
