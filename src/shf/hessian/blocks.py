"""L'' where it is indefinite: the blocks that it consists of, and the positive part of each.

With V diag(s) V' = L'' the positive part is V diag(max(s, 0)) V', the nearest matrix that is positive semi-definite. Where
L'' has no entries but within blocks, such as those of the rows of a batch, its positive part is that of each block.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Product = Callable[[Sequence[Tensor]], list[Tensor]]
"""u ↦ L''u, over the outputs that L depends on."""

LARGEST = 1024
"""Numbers of a block, at most,"""
MOST_NUMBERS = 2**27
"""and of all blocks: 1 GiB in double precision."""


@dataclass(frozen=True)
class Arrangement:
    """Entries of some tensors as a matrix with a row for each block.

    Attributes:
        shapes: of the tensors.
        cases: rows along axis 0 of each; 1 where they have not the same number.
        places: into how many blocks a case falls, each with an equal share of every tensor.
        last: whether the numbers of a place lie side by side, (places, numbers); else they are (numbers, places).
        joined: whether all cases are one block, case by case.
    """

    shapes: Sequence[torch.Size]
    cases: int
    places: int = 1
    last: bool = True
    joined: bool = False

    @cached_property
    def widths(self) -> list[int]:
        """Numbers that a place has of each tensor."""
        return [shape.numel() // (self.cases * self.places) for shape in self.shapes]

    @property
    def size(self) -> tuple[int, int]:
        """Blocks, and K, numbers of a block."""
        blocks, numbers = self.cases * self.places, sum(self.widths)
        return (1, blocks * numbers) if self.joined else (blocks, numbers)

    @property
    def fits(self) -> bool:
        """Whether the blocks may be written out."""
        blocks, numbers = self.size
        return numbers <= LARGEST and blocks * numbers**2 <= MOST_NUMBERS

    @property
    def in_words(self) -> str:
        size = self.size[1]
        return (
            f"all rows together, {size} outputs" if self.joined else f"blocks of {size}" if size > 1 else "each output"
        )

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """(blocks, K)."""
        pieces = [
            z.reshape(self.cases, self.places, n) if self.last else z.reshape(self.cases, n, self.places).mT
            for z, n in zip(tensors, self.widths, strict=True)
        ]
        return torch.cat(pieces, 2).reshape(self.size)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The tensors again."""
        pieces = packed.reshape(self.cases, self.places, -1).split(self.widths, 2)
        return [
            (piece if self.last else piece.mT).reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)
        ]

    def blocks(self, product: Product, like: Tensor) -> Tensor:
        """(blocks, K, K), by one product for each of a block's numbers."""
        columns = []
        for k in range(self.size[1]):
            unit = like.new_zeros(self.size)
            unit[:, k] = 1
            columns.append(self.pack(product(self.unpack(unit))))
        return torch.stack(columns, 2)


