"""One CG iteration where little of a step survives its batch. Beyond the paper; off by default.

With f_k for f on the batch of step k and η for the share of αδ_k that is made, the survival of what steps gain is

    Σ (f_k(θ_k) - f_{k+1}(θ_{k+1})) / Σ gain_k,    gain_k = (2η - η²) (f_k(θ_k) - f_k(θ_k + αδ_k)).

It is 1 where batches agree, and near 0 where the next batch finds f as high as if there had been no step: most of the step
has fitted its own batch. ρ does not see that. A preconditioned gradient then has most of what there is to learn, and
further CG iterations fit the batch. Differences between batches cancel in the upper sum, but for the first and the last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shf.component import Component, number, option

_LOST, _LEFT, _GAINED, _FALLS, _GAINS = _NUMBERS = (
    "survival_lost",
    "survival_left",
    "survival_gained",
    "survival_falls",
    "survival_gains",
)
"""Whether too little survived; f and the gain of the last step; both sums."""
_MEMORY = 0.95
"""What a step keeps of the sums: about twenty steps count."""


@dataclass(frozen=True, kw_only=True)
class Survival(Component):
    """A single CG iteration where steps gain on their own batches alone."""

    least: float | None = option(
        None,
        number(above=0.0, below=1.0, words=(None,)),
        """CG makes one iteration while less than this share of what steps gain on their own batches survives on the next;
        None for always ζ (see [docs/fast.md](fast.md)).""",
        name="cg_survival",
    )

    @property
    def numbers(self) -> tuple[str, ...]:
        return () if self.least is None else _NUMBERS

    def limit(self, iterations: int, numbers: Mapping[str, Any]) -> int:
        """ζ of the next step."""
        return 1 if self.least is not None and numbers.get(_LOST) else iterations

    def after(
        self, numbers: Mapping[str, Any], share: float, value: float, fall: float, noise: float
    ) -> dict[str, Any]:
        """What to remember of a step.

        Args:
            numbers: as they were before it.
            share: η.
            value: f(θ), as a mean over rows: batches may grow.
            fall: what f falls by along αδ, on the step's own batch.
            noise: what f may change by through rounding alone.
        """
        if self.least is None:
            return {}
        falls = _MEMORY * numbers.get(_FALLS, 0.0) + numbers.get(_LEFT, value) - value
        gains = _MEMORY * numbers.get(_GAINS, 0.0) + numbers.get(_GAINED, 0.0)
        lost = falls + noise < self.least * gains
        return dict(zip(_NUMBERS, (lost, value, (2 - share) * share * fall, falls, gains), strict=True))
