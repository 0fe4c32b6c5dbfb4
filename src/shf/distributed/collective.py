"""The processes that take a step together, and what they exchange, in the case of one process.

Every sum over rows is handed over as a function that computes this process's part of it. What comes back is the sum over
all processes, bitwise the same on each, so that all decisions made from it are the same too. A function that raises on one
process raises on all: nobody is left waiting.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shf.distributed.contribution import Contribution
from shf.linear.flat import Dots, inner_products


@dataclass(frozen=True)
class Share:
    """Which rows of a whole batch one process holds: `rows` of them from number `first`, of `total`, in rank order."""

    first: int
    rows: int
    total: int

    @property
    def everything(self) -> bool:
        return self.rows == self.total

    @property
    def numbers(self) -> Tensor:
        """Its rows' numbers in the whole batch."""
        return torch.arange(self.first, self.first + self.rows)

    def within(self, rows: Tensor | None) -> Tensor | None:
        """Those of the given rows of the whole batch that lie here, numbered from 0 here; None stands for all."""
        if rows is None:
            return None
        own = rows[(rows >= self.first) & (rows < self.first + self.rows)] - self.first
        return None if len(own) == self.rows else own


@dataclass(frozen=True)
class Agreement:
    """What a process knows of the others before a step: where its share lies, per count, and the common seed."""

    shares: Sequence[Share]
    seed: int


class Collective:
    """The processes of a step. Here there is one, and every sum is its own part; `Replicated` is several.

    Vectors of θ's size may be split over the processes: each computes with its own part, and inner products are summed.
    """

    several = False
    """Whether there is more than one, so that one may hold no rows."""
    split = False
    """Whether vectors are."""
    dots: Dots = staticmethod(inner_products)
    """The inner products of pairs of vectors, from everyone's part of them, in one message."""

    def __repr__(self) -> str:
        return "one process"

    def step(self) -> AbstractContextManager[None]:
        """Surrounds a step: an error that leaves it here is made known to the others."""
        return nullcontext()

    def agree(self, prepare: Callable[[], Contribution]) -> tuple[Contribution, Agreement]:
        """Begins a step: everyone prepares, and makes sure that all are about to do the same thing."""
        own = prepare()
        return own, Agreement([Share(0, n, n) for n in own.counts], own.seed)

    def add(self, numbers: Callable[[], Sequence[float]], count: int) -> list[float]:
        """Sums of `count` numbers, in float64, in one message."""
        return list(numbers())

    def sum(self, vector: Callable[[], Tensor], like: Tensor) -> Tensor:
        """The sum of flat vectors like `like`, in one message: this process's part of it, and the caller's to change."""
        return vector()

    def common(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the first process that holds rows, in one message."""
        return dict(tensors)

    def mine(self, number: int) -> bool:
        """Whether the one of several equal tasks that has this number is this process's to do."""
        return True

    def part(self, size: int) -> range:
        """Which entries of a vector this process holds."""
        return range(size)

    def own(self, vector: Tensor) -> Tensor:
        """This process's part of a whole vector."""
        return vector

    def whole(self, part: Tensor, size: int) -> Tensor:
        """The whole vector of `size` entries, from everyone's part of it."""
        return part


SINGLE = Collective()
