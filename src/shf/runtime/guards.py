"""What a step does about bad batches, steps that do not move, and memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shf.component import Component, one_of, option, whole
from shf.data.batches import Batch
from shf.errors import FloorWarning, NonFiniteError
from shf.info import DampingBound, StepInfo
from shf.runtime.context import warn
from shf.runtime.diagnosis import diagnose, diagnose_held


@dataclass(frozen=True, kw_only=True)
class Guards(Component):
    """Bad batches, steps that do not move, memory."""

    incidental: ClassVar[bool] = True

    nonfinite: str = option(
        "raise",
        one_of("raise", "skip"),
        """what to do with a batch whose loss or gradient is not finite before the step: "raise" an error, or "skip" it.
        Either way everything stays as it is; a skipped batch is reported in `StepInfo.skipped`, and the next step is as if
        it had not been there.""",
    )
    max_rejections: int | None = option(
        50,
        whole(least=1, optional=True),
        """after so many steps in a row that did not move the parameters, an `SHFWarning` says what λ, ρ, gradient and batch
        look like and what to try; None for never.""",
    )
    microbatch: int | None = option(
        None, whole(least=1, optional=True), "the most rows that are in memory at once; None for no bound."
    )

    def first(self) -> dict[str, Any]:
        return {"rejections": 0, "held": 0}

    def count(self, numbers: Mapping[str, Any], info: StepInfo, batch: Batch, described: str) -> dict[str, Any]:
        """Steps in a row that did not move the parameters, and those that the floor under λ held short, this one included;
        a warning when they are too many, of the second kind once.

        It comes before anything is written: where warnings are errors, the step has not happened.
        """
        rejections = 0 if info.accepted else int(numbers["rejections"]) + 1
        if rejections == self.max_rejections:
            warn(diagnose(info, rejections, batch, described))
        held = int(numbers.get("held", 0))
        if held < _HELD:
            held = held + 1 if _is_held(info) else 0
            if held == _HELD:
                warn(diagnose_held(info, held), FloorWarning)
        return {"rejections": rejections, "held": held}

    def pass_over(self, error: NonFiniteError, damping: float) -> StepInfo:
        """A batch that is not finite: raises, or passes over it, and the next step is as if it had not been there."""
        if self.nonfinite != "skip":
            raise error
        return StepInfo.of_skipped(damping, str(error))


_HELD = 50
"""Steps in a row: noisy batches do not come near it, on which ρ changes from step to step."""

_NONE = 1e-14
"""λ's default floor, 1e-15, holds nothing."""


def _is_held(info: StepInfo) -> bool:
    """Whether the model kept its word and λ would be lower if it could."""
    at_floor = info.damping_bound is DampingBound.FLOOR and info.damping > _NONE
    return info.accepted and at_floor and info.reduction_ratio > 0.95
