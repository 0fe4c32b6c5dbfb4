"""What a preconditioner is: what it wants of the gradient pass, and r ↦ P⁻¹r made of that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from shf.component import Component
from shf.distributed.collective import SINGLE, Collective
from shf.hessian.expansion import LossExpansion, Signs
from shf.linear.cg import LinearMap
from shf.linear.decay import Decay
from shf.losses import Reduction
from shf.model.jacobian import Jacobian
from shf.model.percase import CallAxes
from shf.state import Memory


@dataclass(frozen=True)
class GradientPass:
    """The pass that a gradient comes from, over the rows that are here.

    Attributes:
        jacobian: J on these rows; with layers' inputs and outputs recorded, where that was asked for.
        expansion: L at its outputs.
        reduction: whether L is a mean or a sum over rows.
        calls: where the rows lie in the calls of layers.
        separable: whether each row's output depends on that row alone.
        ragged: whether rows may differ in size within the model.
        signs: independent ±1 for samples of L''.
        weight: of these rows' mean in that of all.
        costs: is told what a part of the pass will cost, in evaluations of the model on all rows, before it begins.
    """

    jacobian: Jacobian
    expansion: LossExpansion
    reduction: Reduction
    calls: CallAxes
    separable: bool
    ragged: bool
    signs: Signs
    weight: float = 1.0
    costs: Callable[[float], None] = lambda evaluations: None

    @property
    def axes(self) -> CallAxes | None:
        """See `squared_vjp`."""
        return self.calls if self.separable else None

    def gradient(self) -> Tensor:
        """J'∂L/∂z, flat."""
        return self.jacobian.vjp(self.expansion.gradient)


@dataclass(frozen=True)
class Space:
    """Where P lives: vectors of θ's size, the damping on them, and the processes that hold parts of them.

    Attributes:
        damping: λ.
        decay: w for every parameter, of all entries.
        collective: the processes.
        out: where P⁻¹r may be put; it is overwritten by the next product.
    """

    damping: float
    decay: Decay
    collective: Collective = SINGLE
    out: Tensor | None = None

    @property
    def own_decay(self) -> Decay:
        """That of the entries that this process holds."""
        if not self.collective.split:
            return self.decay
        part = self.collective.part(self.decay.shapes.total)
        return self.decay.within(part.start, part.stop)

    def own(self, vector: Tensor) -> Tensor:
        """This process's part of a whole vector."""
        return self.collective.own(vector)

    def whole(self, part: Tensor) -> Tensor:
        """The whole vector, from everyone's part of it."""
        return self.collective.whole(part, self.decay.shapes.total)


class Preparation(Protocol):
    """A preconditioner in one step: see `Preconditioner`."""

    @property
    def record(self) -> bool: ...

    @property
    def diagonal(self) -> bool: ...

    def costs(self, evaluations: float) -> None: ...

    def pull(self, pass_: GradientPass) -> tuple[Tensor, Tensor | None]: ...

    def inverse(self, diagonal: Tensor | None, space: Space) -> LinearMap: ...

    def decay_step(self, space: Space) -> Tensor | None: ...


@dataclass(frozen=True, kw_only=True)
class Preconditioner(Component):
    """P of preconditioned CG, the same throughout a step. One of one's own is a subclass with `inverse`, and with `pull`
    where it needs more than the gradient; see docs/extending.md."""

    record: ClassVar[bool] = False
    """Whether it wants the inputs and outputs of layers recorded in the gradient pass."""
    diagonal: ClassVar[bool] = False
    """Whether `pull` gives a diagonal, to be summed over all rows."""
    batches: ClassVar[bool] = True
    """Whether it can be made of several batches, as `shf.HF` does."""

    def begin(self, memory: Memory, work: "Work") -> Preparation:
        """What it does in one step; itself, unless it remembers something."""
        return self

    def costs(self, evaluations: float) -> None:
        """A part of `pull` is about to begin that costs so many evaluations of the model on all rows."""

    def pull(self, pass_: GradientPass) -> tuple[Tensor, Tensor | None]:
        """The gradient J'∂L/∂z of the rows that are here; with it, from the same pass, a diagonal, if `diagonal` says so."""
        return pass_.gradient(), None

    def decay_step(self, space: Space) -> Tensor | None:
        """-P_w⁻¹Wθ for P damped by the weight decay W alone; None where P cannot say."""
        return None

    def inverse(self, diagonal: Tensor | None, space: Space) -> LinearMap:
        """r ↦ P⁻¹r for this λ; the result may be overwritten by the next call. The diagonal, summed over all rows, may be
        overwritten."""
        raise TypeError(f"{type(self).__name__} does not say what P⁻¹r is: define inverse(diagonal, space)")


@dataclass(frozen=True)
class Work:
    """What a step does besides: products of CG, and the share of the rows that each is over. Schedules count by it."""

    cg_iterations: int
    curvature_share: float = 1.0

    @property
    def evaluations(self) -> float:
        """A step without preconditioner in evaluations of the model on all rows: a gradient is three, a product four."""
        return 3 + (self.cg_iterations + 1) * (1 + 4 * self.curvature_share)
