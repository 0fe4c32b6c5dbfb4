"""f(θ) on one batch: model + loss + weight decay, with this step's masks, as Algorithm 1 needs it.

The rows of the batch may be spread over processes. With B_i of B rows on process i, a mean over rows is
f = Σ_i (B_i/B) f_i, and so are gradient and preconditioner; products weigh by the share C_i/C of the curvature rows. A sum
over rows is a plain sum. The decay is added once, after the processes' parts.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shf.algorithm import Curvature, Expansion
from shf.config import Config
from shf.data.batches import Batch
from shf.data.draws import Draws, mix
from shf.data.rows import RowAxis, even_chunks, join_outputs, unlike_shapes
from shf.data.tree import entries, leaves
from shf.distributed.collective import SINGLE, Collective, Share
from shf.errors import NonFiniteError
from shf.linear.flat import all_finite
from shf.losses import Loss, LossExpansion, Reduction
from shf.model.gaussnewton import GaussNewton
from shf.model.jacobian import Jacobian
from shf.model.network import REFUSALS, Network
from shf.preconditioners.diagonal import Preconditioner, gradient_and_diagonal, random_signs
from shf.preconditioners.factors import Block
from shf.preconditioners.kronecker import Renewal
from shf.preconditioners.layerfactors import Sums, explained_gradient, layer_sums, sampled_diagonal
from shf.probing.layout import Layout, batch_statistics, draw_axes, has_minor_draws
from shf.problems.decay import Decay
from shf.problems.noise import half_difference
from shf.problems.points import Points
from shf.problems.terms import Terms, expand_terms, no_terms, own_decay, sum_terms
from shf.runtime.interrupts import poll


@dataclass(frozen=True)
class Settings:
    """What an objective needs to know besides model, loss and data.

    Attributes:
        preconditioner: which.
        exponent: [ξ].
        microbatch: the most rows in memory at once.
        structural_damping: [μ].
        skip: whether all processes are to agree on a batch that is not finite, so as to pass over it together.
        noise: whether the gradient's noise is to be measured.
    """

    preconditioner: Preconditioner = Preconditioner.EMPIRICAL_FISHER
    exponent: float = 0.75
    microbatch: int | None = None
    structural_damping: float = 0.0
    skip: bool = False
    noise: bool = False

    @classmethod
    def of(cls, config: Config, iteration: int) -> "Settings":
        """Those of an optimizer's options, at this iteration."""
        return cls(
            Preconditioner(config.preconditioner),
            config.preconditioner_exponent,
            config.microbatch,
            config.structural_damping,
            skip=config.nonfinite == "skip",
            noise=config.noise_every is not None and iteration % config.noise_every == 0,
        )


PAPER = Settings()


