"""Parameters as one flat vector θ, and back."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a, b).item()


def all_finite(vector: Tensor, dot: Callable[[Tensor, Tensor], float] = _dot) -> bool:
    """Whether every entry of a flat vector is finite.

    One pass where the sum of squares is finite; only where it is not (it may have overflowed) are entries looked at.
    """
    if math.isfinite(dot(vector, vector)):
        return True
    others = torch.isfinite(vector).logical_not_().to(vector.dtype)
    return dot(others, others) == 0


@dataclass(frozen=True)
class Shapes:
    """The shapes that a flat vector is made of, in order."""

    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Shapes":
        return cls(tuple(t.shape for t in tensors))

    @cached_property
    def sizes(self) -> list[int]:
        """Entries of each piece."""
        return [math.prod(s) for s in self.shapes]

    @cached_property
    def total(self) -> int:
        """Entries of the whole vector."""
        return sum(self.sizes)

    def flatten(self, tensors: Sequence[Tensor | None], like: Tensor, out: Tensor | None = None) -> Tensor:
        """Joins tensors of these shapes; None stands for zeros (a parameter without influence)."""
        pieces = [
            like.new_zeros(size) if t is None else t if t.ndim == 1 else t.reshape(-1)
            for t, size in zip(tensors, self.sizes, strict=True)
        ]
        return torch.cat(pieces, out=out)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of `vector`, one per shape; no copy."""
        pieces = list(vector.split_with_sizes(self.sizes))  # takes half of the time that `split` does
        for number, shape in self._not_flat:
            pieces[number] = pieces[number].view(shape)
        return pieces

    @cached_property
    def _not_flat(self) -> list[tuple[int, torch.Size]]:
        """The pieces that have other than one dimension."""
        return [(number, shape) for number, shape in enumerate(self.shapes) if len(shape) != 1]
