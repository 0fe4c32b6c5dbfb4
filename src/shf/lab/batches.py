"""Which rows make which gradient batch: a pure function of the seed and the epoch, so that a resumed run sees the same.

The paper's batches are cut once and cycled every epoch; reshuffling cuts them anew every epoch. No model here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shf.data.batches import select_rows

# Keeps the order of the batches apart from the other things a seed decides (initial weights, dropout masks).
_STREAM = 0x5EED_0001


def batch_rows(cases: int, size: int, *, seed: int, epoch: int, reshuffle: bool = False) -> tuple[Tensor, ...]:
    """The row numbers of every gradient batch of an epoch; the last batch holds the rest. They are cut once, or with
    `reshuffle` anew in every epoch, counted from 0."""
    if cases < 1 or size < 1:
        raise ValueError(f"batch_rows(cases={cases}, size={size}): both must be at least 1")
    generator = torch.Generator().manual_seed(_mix(seed, epoch if reshuffle else 0))
    rows: tuple[Tensor, ...] = torch.split(torch.randperm(cases, generator=generator), size)
    return rows


@dataclass(frozen=True)
class Batches:
    """Batches of data, to be gone through as often as one likes; each is cut out when it is asked for."""

    rows: Sequence[Tensor]
    inputs: Any
    targets: Any

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((select_rows(self.inputs, rows), select_rows(self.targets, rows)) for rows in self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def _mix(seed: int, epoch: int) -> int:
    """One 63-bit seed from two numbers; neighbouring pairs do not collide (odd multipliers, modulo 2⁶³)."""
    return (seed * 0x9E37_79B9_7F4A_7C15 + epoch * 0x2545_F491_4F6C_DD1D + _STREAM) % (1 << 63)
