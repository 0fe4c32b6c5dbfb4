"""What a step knows at θ: f, its gradient, and where more can be asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from shf.linear.cg import LinearMap
from shf.linear.flat import Dots, inner_products
from shf.linear.system import LinearSystem
from shf.state import Memory


@dataclass(frozen=True)
class Local:
    """f at and around θ, for the rules of a step.

    Attributes:
        value: f(θ) on X^g.
        downhill: -∇f(θ).
        f: (δ, rate) ↦ f(θ + rate·δ) on X^g; each call is an evaluation.
        at: θ ↦ f(θ) on X^g, of this process's part of another θ; an evaluation, too.
        system: λ ↦ (B + λI) on X^c.
        memory: what was remembered, and what is to be.
        dots: the inner products of pairs of vectors.
        noise: what f may change by through rounding alone.
        own: this process's part of a whole vector.
        mean_eigenvalue: tr(B)/n, and how many products it took; 0 where that is not finite.
    """

    value: float
    downhill: Tensor
    f: Callable[[Tensor, float], float]
    at: Callable[[Tensor], float]
    system: Callable[[float], LinearSystem]
    memory: Memory
    dots: Dots = inner_products
    noise: float = 0.0
    own: Callable[[Tensor], Tensor] = lambda vector: vector
    mean_eigenvalue: Callable[[], tuple[float, int]] = lambda: (0.0, 0)

    def dot(self, a: Tensor, b: Tensor) -> float:
        """The inner product of one pair."""
        return self.dots((a, b))[0]


@dataclass(frozen=True)
class Expansion:
    """f(θ), ∇f(θ), λ ↦ (r ↦ P⁻¹r) and perhaps the gradient's noise, all on the gradient batch; what each term has in f(θ),
    by its name, if it is a sum of terms; and -P_w⁻¹Wθ, once P⁻¹ is made. They are the step's to overwrite."""

    value: float
    gradient: Tensor
    precondition: Callable[[float], LinearMap]
    noise: float | None = None
    terms: Mapping[str, float] | None = None
    decay_step: Callable[[], Tensor | None] = lambda: None
