"""The running average of the iterates, for evaluation. Beyond the paper; off by default.

Late in training the iterates move around a point more than towards it; their average is nearer to it than they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shf.model.network import Network
from shf.state import OptimizerState, forget_others, recall, remember

AVERAGE = "average"
"""Its name in the optimizer's state."""


def update_average(network: Network, theta: Tensor, state: OptimizerState, decay: float, iteration: int) -> None:
    """average ← d · average + (1 - d) · θ with d = min(decay, (k + 1)/(k + 10)) after step k = 0, 1, …: early iterates
    are soon forgotten. A parameter that is new begins with itself; that of one which is not trained any more is dropped."""
    keep = min(decay, (iteration + 1) / (iteration + 10))
    for p, value in zip(network.parameters, network.shapes.split(theta), strict=True):
        old = recall(state, p, AVERAGE)
        remember(state, p, **{AVERAGE: value.clone() if old is None else torch.lerp(value, old, keep)})
    forget_others(network, state, AVERAGE)


@contextmanager
def swapped(parameters: Iterator[Tensor], state: OptimizerState) -> Iterator[None]:
    """Inside, the parameters that have an average are it; outside, whatever happened inside, they are themselves."""
    averages = [(p, recall(state, p, AVERAGE)) for p in parameters]
    held = [(p, p.detach().clone(), average) for p, average in averages if average is not None]
    try:
        with torch.no_grad():
            for p, _, average in held:
                p.copy_(average)
        yield
    finally:
        with torch.no_grad():
            for p, own, _ in held:
                p.copy_(own)
