"""A rule for λ that hears unseen data: what the next batch says of the last step. Beyond the paper; off by default.

On the batch that made a step, ρ is near 1 long after the step has begun to fit the batch's noise, and λ sinks until training
diverges. The next batch has not been seen. On it, with the same masks before and after,

    Δ = f(θ) - f(θ - s)   the step's change of the objective: one forward pass, f(θ) comes with the gradient anyway
    e = ∇f(θ)'s           the slope at the step's end: an inner product
    b = 2Δ - e            the slope at its beginning, if f is quadratic along s.

    q = Δ / b

is 1 for a step so short that f is linear along it, ½ where the step ends at the minimum along itself, 0 where it gained
nothing. A slope on unseen data in the denominator, instead of the promise of the batch that made the step, is what gives λ a
balance: however noisy the batches, q tends to 1 as λ grows, so λ cannot rise without bound.

Single verdicts are noisy. Δ and b, in units of what steps gain on their own batch, are averaged over recent steps, a
verdict of more than three units counting as three. λ moves only where the averages say so by more than their standard
error (one and a half of it to rise); the further from the balance, the faster, and faster up than down: the averages are
late, and what a λ that fell too far has done to the parameters stays done. Where b itself is lost in noise, or positive,
unseen data have nothing to say of the step's length: λ stays, and a larger batch would be the answer; unless steps cost
unseen data more than half of what they gain on their own. A single step that cost unseen data more than it gained raises λ
at once. A change that is lost in rounding comes from a step that is too short to matter: it counts as q = 1.
"""

import math
from dataclasses import astuple, dataclass, fields

from shf.damping.levenberg import LevenbergMarquardt, adapt_damping
from shf.local import Local
from shf.state import Memory, Move

LOW, HIGH = 0.05, 0.25
"""q below LOW raises λ, above HIGH lowers it."""
_MEMORY = 0.85
"""What a step keeps of the averages: about a dozen steps count."""
_ENOUGH = 1 + _MEMORY + _MEMORY**2 - 1e-9
"""The weight of the averages after three steps: fewer say nothing of their own noise."""
_SURE = 1.5
"""By how many standard errors the averages must be beyond a threshold for λ to rise; one for it to fall."""
_MOST = 3.0
"""Units that a single verdict may count at most, either way."""
_HARM = 0.5
"""Where the slope is lost in noise, the least harm to unseen data, in units of the gain, that raises λ."""
_COSTLY = 1.0
"""The harm of a single step to unseen data, in units of its gain, from which λ rises at once."""
_FASTEST_UP, _FASTEST_DOWN = 4.0, 2.0
"""The most powers of the damping factor by which λ rises and falls in a step."""
_PREFIX, _UNIT, _GAIN = "heldout_", "heldout_unit", "heldout_gain"
MOVED = "moved"
"""The name of the last move in the optimizer's state."""


@dataclass(frozen=True)
class Averages:
    """Running sums of what unseen batches said: Δ, b and their products, and the sum of weights that belongs to them."""

    weight: float = 0.0
    change: float = 0.0
    slope: float = 0.0
    change_squared: float = 0.0
    change_slope: float = 0.0
    slope_squared: float = 0.0

    def hear(self, change: float, slope: float) -> "Averages":
        new = (1.0, change, slope, change * change, change * slope, slope * slope)
        return Averages(*(_MEMORY * old + value for old, value in zip(astuple(self), new, strict=True)))

    @property
    def quotient(self) -> float:
        """q of the averages; -∞ where the steps were uphill from the start."""
        return self.change / self.slope if self.slope < 0 else -math.inf

    def beyond(self, threshold: float) -> float:
        """Mean of Δ - threshold·b in units of its standard error: positive where q is below the threshold."""
        square = self.change_squared - 2 * threshold * self.change_slope + threshold**2 * self.slope_squared
        return self._in_errors(self.change - threshold * self.slope, square)

    @property
    def descent(self) -> float:
        """Mean of -b in units of its standard error: how surely steps begin downhill on unseen data."""
        return self._in_errors(-self.slope, self.slope_squared)

    def _in_errors(self, total: float, square: float) -> float:
        mean = total / self.weight
        # (Σw)² / Σw²: how many equally weighted ones they are worth; 1 - (1 - m) Σw is mⁿ after n of them
        count = self.weight * (1 + _MEMORY) / (2 - (1 - _MEMORY) * self.weight)
        variance = max(square / self.weight - mean * mean, 0.0) / max(count - 1, 0.25)
        return mean / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, mean) if mean else 0.0


