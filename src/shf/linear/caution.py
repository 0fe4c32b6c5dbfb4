"""A single CG iteration where the model of a noisy batch is not to be trusted. Beyond the paper; off by default.

ρ < ¼ says that a step went farther than its batch's model holds. With a good preconditioner the first CG iteration takes
most of what a batch knows about the objective; where gradients are mostly noise, the others go on to fit that noise along
directions of small curvature, ρ fails, and λ rises until nothing moves fast. Fewer iterations mend what a larger λ would
only hide.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shf.algorithm import StepInfo
from shf.config import Config

CAUTIOUS = "cautious"
"""Its name among the optimizer's numbers."""


def iterations(config: Config, scalars: Mapping[str, Any]) -> int:
    """ζ of the next step."""
    return 1 if config.cg_noise is not None and scalars.get(CAUTIOUS) else config.cg_iterations


@dataclass(frozen=True)
class Caution:
    """After ρ < ¼ one iteration must do, until noise, where it is measured, is within bounds.

    Attributes:
        bound: of the share of the gradient's squared length that is noise.
        scalars: the optimizer's, of before the step.
    """

    bound: float
    scalars: Mapping[str, Any]

    def write(self, info: StepInfo) -> dict[str, bool]:
        """For the optimizer's state."""
        if info.reduction_ratio < 0.25:
            return {CAUTIOUS: True}
        clear = info.gradient_noise is not None and info.gradient_noise <= self.bound
        return {CAUTIOUS: bool(self.scalars.get(CAUTIOUS)) and not clear}
