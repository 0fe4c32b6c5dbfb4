"""A single CG iteration where the model of a noisy batch is not to be trusted. Beyond the paper; off by default.

ρ < ¼ says that a step went farther than its batch's model holds. With a good preconditioner the first CG iteration takes
most of what a batch knows about the objective; where gradients are mostly noise, the others go on to fit that noise along
directions of small curvature, ρ fails, and λ rises until nothing moves fast. Fewer iterations mend what a larger λ would
only hide.
"""

from collections.abc import Mapping
from typing import Any

from shf.config import Config

_CAUTIOUS = "cautious"


def iterations(config: Config, scalars: Mapping[str, Any]) -> int:
    """ζ of the next step."""
    return 1 if scalars.get(_CAUTIOUS) else config.cg_iterations


def remember(config: Config, scalars: Mapping[str, Any], rho: float, noise: float | None) -> dict[str, bool]:
    """For the optimizer's state: after ρ < ¼ one iteration must do, until noise (where it was measured) is within bounds.

    Args:
        config: `cg_noise` is the bound; None to be never cautious.
        scalars: the optimizer's, of before the step.
        rho: the step's reduction ratio.
        noise: share of the gradient's squared length that is noise; None where this step did not measure it.
    """
    if config.cg_noise is None:
        return {}
    if rho < 0.25:
        return {_CAUTIOUS: True}
    clear = noise is not None and noise <= config.cg_noise
    return {_CAUTIOUS: bool(scalars.get(_CAUTIOUS)) and not clear}
