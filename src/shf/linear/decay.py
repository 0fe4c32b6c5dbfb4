"""Weight decay: the penalty ½ Σ_i w_i ‖θ_i‖² with one weight w_i for each parameter tensor. No network here."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

import torch
from torch import Tensor

from shf.linear.flat import Shapes


@dataclass(frozen=True)
class Decay:
    """W = diag(w), constant on every parameter tensor: nothing of θ's size is stored, and zeros cost nothing.

    Attributes:
        shapes: how a flat vector is made of parameters.
        weights: w_i, one per parameter.
    """

    shapes: Shapes
    weights: tuple[float, ...]

    @classmethod
    def none(cls, shapes: Shapes) -> "Decay":
        return cls(shapes, (0.0,) * len(shapes.shapes))

    def within(self, first: int, last: int) -> "Decay":
        """W of entries first … last - 1 of a flat vector, as if their pieces were parameters of their own."""
        ends = list(accumulate(self.shapes.sizes))
        starts = [end - size for end, size in zip(ends, self.shapes.sizes, strict=True)]
        overlaps = [min(end, last) - max(start, first) for start, end in zip(starts, ends, strict=True)]
        pieces = [(n, w) for n, w in zip(overlaps, self.weights, strict=True) if n > 0]
        return Decay(Shapes(tuple(torch.Size([n]) for n, _ in pieces)), tuple(w for _, w in pieces))

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return any(self.weights)

    def penalty(self, values: Sequence[Tensor]) -> float:
        """½ θ'Wθ for θ in pieces."""
        if not self.any:
            return 0.0
        weighted = [(w, v.reshape(-1)) for w, v in zip(self.weights, values, strict=True) if w]
        squares = torch.stack([torch.dot(v, v) for _, v in weighted]).tolist()  # the device is asked once
        return 0.5 * sum(w * float(square) for (w, _), square in zip(weighted, squares, strict=True))

    def add_gradient_(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """out + Wθ in place, θ in pieces: the penalty's gradient."""
        if self.any:
            for w, piece, v in zip(self.weights, self.shapes.split(out), values, strict=True):
                if w:
                    piece.add_(v, alpha=w)
        return out

    def add_product_(self, out: Tensor, vector: Tensor, damping: float) -> Tensor:
        """out + (W + λI)v in place: what damps a product."""
        for begin, end, w in self._runs:
            if w + damping:
                out[begin:end].add_(vector[begin:end], alpha=w + damping)
        return out

    def add_diagonal_(self, out: Tensor, damping: float) -> Tensor:
        """out + w + λ, entry by entry, in place."""
        for begin, end, w in self._runs:
            out[begin:end].add_(w + damping)
        return out

    @cached_property
    def _runs(self) -> list[tuple[int, int, float]]:
        """Where in a flat vector a weight begins and ends to hold; neighbours that share one are one run."""
        ends = accumulate(self.shapes.sizes)
        runs = [list(run) for _, run in groupby(zip(ends, self.weights, strict=True), itemgetter(1))]
        borders = pairwise([0, *(run[-1][0] for run in runs)])
        return [(begin, end, run[0][1]) for (begin, end), run in zip(borders, runs, strict=True)]
