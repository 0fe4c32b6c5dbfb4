"""Batches that are iterated again and again, each time the same."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from shf.data.batches import Count
from shf.data.draws import mix
from shf.data.tree import leaves, parts

_CHUNK = 2**20
_RIGHT = (
    "all of the data is a list (or a DataLoader) of pairs, the curvature batch is one pair: "
    "optimizer.step([(x, y), (x2, y2)], curvature=(x, y))"
)


def sizes_of(batches: Iterable[Any], count: Count) -> list[int]:
    """The rows of each batch; refuses what cannot be iterated twice, or is not the same then."""
    if not isinstance(batches, Iterable):
        raise TypeError(f"HF.step: batches is a {type(batches).__name__}; {_RIGHT}")
    if iter(batches) is batches:
        raise TypeError(
            f"batches is a one-time iterator ({type(batches).__name__}): expected something that can be iterated "
            "again, such as a list or a DataLoader"
        )
    sizes: list[int] = []
    seen: list[int] = []
    for inputs, targets in map(pair, batches):
        seen = seen or _checksums((inputs, targets))
        sizes.append(count(inputs))
    shuffles = isinstance(getattr(batches, "sampler", None), RandomSampler)
    if shuffles or seen != _checksums(next(iter(batches), None)):
        raise ValueError(
            f"batches is a {type(batches).__name__} that shuffles or draws: iterated twice, it begins with different "
            "batches, and every evaluation in a step must see the same; give a DataLoader without a random sampler and "
            "without random augmentation, or a list of batches"
        )
    return sizes


def pair(batch: Any, what: str = "each of batches") -> tuple[Any, Any]:
    """Inputs and targets of a batch; refuses what is none, by what it was given as."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        one = isinstance(batch, tuple | list) and len(batch) == 1 and isinstance(batch[0], tuple | list)
        length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        found = f"a {type(batch).__name__}{length}, not a pair" + (": is it a list of batches?" if one else "")
        raise TypeError(f"HF.step: expected {what} to be (inputs, targets), got {found}; {_RIGHT}")
    return batch[0], batch[1]


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A number that depends on every bit of a tensor and on its place; costs one pass over it and no memory.

    Each entry's bits are weighted by an odd number of its own, modulo 2⁶⁴: a change of one entry always shows, and changes
    of several cancel only by accident.
    """
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[tensor.element_size()]
    bits = tensor.detach().reshape(-1).view(width)
    weights = torch.arange(min(len(bits), _CHUNK), device=bits.device).mul_(2).add_(1).mul_(0x2545F4914F6CDD1D)
    sums = [int((chunk.long() * weights[: len(chunk)]).sum()) for chunk in bits.split(_CHUNK)]
    return mix(*sums)


def _checksums(batch: Any) -> list[int]:
    """What tells a batch from another, as far as it is made of tensors."""
    return [checksum(part) for t in leaves(batch) for part in parts(t)]
