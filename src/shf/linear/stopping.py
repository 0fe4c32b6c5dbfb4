"""When CG ends before ζ iterations, and which iterates it keeps: rules as parts of an optimizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shf.component import Component, flag, number, option
from shf.linear.cg import keep_all, never

_CAUTIOUS = "cautious"


def relative_progress(tolerance: float) -> Callable[[Sequence[float]], bool]:
    """Martens' test: stop at iteration j once (q_j - q_{j-k}) / q_j < kε and q_j < 0, with k = max(10, j/10)."""

    def stop(values: Sequence[float]) -> bool:
        j = len(values) - 1  # values[0] is the start's
        k = max(10, j // 10)
        return j > k and values[j] < 0 and (values[j] - values[j - k]) / values[j] < k * tolerance

    return stop


def geometric(base: float) -> Callable[[int], bool]:
    """Keep the iterates ⌈base^i⌉, i = 0, 1, … (Martens: base 1.3)."""

    def keep(number: int) -> bool:
        i = math.floor(math.log(number) / math.log(base)) if number > 1 else 0
        return any(math.ceil(base**e) == number for e in (i - 1, i, i + 1) if e >= 0)

    return keep


GRADIENT, EVALUATION, PRODUCT = 1.0, 1 / 3, 4 / 3
"""What passes over the gradient batch cost, in gradients, by their matrix products."""


def marginal_value(fixed: float, each: float) -> Callable[[Sequence[float]], bool]:
    """Stop once an iteration gains less per cost than the step as a whole does (the marginal value rule).

    With q_j the model's value after j iterations, a step that ends there gains -q_j for fixed + j·each. That quotient is
    largest where (q_{j-1} - q_j) / each falls below it: from there on, a new step on a new batch gains more.

    Args:
        fixed: the price of a step besides CG: its gradient, the start's product, the evaluations around it.
        each: the price of an iteration, in the same unit.
    """

    def stop(values: Sequence[float]) -> bool:
        j = len(values) - 1
        gained, latest = -values[j], values[j - 1] - values[j]
        return gained > 0 and latest * (fixed + j * each) < gained * each

    return stop


def prices(curvature_share: float, *, compared: bool) -> tuple[float, float]:
    """What a step costs besides CG, and what an iteration does: the arguments of `marginal_value`, in gradients.

    Args:
        curvature_share: the part of the rows that products are over.
        compared: whether f is evaluated at every iterate.
    """
    return GRADIENT + EVALUATION + PRODUCT * curvature_share, PRODUCT * curvature_share + EVALUATION * compared


@dataclass(frozen=True, kw_only=True)
class Stopping(Component):
    """CG runs to its limit and keeps all iterates (§4.1). One of one's own is a subclass.

    What a rule is asked before each run:
    """

    def stop(self, curvature_share: float, *, compared: bool) -> Callable[[Sequence[float]], bool]:
        """Sees q at the start and after every iteration; true ends the run.

        Args:
            curvature_share: the part of the rows that products are over.
            compared: whether f is evaluated at every iterate.
        """
        return never

    def keep(self) -> Callable[[int], bool]:
        """Which iterates to keep, by 1-based number."""
        return keep_all


@dataclass(frozen=True, kw_only=True)
class MarginalValue(Stopping):
    """CG may end once an iteration gains less per cost than the step as a whole."""

    worth: bool = option(
        False, flag, "stop CG before ζ once an iteration gains less per cost than the step as a whole.", name="cg_worth"
    )

    def stop(self, curvature_share: float, *, compared: bool) -> Callable[[Sequence[float]], bool]:
        return marginal_value(*prices(curvature_share, compared=compared)) if self.worth else never


@dataclass(frozen=True, kw_only=True)
class RelativeProgress(Stopping):
    """Martens' rules for long runs: CG ends when its progress is small, and every iterate ⌈spacing^i⌉ takes part in
    backtracking."""

    tolerance: float = option(
        5e-4,
        number(least=0.0),
        "[ε] CG stops once the relative progress over the last k iterations is below kε.",
        name="progress_tolerance",
    )
    spacing: float = option(
        1.3, number(above=1.0), "iterates ⌈spacing^i⌉ are kept for backtracking.", name="iterate_spacing"
    )

    def stop(self, curvature_share: float, *, compared: bool) -> Callable[[Sequence[float]], bool]:
        return relative_progress(self.tolerance)

    def keep(self) -> Callable[[int], bool]:
        return geometric(self.spacing)


@dataclass(frozen=True, kw_only=True)
class Caution(Component):
    """A single CG iteration where the model of a noisy batch is not to be trusted.

    ρ < ¼ says that a step went farther than its batch's model holds. With a good preconditioner the first CG iteration takes
    most of what a batch knows about the objective; where gradients are mostly noise, the others go on to fit that noise
    along directions of small curvature, ρ fails, and λ rises until nothing moves fast. Fewer iterations mend what a larger
    λ would only hide.
    """

    noise: float | None = option(
        None,
        number(least=0.0, below=1.0, words=(None,)),
        """after a step with ρ < ¼ CG makes one iteration, until `noise_every` measures at most this share of noise in a
        gradient; None for always ζ (see [docs/fast.md](fast.md)).""",
        name="cg_noise",
    )

    @property
    def numbers(self) -> tuple[str, ...]:
        return () if self.noise is None else (_CAUTIOUS,)

    def limit(self, iterations: int, numbers: Mapping[str, Any]) -> int:
        """ζ of the next step."""
        return 1 if self.noise is not None and numbers.get(_CAUTIOUS) else iterations

    def after(self, numbers: Mapping[str, Any], ratio: float, noise: float | None) -> dict[str, bool]:
        """What to remember of a step with this ρ, and this share of noise in its gradient where that was measured."""
        if self.noise is None:
            return {}
        clear = noise is not None and noise <= self.noise
        return {_CAUTIOUS: ratio < 0.25 or (bool(numbers.get(_CAUTIOUS)) and not clear)}
