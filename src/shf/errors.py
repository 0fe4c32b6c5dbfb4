"""Every exception and warning of the package, in one place."""

from collections.abc import Sequence
from typing import Self

import torch


class NonFiniteError(ValueError):
    """Loss or gradient are not finite at the present parameters: there is nothing to step from."""

    @classmethod
    def of_sum(cls, value: float, gradient_norm: float) -> Self:
        """For an objective whose parts are finite, and their sum is not: over processes, or with the weight decay."""
        return cls(
            f"the objective is {value} and its gradient's norm {gradient_norm} at the present parameters, before the step: "
            "the batch's own are finite, with weight decay or summed over the processes they are not"
        )

    @classmethod
    def elsewhere(cls) -> Self:
        """For a process whose own rows are fine."""
        return cls("loss or gradient of another process's rows are not finite at the present parameters")


class StepMemoryError(torch.OutOfMemoryError):
    """A step did not fit into memory. Parameters, buffers and state are as they were before it.

    Attributes:
        microbatch: the microbatch to try; None where one would not help.
    """

    def __init__(self, message: str, microbatch: int | None = None) -> None:
        super().__init__(message)
        self.microbatch = microbatch


class RankError(RuntimeError):
    """A step ended because of another process: it raised, was killed, does not answer, or disagrees.

    Attributes:
        ranks: the processes at fault, where they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class AmbiguousRowsError(ValueError):
    """A tensor's shape does not say which of its entries belong to which row."""


class SHFWarning(UserWarning):
    """Something in the surroundings of a step that the user may not expect."""


class FloorWarning(SHFWarning):
    """λ at its floor holds steps short."""


class NonConvexLossWarning(SHFWarning):
    """A loss whose curvature in the outputs is taken for its positive part."""