def powers(averages: Averages, low: float = LOW, high: float = HIGH) -> float:
    """How many powers of the damping factor λ is to move: negative to raise it, 0 within the balance or the noise."""
    q = averages.quotient
    if averages.weight < _ENOUGH:
        return 0.0
    if averages.descent < 1:
        harm = averages.change / averages.weight
        return -_pace(harm - _HARM, _FASTEST_UP) if harm > _HARM and averages.beyond(0.0) > _SURE else 0.0
    if q < low and averages.beyond(low) > _SURE:
        return -_pace((low - q) / 0.5, _FASTEST_UP)
    if q > high and averages.beyond(high) < -1:
        return _pace((q - high) / (0.9 - high), _FASTEST_DOWN)
    return 0.0


def _pace(distance: float, fastest: float) -> float:
    """1 near the balance, up to the fastest far off."""
    return 1.0 + (fastest - 1.0) * min(max(distance, 0.0), 1.0)


def _clipped(units: float) -> float:
    return min(max(units, -_MOST), _MOST)


@dataclass(frozen=True, kw_only=True)
class HeldOut(LevenbergMarquardt):
    """λ moves by what the next batch says of a step; a small ρ still raises it, one near 1 says nothing."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return (MOVED,)

    @property
    def numbers(self) -> tuple[str, ...]:
        return (*super().numbers, _UNIT, _GAIN, *(_PREFIX + field.name for field in fields(Averages)))

    def listen(self, damping: float, here: Local) -> float:
        step, unit = here.memory.vector(MOVED), float(here.memory.number(_UNIT, 0.0))
        if step is None or unit <= 0:
            return damping
        step = here.own(step)
        change = here.value - here.f(step, -1.0)
        slope = 2 * change + here.dot(here.downhill, step)
        if not (math.isfinite(change) and math.isfinite(slope)):
            return damping
        lost = abs(change) < 2 * here.noise  # of either evaluation
        verdict = (-1.0, -1.0) if lost else (_clipped(change / unit), _clipped(slope / unit))
        averages = _averages(here.memory).hear(*verdict)
        here.memory.keep(**{_PREFIX + f.name: getattr(averages, f.name) for f in fields(Averages)})
        costly = not lost and change > _COSTLY * unit
        return damping * math.pow(self.factor, -_FASTEST_UP if costly else powers(averages))

    def end(self, damping: float, rho: float, here: Local) -> float:
        return adapt_damping(damping, rho, self.factor, rise=self.rise, high=math.inf)

    def moved(self, move: Move, gain: float, here: Local) -> None:
        """Remembers the move, and the unit of the verdict on this step: what it gained on its own batch, or a third of what
        steps before it did."""
        memory, known = here.memory, float(here.memory.number(_GAIN, 0.0))
        average = gain if known <= 0 else _MEMORY * known + (1 - _MEMORY) * gain
        memory.keep_vector(MOVED, move.difference())
        averages = _averages(memory)
        memory.keep(**{_UNIT: max(gain, average / 3), _GAIN: average})
        memory.keep(**{_PREFIX + f.name: getattr(averages, f.name) for f in fields(Averages)})

    def _largest_rise(self) -> float:
        return _FASTEST_UP


def _averages(memory: Memory) -> Averages:
    return Averages(*(memory.number(_PREFIX + field.name, 0.0) for field in fields(Averages)))
