"""One process's part of a problem: what it must be able to say, and what a step begins with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shf.linear.roots import Roots
from shf.model.gaussnewton import GaussNewton
from shf.model.network import Network
from shf.preconditioners.base import Preparation

__all__ = ["OwnPart", "Parts", "Roots", "no_parts"]


@dataclass(frozen=True)
class Parts:
    """A process's part of what a step begins with, weighted: L, ∇L, the diagonal that a preconditioner made (if it makes
    one), the buffers that the pass left, and what tells how noisy ∇L is (if that is wanted)."""

    value: float
    gradient: Tensor
    diagonal: Tensor | None
    buffers: dict[str, Tensor]
    noise: Tensor | None = None


def no_parts(network: Network, *, diagonal: bool, noise: bool = False) -> Parts:
    """Those of a process without rows."""
    zeros = torch.zeros_like(network.theta())
    return Parts(0.0, zeros, zeros.clone() if diagonal else None, network.buffers(), zeros.clone() if noise else None)


class OwnPart(Protocol):
    """What one process knows of the problem: see `shf.problems.batch.BatchProblem`."""

    network: Network
    rows: int
    outputs: int
    scale: int
    """By what an objective is divided before it is compared with that of other batches, which may have other numbers of
    rows: the rows of all processes where it is a sum over them."""

    def linearise(self, preparation: Preparation) -> Parts: ...

    def curvature(self, damping: float, out: Tensor | None = None) -> GaussNewton | None: ...

    def value(self, values: Sequence[Tensor]) -> float: ...

    def roots(self, most: int) -> Roots: ...

    @property
    def size(self) -> tuple[int, int]: ...

    @property
    def can_be_written_out(self) -> bool: ...

    @property
    def curvature_share(self) -> float: ...

    @property
    def structural(self) -> bool: ...
