"""f(θ) = L(F(θ)) + ½ Σ w θ²: the parts of all processes added up, and the weight decay. Above this nobody knows that there
are several processes, but for vectors that they may hold in parts."""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from shf.distributed.collective import SINGLE, Collective
from shf.errors import NonFiniteError
from shf.linear.cg import LinearMap
from shf.linear.decay import Decay
from shf.linear.system import LinearSystem
from shf.local import Expansion
from shf.preconditioners.base import Preparation, Space
from shf.problems.part import OwnPart, Parts
from shf.problems.system import make_system
from shf.problems.trace import mean_eigenvalue


class SharedProblem:
    """One iteration's objective, for Algorithm 1.

    Args:
        part: what this process holds of it.
        decay: w for every parameter.
        collective: the processes that hold parts.
        agree: whether all processes are to agree on a batch that is not finite, so as to pass over it together.
        seed: of probes of the curvature.

    Attributes:
        buffers: the module's buffers as the gradient pass left them; none before it.
        dots: the inner products of pairs of vectors, from everyone's part of them.
        own: this process's part of a whole vector.
    """

    def __init__(
        self,
        part: OwnPart,
        decay: Decay | None = None,
        collective: Collective = SINGLE,
        *,
        agree: bool = False,
        seed: int = 0,
    ) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.part = part
        self._network = part.network
        self._decay = decay or Decay.none(part.network.shapes)
        self._own = Space(0.0, self._decay, collective).own_decay
        self._collective = collective
        self._agree = agree
        self._seed = seed
        self._scratch: Tensor | None = None  # for products, P⁻¹r and trial points, of which one is needed at a time
        self.dots, self.own = collective.dots, collective.own
        self._point: Sequence[Tensor] = ()  # the scratch vector's pieces
        self._along: tuple[Tensor | None, Sequence[Tensor]] = (None, ())  # the last δ, and its pieces

    def linearise(self, preparation: Preparation) -> Expansion:
        """f, ∇f and, for any λ, P⁻¹."""
        collective = self._collective
        parts = self._sum(preparation) if collective.several else self.part.linearise(preparation)
        self.buffers = parts.buffers
        if not collective.several:
            self._scratch = torch.empty_like(parts.gradient)
        diagonal = parts.diagonal
        gradient, noise = self._own.add_gradient_(parts.gradient, self._theta), None
        if parts.noise is not None:
            size, square = collective.dots((gradient, gradient), (parts.noise, parts.noise))
            noise = square / size if size > 0 else None

        def precondition(damping: float) -> LinearMap:
            return preparation.inverse(diagonal, Space(damping, self._decay, collective, self._scratch))

        def decay_step() -> Tensor | None:
            return preparation.decay_step(Space(0.0, self._decay, collective)) if any(self._decay.weights) else None

        terms = dict(zip(self.part.names, parts.terms, strict=True)) or None
        penalty = self._decay.penalty(self._network.parameters)
        return Expansion(parts.value + penalty, gradient, precondition, noise, terms, decay_step)

    def system(self, damping: float) -> LinearSystem:
        """v ↦ (B + λI + λμS + W)v. The result is overwritten by the next product, trial point or P⁻¹r."""
        return make_system(self.part, self._decay, self._collective, damping, self._scratch)

    def point(self, delta: Tensor, rate: float) -> Tensor:
        """θ + rate·δ, in a vector that the next point, the next product or P⁻¹r may overwrite."""
        shapes = self._own.shapes
        if self._scratch is None:
            self._scratch = torch.empty_like(delta)
        if not self._point:
            self._point = shapes.split(self._scratch)
        if self._along[0] is not delta:
            self._along = delta, shapes.split(delta)
        for p, d, piece in zip(self._theta, self._along[1], self._point, strict=True):
            torch.add(p, d, alpha=rate, out=piece)
        return self._scratch

    def value(self, theta: Tensor) -> float:
        """f(θ); a non-finite number is returned as it is: a failed trial, not an error."""
        shapes, collective = self._network.shapes, self._collective
        known = theta is self._scratch and not collective.split
        values = self._point if known else shapes.split(collective.whole(theta, shapes.total))
        if collective.several:
            (total,) = collective.add(lambda: [self.part.value(values)], 1)
        else:
            total = self.part.value(values)
        return total + self._decay.penalty(values)

    @cached_property
    def _theta(self) -> Sequence[Tensor]:
        """θ in pieces; this process's part of it, where vectors are split."""
        if self._collective.split:
            return self._own.shapes.split(self._collective.own(self._network.theta()))
        return [p.detach() for p in self._network.parameters]

    def mean_eigenvalue(self) -> tuple[float, int]:
        """tr(B)/n, and how many products it took."""
        counts = self._collective.add(lambda: [float(self.part.outputs), float(self.part.rows)], 2)
        product = self.system(0.0).product
        return mean_eigenvalue(product, self._network.theta(), counts, self._seed, self._collective)

    def _sum(self, preparation: Preparation) -> Parts:
        """The sum of all processes' parts; buffers are those of the first process with rows.

        Parts that are not finite are an error: that of the process whose rows they are from, or, if the processes are to
        agree on it, a `NonFiniteError` on each of them.
        """
        collective = self._collective
        numbers = 1 + len(self.part.names)
        found: list[Parts] = []
        fault: list[NonFiniteError] = []

        def value() -> list[float]:
            try:
                found.append(self.part.linearise(preparation))
            except NonFiniteError as error:
                if not self._agree:
                    raise
                fault.append(error)
                return [math.nan] * numbers
            return [found[0].value, *found[0].terms]

        total, *terms = collective.add(value, numbers)
        if self._agree and not math.isfinite(total):
            raise fault[0] if fault else NonFiniteError.elsewhere()
        own = found[0]
        gradient = collective.sum(lambda: own.gradient, own.gradient)
        squares, difference = own.diagonal, own.noise
        diagonal = None if squares is None else collective.sum(lambda: squares, squares)
        noise = None if difference is None else collective.sum(lambda: difference, difference)
        return Parts(total, gradient, diagonal, collective.common(own.buffers), noise, terms)
