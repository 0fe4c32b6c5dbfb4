"""L(F(θ)) on the rows of one batch that are here, with this step's masks: value, gradient, curvature.

The rows of a batch may be spread over processes. With B_i of B rows on process i, a mean over rows is f = Σ_i (B_i/B) f_i,
and so are gradient and preconditioner; products weigh by the share C_i/C of the curvature rows. A sum over rows is a plain
sum. What is here is one process's part; `shf.problems.shared` adds the parts, and the weight decay once.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from torch import Tensor

from shf.data.batches import Batch
from shf.distributed.collective import Share
from shf.linear.flat import all_finite
from shf.losses import Loss, Reduction
from shf.model.gaussnewton import GaussNewton
from shf.model.network import Network
from shf.preconditioners.base import GradientPass, Preparation
from shf.probing.layout import Layout
from shf.problems.noise import half_difference
from shf.problems.part import Parts, Roots, no_parts
from shf.problems.passes import Passes
from shf.runtime.diagnosis import bad_batch


class BatchProblem:
    """L(F(X; θ), T) on one batch, at and around the network's present θ, and its curvature on some of the rows.

    Args:
        network: F with its present parameters.
        loss: L.
        batch: X^g, or this process's share of it.
        layout: how the model treats rows.
        curvature_rows: the rows of X^c within the whole X^g; None for all.
        seed: of this step's draws.
        microbatch: the most rows in memory at once.
        structural_damping: [μ].
        noise: whether the gradient's noise is to be measured.
        share: which of the rows of X^g this process holds; by default all.
        represents: rows that the curvature stands for where the loss is a sum; by default those of the whole batch.
        products: whether products with B are sure to be asked for.

    Attributes:
        rows: of X^g, that are here.
        total: rows of the whole X^g.
        scale: rows of the whole X^g where L is a sum over them, else 1.
        outputs: entries of the model's outputs on the rows here, once `linearise` has seen them.
    """

    names: Sequence[str] = ()

    def __init__(
        self,
        network: Network,
        loss: Loss,
        batch: Batch,
        layout: Layout,
        *,
        curvature_rows: Tensor | None = None,
        seed: int = 0,
        microbatch: int | None = None,
        structural_damping: float = 0.0,
        noise: bool = False,
        share: Share | None = None,
        represents: int | None = None,
        products: bool = False,
    ) -> None:
        self.network, self.loss = network, loss
        self.rows, self.outputs = batch.rows, 0
        self._passes = Passes(
            network, batch, layout, share, seed=seed, microbatch=microbatch, steady=structural_damping > 0
        )
        self._share = share = share or Share(0, batch.rows, batch.rows)
        self.total = share.total
        self.scale = share.total if loss.reduction is Reduction.SUM else 1
        self._represents = share.total if represents is None else represents
        self._batch, self._layout = batch, layout
        self._curvature_rows = curvature_rows
        self._structural = structural_damping
        self._products = products
        self._noise = noise and share.total > 1  # a single row says nothing of it
        # J and L of the gradient pass, where products are over the same rows; what products need
        self._shared: GradientPass | None = None
        self._curved: Callable[..., GaussNewton] | None = None
        self._own_curvature_rows = batch.beside(share.within(curvature_rows))  # those of X^c here; None for all

    def linearise(self, preparation: Preparation) -> Parts:
        """L, ∇L, and what a preconditioner takes from the same pass, over the rows that are here."""
        if self._batch.rows == 0:
            return no_parts(self.network, diagonal=preparation.diagonal, noise=self._noise)
        rows = self._own_curvature_rows
        # where all rows here are curvature rows, one graph serves both
        products, squares = self._products and rows is None, preparation.diagonal
        J, L = self._passes.expand(
            self.loss, record=preparation.record, steady=rows is None, products=products, squares=squares
        )
        self.outputs, value = sum(u.numel() for u in L.gradient), L.value.item()
        if not math.isfinite(value):
            self._refuse(f"loss {self.loss.name} is {value} at the present parameters, before the step")
        weight = self.weight
        layout = self._layout
        treated = layout.calls, layout.cases is not None, layout.ragged
        pass_ = GradientPass(J, L, self.loss.reduction, *treated, self._passes.signs, weight, preparation.costs)
        gradient, diagonal = preparation.pull(pass_)
        if not all_finite(gradient):
            self._refuse("the gradient is not finite at the present parameters, before the step")
        self.network.refuse_reshaped(J.buffers)
        if spoiled := self.network.spoiled(J.buffers):
            self._refuse(f"the batch would make {', '.join(spoiled)} not finite")
        if rows is None:
            self._shared, self._curved = pass_, partial(GaussNewton, J, L.hessian())
        if weight != 1:
            value, gradient = weight * value, gradient.mul_(weight)
            diagonal = None if diagonal is None else diagonal.mul_(weight)
        noise = None
        if self._noise:
            noise = half_difference(J, [weight * u for u in L.gradient], gradient, self._share)
        return Parts(value, gradient, diagonal, J.buffers, noise)

    def curvature(self, damping: float = 0.0, out: Tensor | None = None) -> GaussNewton | None:
        """v ↦ (B + λμS)v, this process's part of it; None where no curvature rows are here.

        S = (1/C) Σ_i J_h,i'J_h,i over the C curvature rows: ½v'Sv is half the squared change of the tensors that the model
        holds steady, summed over them and averaged over rows. It is a mean also where the loss is a sum: λ, which stands
        before it, already has the loss's scale.
        """
        rows = self._own_curvature_rows
        here = self._batch.rows if rows is None else len(rows)
        if not here:
            return None
        everywhere = self._share.total if self._curvature_rows is None else len(self._curvature_rows)
        scale = (self._represents if self.loss.reduction is Reduction.SUM else here) / everywhere
        if self._curved is None:
            J, L = self._passes.expand_some(self.loss, rows)
            self._curved = partial(GaussNewton, J, L.hessian())
        self._shared = None  # what else there is of L goes
        return self._curved(scale=scale, steadiness=damping * self._structural / everywhere, out=out)

    @property
    def size(self) -> tuple[int, int]:
        """Rows of R in `roots`, and parameters; once `linearise` has seen the outputs."""
        return self.outputs, self.network.shapes.total

    @property
    def can_be_written_out(self) -> bool:
        """Whether `roots` may be asked for: all rows here, and products over them."""
        return self._share.everything and self._own_curvature_rows is None and not self.structural

    def roots(self, most: int) -> Roots:
        """B = R'R in full; R has at most so many numbers."""
        return self._passes.roots(self.loss, self._shared, most)

    @property
    def curvature_share(self) -> float:
        """Curvature rows among all rows: what a product costs."""
        return 1.0 if self._curvature_rows is None else len(self._curvature_rows) / self._share.total

    @property
    def structural(self) -> bool:
        """Whether there is structural damping."""
        return self._structural > 0

    @property
    def weight(self) -> float:
        """Of this process's part in sums over all processes."""
        return self._share.rows / self._share.total if self.loss.reduction is Reduction.MEAN else 1.0

    def value(self, values: Sequence[Tensor]) -> float:
        """L at other values of the parameters, weighted; a non-finite number is returned as it is: a failed trial, not an
        error."""
        if self._batch.rows == 0:
            return 0.0
        outputs = self._passes.outputs(values)
        return self.weight * self.loss(outputs, self._batch.targets).item()

    def _refuse(self, words: str) -> NoReturn:
        raise bad_batch(words, self._batch, self.network.parameters)
