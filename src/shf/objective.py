"""f(θ) on one batch: model + loss + weight decay, with this step's masks, as Algorithm 1 needs it."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shf.batching import Batch
from shf.curvature import GaussNewton
from shf.jacobian import Jacobian
from shf.layout import Layout, batch_statistics
from shf.losses import Loss, LossExpansion, Reduction
from shf.network import Network
from shf.preconditioner import Preconditioner, gradient_and_diagonal, solve_diagonal
from shf.randomness import Draws, mix
from shf.rows import join_outputs
from shf.step import Expansion
from shf.tree import leaves


@dataclass(frozen=True)
class Settings:
    """What an objective needs to know besides model, loss and data."""

    preconditioner: Preconditioner = Preconditioner.EMPIRICAL_FISHER
    exponent: float = 0.75
    microbatch: int | None = None


PAPER = Settings()


class Objective:
    """f(θ) = L(F(X; θ), T) + ½ Σ w θ² on the gradient batch, its expansion at the network's present θ, and its curvature
    on the rows of the curvature batch.

    Args:
        network: F with its present parameters.
        loss: L.
        batch: X^g.
        layout: how the model treats rows.
        curvature_rows: the rows of X^c within X^g; None for all.
        decay: w for every entry of θ; None for none.
        seed: of this step's draws.
        settings: preconditioner and memory bound.

    Attributes:
        buffers: the module's buffers as the gradient pass left them; None before `expand`.
        rows: rows of the gradient batch.
        represents: rows that the curvature stands for, where the loss is a sum.
    """

    def __init__(
        self,
        network: Network,
        loss: Loss,
        batch: Batch,
        layout: Layout,
        *,
        curvature_rows: Tensor | None = None,
        decay: Tensor | None = None,
        seed: int = 0,
        settings: Settings = PAPER,
    ) -> None:
        self.buffers: dict[str, Tensor] | None = None
        self.rows = batch.rows
        self.represents = batch.rows
        self._network = network
        self._loss = loss
        self._batch = batch
        self._layout = layout
        self._rows = curvature_rows
        self._decay = decay
        self._seed = seed
        self._settings = settings
        self._microbatch = settings.microbatch if (settings.microbatch or batch.rows) < batch.rows else None
        self._refuse_what_rows_forbid()
        self._draws = Draws(mix(seed, 0), batch.rows, layout.draws if self._microbatch else None, minor=_minor(layout))
        self._jacobian: Jacobian | None = None
        self._expansion: LossExpansion | None = None

    def expand(self) -> Expansion:
        value, gradient, diagonal = self.data_terms()
        if self._decay is not None:
            theta = self._network.theta()
            value += self._penalty(theta)
            gradient.addcmul_(self._decay, theta)
        exponent, decay = self._settings.exponent, self._decay
        return Expansion(value, gradient, lambda damping: solve_diagonal(diagonal, damping, decay, exponent))

    def data_terms(self) -> tuple[float, Tensor, Tensor | None]:
        """L, ∇L and the diagonal of P before damping: everything but the decay."""
        J = self._make_jacobian(None, record=self._settings.preconditioner is not Preconditioner.NONE)
        L = self._loss.expand(J.outputs, self._batch.targets)
        value = L.value.item()
        if not math.isfinite(value):
            raise ValueError(
                f"loss {self._loss.name} is {value} at the present parameters, before the step{self._suspects()}"
            )
        axes = self._layout.calls if self._layout.separable else None
        gradient, diagonal = gradient_and_diagonal(
            self._settings.preconditioner, J, L, self._loss.reduction, axes, mix(self._seed, 1)
        )
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError(f"the gradient is not finite at the present parameters, before the step{self._suspects()}")
        self.buffers = J.buffers
        if self._rows is None:  # the curvature batch is the gradient batch: its graph serves both
            self._jacobian, self._expansion = J, L
        return value, gradient, diagonal

    def curvature(self) -> GaussNewton:
        J, L = self._jacobian, self._expansion
        if J is None or L is None:
            J = self._make_jacobian(self._rows, record=False)
            L = self._loss.expand(J.outputs, self._batch.take_targets(self._rows))
        scale = self.represents / J.rows if self._loss.reduction is Reduction.SUM else 1.0
        return GaussNewton(J, L.hessian(), self._decay, scale)

    def value(self, theta: Tensor) -> float:
        """f(θ); a non-finite number is returned as it is: a failed trial, not an error."""
        values = self._network.shapes.split(theta)
        chunks: Sequence[Tensor | None] = (
            [None] if self._microbatch is None else torch.arange(self._batch.rows).split(self._microbatch)
        )
        outputs = join_outputs([self._outputs(values, rows) for rows in chunks], self._layout.outputs)
        return self._loss(outputs, self._batch.targets).item() + self._penalty(theta)

    def _outputs(self, values: Sequence[Tensor], rows: Tensor | None) -> Any:
        inputs = self._batch.inputs if rows is None else self._batch.select(self._batch.inputs, rows)
        with torch.no_grad(), self._draws.over(rows) if self._draws.drawn else nullcontext():
            return self._network(values, inputs)

    def _make_jacobian(self, rows: Tensor | None, *, record: bool) -> Jacobian:
        axes, microbatch = self._layout.outputs, self._microbatch
        return Jacobian(
            self._network, self._batch, self._draws, rows=rows, microbatch=microbatch, axes=axes, record=record
        )

    def _penalty(self, theta: Tensor) -> float:
        return 0.0 if self._decay is None else 0.5 * torch.dot(self._decay * theta, theta).item()

    def _refuse_what_rows_forbid(self) -> None:
        if self._microbatch is not None and not self._layout.separable:
            names = batch_statistics(self._network.model)
            found = f"batch statistics in {', '.join(names)}" if names else "rows that influence each other"
            raise ValueError(
                f"microbatch={self._microbatch}: the model has {self._layout.obstacle or found}, so its outputs on a chunk "
                "are not those on the whole batch; use microbatch=None, a smaller batch, or model.eval() for such layers"
            )
        if self._rows is not None and self._layout.obstacle is not None:
            raise ValueError(
                f"curvature_batch={len(self._rows)} of {self._batch.rows} rows: the model cannot be run on some of its "
                f"rows: {self._layout.obstacle}; use curvature_batch=None"
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
            if any(not bool(torch.isfinite(_entries(t)).all()) for t in tensors if t.is_floating_point())
        ]
        return f" (not finite: {', '.join(found)})" if found else " (inputs, targets and parameters are finite)"


def _entries(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.layout == torch.strided else tensor.values()


def _minor(layout: Layout) -> bool:
    return any(axis is not None and axis.minor for axis in layout.draws)
