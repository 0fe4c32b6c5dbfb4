"""Weight decay: the penalty ½ Σ_i w_i ‖θ_i‖² with one weight w_i for each parameter tensor. No network here."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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

    def penalty(self, values: Sequence[Tensor]) -> float:
        """½ θ'Wθ for θ in pieces."""
        weighted = [(w, v.reshape(-1)) for w, v in zip(self.weights, values, strict=True) if w]
        if not weighted:
            return 0.0
        squares = torch.stack([torch.dot(v, v) for _, v in weighted]).tolist()  # the device is asked once
        return 0.5 * sum(w * float(square) for (w, _), square in zip(weighted, squares, strict=True))

    def add_product_(self, out: Tensor, values: Sequence[Tensor], damping: float = 0.0) -> Tensor:
        """out + (W + λI)v in place, v in pieces: the penalty's gradient at v, and its part of a damped product."""
        for w, piece, v in zip(self.weights, self.shapes.split(out), values, strict=True):
            if w + damping:
                piece.add_(v, alpha=w + damping)
        return out

    def add_diagonal_(self, out: Tensor, damping: float) -> Tensor:
        """out + w + λ, entry by entry, in place."""
        for w, piece in zip(self.weights, self.shapes.split(out), strict=True):
            piece.add_(w + damping)
        return out
