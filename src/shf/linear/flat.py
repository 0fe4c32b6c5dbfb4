"""Parameters as one flat vector θ, and back."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap

import torch
from torch import Tensor

Dots = Callable[..., list[float]]
"""The inner products of any number of pairs of flat vectors."""


def read(*scalars: Tensor) -> list[float]:
    """Numbers that lie on a device, each a tensor without dimensions: the host waits for all of them once."""
    if len(scalars) == 1:
        return [scalars[0].item()]
    numbers: list[float] = torch.stack(scalars).tolist() if scalars else []
    return numbers


def inner_products(*pairs: tuple[Tensor, Tensor]) -> list[float]:
    """a'b of each pair (a, b)."""
    return read(*starmap(torch.dot, pairs))


def all_finite(vector: Tensor) -> bool:
    """Whether every entry of a flat vector is finite.

    One pass where the sum of squares is finite; only where it is not (it may have overflowed) are entries looked at.
    """
    return math.isfinite(torch.dot(vector, vector).item()) or _entries_finite(vector, inner_products)


def finite(*vectors: Tensor, dots: Dots = inner_products) -> list[bool]:
    """The same of several vectors, each of which may be but a part of a longer one."""
    squares = dots(*zip(vectors, vectors, strict=True))
    return [math.isfinite(s) or _entries_finite(v, dots) for v, s in zip(vectors, squares, strict=True)]


def _entries_finite(vector: Tensor, dots: Dots) -> bool:
    others = torch.isfinite(vector).logical_not_().to(vector.dtype)
    return dots((others, others)) == [0.0]


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
