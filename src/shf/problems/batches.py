"""f, ∇f and P as row-weighted means (or sums) over batches, B from a curvature batch: the problem of `shf.HF`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from shf.distributed.collective import Share
from shf.losses import Reduction
from shf.model.gaussnewton import GaussNewton
from shf.preconditioners.base import Preparation
from shf.problems.batch import BatchProblem
from shf.problems.part import Parts, Roots, no_parts


class BatchesProblem:
    """One process's part of it: some of the batches, and a share of the curvature batch.

    Args:
        batches: makes the problem of each batch, the same at every call; masks are those of the batch's number.
        curvature: of the curvature batch.
        rows: which of the rows of all batches these are.
    """

    structural: bool

    def __init__(self, batches: Callable[[], Iterable[BatchProblem]], curvature: BatchProblem, rows: Share) -> None:
        self.network, self.loss = curvature.network, curvature.loss
        self.rows, self.outputs, self._total = rows.rows, 0, rows.total
        self.scale = rows.total if self.loss.reduction is Reduction.SUM else 1
        self.curvature_share, self.structural = 1.0, curvature.structural
        self._batches, self._curvature = batches, curvature

    def linearise(self, preparation: Preparation) -> Parts:
        """The sum over these batches, weighted by their part of all rows."""
        total = no_parts(self.network, diagonal=preparation.diagonal)
        self.outputs = 0
        for part, weight in self._weighted():
            found = part.linearise(preparation)
            self.outputs += part.outputs
            total.gradient.add_(found.gradient, alpha=weight)
            if total.diagonal is not None and found.diagonal is not None:
                total.diagonal.add_(found.diagonal, alpha=weight)
            total = replace(total, value=total.value + weight * found.value, buffers=found.buffers)
        return total

    def curvature(self, damping: float, out: Tensor | None = None) -> GaussNewton | None:
        return self._curvature.curvature(damping, out)

    @property
    def size(self) -> tuple[int, int]:
        return self._curvature.size

    can_be_written_out = False

    def roots(self, most: int) -> Roots:
        raise ValueError("the curvature batch is not the whole problem: use solver='cg'")

    def value(self, values: Sequence[Tensor]) -> float:
        return sum(weight * part.value(values) for part, weight in self._weighted())

    def _weighted(self) -> Iterator[tuple[BatchProblem, float]]:
        mean = self.loss.reduction is Reduction.MEAN
        for part in self._batches():
            yield part, part.rows / self._total if mean else 1.0