class Objective:
    """f(θ) = L(F(X; θ), T) + ½ Σ w θ² on the gradient batch, its expansion at the network's present θ, and its curvature
    on the rows of the curvature batch.

    Args:
        network: F with its present parameters.
        loss: L.
        batch: X^g, or this process's share of it.
        layout: how the model treats rows.
        curvature_rows: the rows of X^c within the whole X^g; None for all.
        decay: w for every parameter; by default none.
        seed: of this step's draws.
        settings: the rest.
        ranks: the processes that hold shares of X^g.
        share: which of its rows this process holds; by default all.
        renewal: the Kronecker preconditioner of this step, where that is wanted.

    Attributes:
        buffers: the module's buffers as the gradient pass left them; none before it.
        rows: rows of the gradient batch, or of this process's share.
        outputs: entries of the model's outputs on them, once `expand` has seen them.
        represents: rows that the curvature stands for, where the loss is a sum: those of the batch, unless it is but the
            curvature's part of another problem.
    """

    def __init__(
        self,
        network: Network,
        loss: Loss,
        batch: Batch,
        layout: Layout,
        *,
        curvature_rows: Tensor | None = None,
        decay: Decay | None = None,
        seed: int = 0,
        settings: Settings = PAPER,
        ranks: Collective = SINGLE,
        share: Share | None = None,
        renewal: Renewal | None = None,
    ) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.rows, self.outputs = batch.rows, 0
        self._ranks = ranks
        self._share = share = share or Share(0, batch.rows, batch.rows)
        self.represents = share.total
        self._network = network
        self._loss = loss
        self._batch = batch
        self._layout = layout
        self._curvature_rows = curvature_rows
        self._decay = decay or Decay.none(network.shapes)
        self._seed = seed
        self._settings = settings
        self._microbatch = settings.microbatch if (settings.microbatch or batch.rows) < batch.rows else None
        known = None if share.everything and self._microbatch is None else layout.draws
        own = None if share.everything else share.numbers
        self._draws = Draws(mix(seed, 0), share.total, known, minor=has_minor_draws(layout), own=own)
        self._drawless = False  # known after the first pass
        self._shapes: list[Sequence[int]] = []  # of the outputs of the gradient pass
        self._renewal = renewal
        self._for_factors: tuple[Jacobian, LossExpansion] | None = None
        self._for_products: tuple[Jacobian, LossExpansion] | None = None
        self._scratch: Tensor | None = None
        self._points = Points(network, ranks)
        self._explained = [True] * len(renewal.blocks) if renewal is not None else []
        if not ranks.several:  # else where the other processes can be told: in the first pass
            self._refuse_chunks_where_rows_mix()

    def expand(self, damping: float) -> Expansion:
        terms = self._sum_terms()
        exponent, ranks, decay = self._settings.exponent, self._ranks, self._decay
        if not ranks.several:  # for products, P⁻¹r and trial points, of which one is needed at a time
            self._scratch = torch.empty_like(terms.gradient)
        here = expand_terms(terms, self._network, decay, ranks, damping=damping, exponent=exponent, out=self._scratch)
        if self._renewal is None:
            return here
        if self._renewal.due:
            self._renewal.renew(damping, decay, ranks, self._explained, self._own_factors)
            self._for_factors = None
        return replace(here, precondition=self._renewal.solver(decay, ranks))

    def data_terms(self) -> tuple[float, Tensor, Tensor | None]:
        """L, ∇L and the diagonal of P before damping: everything but the decay."""
        total = self._sum_terms()
        return total.value, total.gradient, total.diagonal

    def curvature(self, damping: float = 0.0) -> Curvature:
        """v ↦ (B + λI + λμS)v; the result is the caller's to change, and may be overwritten by the next call, or by P⁻¹'s.

        S = (1/C) Σ_i J_h,i'J_h,i over the C curvature rows: ½v'Sv is half the squared change of the tensors that the model
        holds steady, summed over them and averaged over rows. It is a mean also where the loss is a sum: λ, which stands
        before it, already has the loss's scale.
        """
        rows, size = self._share.within(self._curvature_rows), self._network.shapes.total
        decay = own_decay(self._decay, self._ranks)
        everywhere = self._share.total if self._curvature_rows is None else len(self._curvature_rows)
        here = self._batch.rows if rows is None else len(rows)
        scale = (self.represents if self._loss.reduction is Reduction.SUM else here) / everywhere
        steadiness = damping * self._settings.structural_damping / everywhere
        made: list[GaussNewton] = []

        def own() -> GaussNewton:
            poll()
            if not made:
                made.append(self._gauss_newton(rows, scale, steadiness))
            return made[0]

        def own_part(vector: Tensor) -> Tensor:
            return own()(vector) if here else torch.zeros_like(vector)

        def product(vector: Tensor) -> Tensor:
            whole = self._ranks.whole(vector, size)
            Bv = self._ranks.sum(lambda: own_part(whole), whole)
            return decay.add_product_(Bv, decay.shapes.split(vector), damping)

        def quadratic(vector: Tensor) -> float:
            whole = self._ranks.whole(vector, size)
            along = self._ranks.add(lambda: [own().quadratic(whole) if here else 0.0], 1)[0]
            decayed = 2 * self._decay.penalty(self._network.shapes.split(whole))
            return along + decayed + damping * torch.dot(whole, whole).item()

        def structural(vector: Tensor) -> float:
            whole = self._ranks.whole(vector, size)
            return self._ranks.add(lambda: [own().structural(whole) if here else 0.0], 1)[0]

        return Curvature(product, quadratic, structural) if steadiness else Curvature(product, quadratic)

    def point(self, delta: Tensor, rate: float) -> Tensor:
        return self._points(delta, rate, out=self._scratch)

    def value(self, theta: Tensor) -> float:
        """f(θ); a non-finite number is returned as it is: a failed trial, not an error."""
        shapes = self._network.shapes
        values = shapes.split(self._ranks.whole(theta, shapes.total))
        (total,) = self._ranks.add(lambda: [self._own_value(values)], 1)
        return total + self._decay.penalty(values)

    def _sum_terms(self) -> Terms:
        total = sum_terms(self._ranks, self._own_terms, agree=self._settings.skip)
        self.buffers = total.buffers
        return total

    # --- this process's part -----------------------------------------------------------------------------------------

    @property
    def _weight(self) -> float:
        """Of this process's part in sums over all processes."""
        return self._share.rows / self._share.total if self._loss.reduction is Reduction.MEAN else 1.0

    @property
    def _noise(self) -> bool:
        """Whether the gradient's noise is to be measured; a single row says nothing of it."""
        return self._settings.noise and self._share.total > 1

    def _own_terms(self) -> Terms:
        wanted = self._settings.preconditioner
        if self._batch.rows == 0:
            return no_terms(self._network, wanted, noise=self._noise)
        renew = self._renewal is not None and self._renewal.due
        # where all rows here are curvature rows, one graph serves both
        both = self._share.within(self._curvature_rows) is None
        J = self._make_jacobian(None, record=wanted.diagonal or renew, steady=both)
        self._drawless = not self._draws.drawn
        L = self._loss.expand(J.outputs, self._batch.targets)
        self.outputs, value = sum(u.numel() for u in L.gradient), L.value.item()
        self._shapes = [u.shape for u in L.gradient]
        if not math.isfinite(value):
            raise NonFiniteError(
                f"loss {self._loss.name} is {value} at the present parameters, before the step{self._suspects()}"
            )
        axes = self._layout.calls if self._layout.separable else None
        diagonal: Tensor | None = None
        if self._renewal is not None and renew:
            gradient, self._explained = explained_gradient(J, L.gradient, self._renewal.blocks)
            self._for_factors = (J, L)
        else:
            gradient, diagonal = gradient_and_diagonal(wanted, J, L, self._loss.reduction, axes, self._signs)
        if not all_finite(gradient):
            raise NonFiniteError(
                f"the gradient is not finite at the present parameters, before the step{self._suspects()}"
            )
        self._network.refuse_reshaped(J.buffers)
        if spoiled := self._network.spoiled(J.buffers):
            raise NonFiniteError(f"the batch would make {', '.join(spoiled)} not finite{self._suspects()}")
        if both:
            self._for_products = (J, L)
        if (weight := self._weight) != 1:
            value, gradient = weight * value, gradient.mul_(weight)
            diagonal = None if diagonal is None else diagonal.mul_(weight)
        cotangents = [weight * u for u in L.gradient]
        noise = half_difference(J, cotangents, gradient, self._share) if self._noise else None
        return Terms(value, gradient, diagonal, J.buffers, noise)

    def _own_factors(self, blocks: Sequence[Block], others: Sequence[int]) -> tuple[Sequence[Sums], dict[int, Tensor]]:
        """Sums of layers' inputs and root gradients over this process's rows, and diagonals of other parameters."""
        if self._for_factors is None:  # no rows here
            zeros = self._network.parameters[0].new_zeros
            empty = [Sums(zeros(b.inputs, b.inputs), zeros(b.outputs, b.outputs), 0) for b in blocks]
            return empty, {i: zeros(self._network.shapes.shapes[i]) for i in others}
        J, L = self._for_factors
        # E[uu'] = L'' of this share; the whole batch's L'' is the weighted sum of the shares'
        roots = [math.sqrt(self._weight) * u for u in L.hessian_root(self._signs)]
        sums = layer_sums(J, roots, blocks) if blocks else []
        axes = self._layout.calls if self._layout.separable else None
        diagonals = sampled_diagonal(J, roots, axes, others) if others else {}
        J.forget_calls()
        return sums, diagonals

    def _gauss_newton(self, rows: Tensor | None, scale: float, steadiness: float) -> GaussNewton:
        J, L = self._for_products or self._expand_curvature(rows)
        self._for_products = None  # what the products do not need of them goes with them
        return GaussNewton(J, L.hessian(), scale=scale, steadiness=steadiness, out=self._scratch)

    def _expand_curvature(self, rows: Tensor | None) -> tuple[Jacobian, LossExpansion]:
        if self._layout.obstacle is not None and rows is not None:  # it has run on all: it is not the inputs' fault
            raise ValueError(
                f"curvature_batch: the model cannot be run on {len(rows)} of its {self._batch.rows} rows: "
                f"{self._layout.obstacle}; use curvature_batch=None"
            )
        J = self._make_jacobian(rows, record=False, steady=True)
        return J, self._expand_some(J, rows)

    def _expand_some(self, J: Jacobian, rows: Tensor | None) -> LossExpansion:
        """L on some rows; where it cannot be had because outputs are padded to another length there, that is said."""
        try:
            return self._loss.expand(J.outputs, self._batch.take_targets(rows))
        except REFUSALS as error:
            outputs = [z for z in leaves(J.outputs) if z.is_floating_point()]
            for i, (z, shape) in enumerate(zip(outputs, self._shapes, strict=False)):
                if (axis := self._axis(i)) is not None and axis.resized(z.shape, 0) != axis.resized(shape, 0):
                    raise unlike_shapes("curvature_batch", [z.shape, shape], "some rows and on all") from error
            raise

    def _own_value(self, values: Sequence[Tensor]) -> float:
        if self._batch.rows == 0:
            return 0.0
        chunks: Sequence[Tensor | None] = (
            [None] if self._microbatch is None else even_chunks(self._batch.rows, self._microbatch)
        )
        outputs = join_outputs([self._outputs(values, rows) for rows in chunks], self._layout.outputs)
        return self._weight * self._loss(outputs, self._batch.targets).item()

    def _signs(self, output: Tensor, number: int, draw: int) -> Tensor:
        """Independent ±1: drawn for the whole batch's output, of which this is this process's rows."""
        seed, axis = mix(self._seed, 1) + draw, self._axis(number)
        if axis is None or self._share.everything:
            return random_signs(output, seed)
        whole = random_signs(output.new_empty(axis.resized(output.shape, self._share.total)), seed)
        return axis.take(whole, self._share.numbers)

    def _axis(self, number: int) -> RowAxis | None:
        """Where the rows lie in the output with this number; along axis 0 where the layout says nothing."""
        axes = self._layout.outputs
        return axes[number] if number < len(axes) else RowAxis(0)

    def _outputs(self, values: Sequence[Tensor], rows: Tensor | None) -> Any:
        inputs = self._batch.take_inputs(rows)
        with torch.no_grad(), nullcontext() if self._drawless else self._draws.over(rows):
            return self._network(values, inputs)

    def _make_jacobian(self, rows: Tensor | None, *, record: bool, steady: bool) -> Jacobian:
        self._refuse_chunks_where_rows_mix()
        if self._draws.axes is not None and not self._draws.drawn:
            self._draws.axes = draw_axes(self._network, self._batch, self._layout, mix(self._seed, 0))
        return Jacobian(
            self._network,
            self._batch,
            self._draws,
            rows=rows,
            microbatch=self._microbatch,
            axes=self._layout.outputs,
            record=record,
            steady=steady and self._settings.structural_damping > 0,
        )

    def _refuse_chunks_where_rows_mix(self) -> None:
        if self._microbatch is not None and not self._layout.separable:
            names = batch_statistics(self._network.model)
            found = f"has batch statistics in {', '.join(names)}" if names else "has rows that influence each other"
            if self._layout.obstacle is not None:
                found = f"cannot be run on some of its rows ({self._layout.obstacle})"
            raise ValueError(
                f"microbatch={self._microbatch}: the model {found}, so its outputs on a chunk are not those on the whole "
                "batch; use microbatch=None, a smaller batch, or model.eval() for such layers"
            )

    def _suspects(self) -> str:
        """What in the batch or the parameters is not finite, for an error message."""
        found = [
            what
            for what, tensors in (
                ("inputs", leaves(self._batch.inputs)),
                ("targets", leaves(self._batch.targets)),
                ("parameters", self._network.parameters),
            )
            if any(not bool(torch.isfinite(entries(t)).all()) for t in tensors if t.is_floating_point())
        ]
        return f" (not finite: {', '.join(found)})" if found else " (inputs, targets and parameters are finite)"
