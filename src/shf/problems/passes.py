"""Forward passes over the rows of a batch that are here, all with the same draws: J of them, and their outputs elsewhere."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shf.data.batches import Batch
from shf.data.draws import Draws, mix, random_signs
from shf.data.rows import RowAxis, even_chunks, join_outputs, unlike_shapes
from shf.data.tree import leaves
from shf.distributed.collective import Share
from shf.hessian import Loss, LossExpansion
from shf.model.jacobian import Jacobian
from shf.model.network import REFUSALS, Network
from shf.preconditioners.base import GradientPass
from shf.probing.layout import Layout, batch_statistics, draw_axes, has_minor_draws
from shf.problems.part import Roots
from shf.problems.roots import write_out


class Passes:
    """F on a batch with one step's draws.

    Args:
        network: F with its present parameters.
        batch: X^g, or this process's share of it.
        layout: how the model treats rows.
        share: which of the rows of X^g these are.
        seed: of the draws.
        microbatch: the most rows in memory at once.
        steady: whether tensors that the model names are to be held steady.
    """

    def __init__(
        self,
        network: Network,
        batch: Batch,
        layout: Layout,
        share: Share | None,
        *,
        seed: int,
        microbatch: int | None,
        steady: bool,
    ) -> None:
        self._network, self._batch, self._layout = network, batch, layout
        self._share = whole = share or Share(0, batch.rows, batch.rows)
        self._seed, self._steady = seed, steady
        self._microbatch = microbatch if (microbatch or batch.rows) < batch.rows else None
        known = None if whole.everything and self._microbatch is None else layout.draws
        own = None if whole.everything else whole.numbers
        self._draws = Draws(mix(seed, 0), whole.total, known, minor=has_minor_draws(layout), own=own)
        self._drawless = False  # known after the first pass
        self._shapes: list[Sequence[int]] = []  # of the outputs of the gradient pass
        if share is None:  # else where the other processes can be told: in the first pass
            self._refuse_chunks_where_rows_mix()

    def expand(
        self, loss: Loss, *, record: bool, steady: bool, products: bool = False, squares: bool = False
    ) -> tuple[Jacobian, LossExpansion]:
        """J and L on all rows that are here; the pass that draws this step's numbers.

        Args:
            loss: L.
            record: whether a preconditioner wants the calls of layers.
            steady: whether products will be over these rows, so that steady tensors are wanted, and
            products: whether the gradient is to leave behind what products need, and
            squares: whether its pass serves per-case squares too.
        """
        J = self._jacobian(None, record=record, steady=steady, products=products, squares=squares)
        L = LossExpansion(loss, J.outputs, self._batch.targets)
        self._shapes = [u.shape for u in L.gradient]
        return J, L

    def expand_some(self, loss: Loss, rows: Tensor | None) -> tuple[Jacobian, LossExpansion]:
        """J and L on some rows. Where they cannot be had, because the model needs all rows or outputs are padded to another
        length on some, that is said."""
        if self._layout.obstacle is not None and rows is not None:  # it has run on all: it is not the inputs' fault
            raise ValueError(
                f"curvature_batch: the model cannot be run on {len(rows)} of its {self._batch.rows} rows: "
                f"{self._layout.obstacle}; use curvature_batch=None"
            )
        J = self._jacobian(rows, record=False, steady=True)
        try:
            return J, LossExpansion(loss, J.outputs, self._batch.take_targets(rows))
        except REFUSALS as error:
            outputs = [z for z in leaves(J.outputs) if z.is_floating_point()]
            for i, (z, shape) in enumerate(zip(outputs, self._shapes, strict=False)):
                if (axis := self.axis(i)) is not None and axis.resized(z.shape, 0) != axis.resized(shape, 0):
                    raise unlike_shapes("curvature_batch", [z.shape, shape], "some rows and on all") from error
            raise

    def roots(self, loss: Loss, known: GradientPass | None, most: int) -> Roots:
        """B = R'R on all rows, from the gradient pass where that is known."""
        J, L = (known.jacobian, known.expansion) if known is not None else self.expand(loss, record=False, steady=False)
        theta = [p.detach() for p in self._network.parameters]
        return write_out(J, L, self.outputs, theta, separable=self._layout.separable, name=loss.name, most=most)

    def outputs(self, values: Sequence[Tensor]) -> Any:
        """F at other values of the parameters, on all rows that are here."""
        if self._microbatch is None:
            return self._outputs(values, None)
        chunks = even_chunks(self._batch.rows, self._microbatch)
        return join_outputs([self._outputs(values, rows) for rows in chunks], self._layout.outputs)

    def signs(self, output: Tensor, number: int, draw: int) -> Tensor:
        """Independent ±1: drawn for the whole batch's output, of which this is this process's rows."""
        seed, axis = mix(self._seed, 1) + draw, self.axis(number)
        if axis is None or self._share.everything:
            return random_signs(output, seed)
        whole = random_signs(output.new_empty(axis.resized(output.shape, self._share.total)), seed)
        return axis.take(whole, self._share.numbers)

    def axis(self, number: int) -> RowAxis | None:
        """Where the rows lie in the output with this number; along axis 0 where the layout says nothing."""
        axes = self._layout.outputs
        return axes[number] if number < len(axes) else RowAxis(0)

    def _jacobian(
        self, rows: Tensor | None, *, record: bool, steady: bool, products: bool = False, squares: bool = False
    ) -> Jacobian:
        self._refuse_chunks_where_rows_mix()
        if self._draws.axes is not None and not self._draws.drawn:
            self._draws.axes = draw_axes(self._network, self._batch, self._layout, mix(self._seed, 0))
        found = Jacobian(
            self._network,
            self._batch,
            self._draws,
            rows=rows,
            microbatch=self._microbatch,
            axes=self._layout.outputs,
            record=record,
            steady=steady and self._steady,
            products=products,
            squares=squares,
        )
        self._drawless = not self._draws.drawn
        return found

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

    def _outputs(self, values: Sequence[Tensor], rows: Tensor | None) -> Any:
        inputs = self._batch.take_inputs(rows)
        with torch.no_grad(), nullcontext() if self._drawless else self._draws.over(rows):
            return self._network(values, inputs)