def arrangements(tensors: Sequence[Tensor]) -> Iterator[Arrangement]:
    """By places of each case, the finest first, and by cases."""
    shapes, cases = [z.shape for z in tensors], rows_of(tensors) or 1
    common = math.gcd(*(shape.numel() // cases for shape in shapes))
    small = [n for n in range(1, math.isqrt(common) + 1) if common % n == 0]
    for places in sorted({*small, *(common // n for n in small)}, reverse=True):
        found = Arrangement(shapes, cases, places)
        yield found
        if places > 1 and max(found.widths) > 1:
            yield Arrangement(shapes, cases, places, last=False)


def rows_of(tensors: Sequence[Tensor]) -> int:
    """Along axis 0 of all; 0 where they have not the same number."""
    rows = {len(z) if z.ndim else 0 for z in tensors}
    return rows.pop() if len(rows) == 1 else 0


@dataclass(frozen=True)
class PositivePart:
    """Of L'', by eigenvalues (blocks, K), those that are negative set to 0, and eigenvectors (blocks, K, K)."""

    arrangement: Arrangement
    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, arrangement: Arrangement, blocks: Tensor) -> "PositivePart":
        number = torch.finfo(blocks.dtype)  # numbers that all but underflow become nan in LAPACK
        values, vectors = torch.linalg.eigh(blocks.where(blocks.abs() > number.tiny / number.eps, 0))
        return cls(arrangement, values.clamp_min(0), vectors)

    @cached_property
    def roots(self) -> Tensor:
        """S with SS' = the positive part of each block."""
        return self.vectors * self.values.sqrt().unsqueeze(1)

    @cached_property
    def matrices(self) -> Tensor:
        return self.roots @ self.roots.mT

    def __call__(self, u: Sequence[Tensor]) -> list[Tensor]:
        """Its product with u."""
        return self._apply(self.matrices, u)

    def sample(self, signs: Sequence[Tensor]) -> list[Tensor]:
        """Sξ, of independent ±1."""
        return self._apply(self.roots, signs)

    def _apply(self, blocks: Tensor, u: Sequence[Tensor]) -> list[Tensor]:
        return self.arrangement.unpack((blocks @ self.arrangement.pack(u).unsqueeze(2)).squeeze(2))


def is_indefinite(product: Product, tensors: Sequence[Tensor]) -> bool:
    """Whether L'' is found to have negative eigenvalues.

    Two products, of a random u and of L''u, show the smallest eigenvalue that Lanczos' method finds in two steps, of each
    case and of all together: of two numbers a case it is the case's own.
    """
    u = random_like(tensors)
    first = product(u)
    second = product(first)
    cases = _cases(tensors)
    of_all, _, _ = _lowest(*map(replace(cases, joined=True).pack, (u, first, second)))
    of_each, vectors, least = _lowest(*map(cases.pack, (u, first, second)))
    if not bool((of_all < least).any() | (of_each < least).any()):
        return False
    if bool((of_all < least).any()):
        return True
    # cases that influence each other have no eigenvalues of their own: v'L''v decides
    lone = torch.zeros_like(vectors)
    lone[of_each.argmin()] = vectors[of_each.argmin()]
    return bool((lone * cases.pack(product(cases.unpack(lone)))).sum() < 0.5 * least * lone.square().sum())


def positive_part(product: Product, tensors: Sequence[Tensor], name: str) -> PositivePart:
    """Of L'', by the finest blocks that it proves to have.

    Raises:
        ValueError: if the blocks are too large to be written out.
    """
    u = random_like(tensors)
    expected, cases = product(u), _cases(tensors)
    joined = replace(cases, joined=True)
    apart = _is_uncoupled(cases, product, u)
    for arrangement in arrangements(tensors) if apart else ():
        if arrangement.fits and _is_uncoupled(arrangement, product, u):
            blocks = arrangement.blocks(product, tensors[0])
            if _is_close(blocks @ arrangement.pack(u).unsqueeze(2), arrangement.pack(expected).unsqueeze(2)):
                return PositivePart.of(arrangement, blocks)
    for arrangement in (joined, cases) if apart else (joined,):  # where rounding decides nothing can be proved
        if arrangement.fits:
            return PositivePart.of(arrangement, arrangement.blocks(product, tensors[0]))
    raise ValueError(_too_large(name, cases if apart else joined))


def _cases(tensors: Sequence[Tensor]) -> Arrangement:
    return Arrangement([z.shape for z in tensors], rows_of(tensors) or 1)


def random_like(tensors: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Without structure."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(z.shape, generator=source).to(z) for z in tensors]


def _lowest(u: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of H in the span of u and Hu, given with H²u as (blocks, K): the lower eigenvalue of each block, that of

        [α β; β γ],   α = u'Hu/u'u,   w = Hu - αu,   β = |w|/|u|,   γ = w'Hw/w'w,

    its vector, and the number that eigenvalues must be below to be negative beside the largest, and not by rounding.
    """
    eps, squares, size = torch.finfo(u.dtype).eps, u.square().sum(1), first.square().sum(1)
    alpha = (u * first).sum(1) / squares
    w = first - alpha[:, None] * u
    beyond = w.square().sum(1)
    gamma, beta = (w * (second - alpha[:, None] * first)).sum(1) / beyond, (beyond / squares).sqrt()
    low = (alpha + gamma) / 2 - ((alpha - gamma).square() / 4 + beta.square()).sqrt()
    vectors = (beta / squares.sqrt())[:, None] * u + ((low - alpha) / beyond.sqrt())[:, None] * w
    is_eigenvector = beyond <= _ROUNDING * eps * size
    least = -(eps**0.5) * (size / squares).sqrt().max()
    return alpha.where(is_eigenvector, low), u.where(is_eigenvector[:, None], vectors), least


def _is_uncoupled(arrangement: Arrangement, product: Product, u: Sequence[Tensor]) -> bool:
    """Whether L''u is zero, beside what counts as negative, outside of the blocks that u is in: a random half of them."""
    blocks = arrangement.size[0]
    inside = u[0].new_zeros(blocks, 1)
    inside[torch.randperm(blocks, generator=torch.Generator().manual_seed(0))[: (blocks + 1) // 2]] = 1
    found = arrangement.pack(product(arrangement.unpack(inside * arrangement.pack(u))))
    squares = found.square().sum(1)
    return bool((squares * (1 - inside[:, 0])).max() <= torch.finfo(found.dtype).eps / _ROUNDING * squares.max())


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).square().sum() <= torch.finfo(found.dtype).eps * expected.square().sum())


def _too_large(name: str, arrangement: Arrangement) -> str:
    blocks, numbers = arrangement.size
    what = f"all rows together have {numbers} outputs" if arrangement.joined else f"{blocks} rows have {numbers} each"
    return (
        f"loss {name} is not convex in the outputs, and L'' has too large blocks to take their positive part: {what}, "
        f"expected at most {LARGEST} in a block and {MOST_NUMBERS:,} numbers in all of L''. Return from forward what the "
        "loss is convex in: in place of embeddings that are compared the table of their similarities, with "
        "nn.CrossEntropyLoss on it; or give a smaller curvature_batch"
    )


_ROUNDING = 100.0
