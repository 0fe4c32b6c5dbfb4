"""Whether processes are about to do the same thing: facts compared as text, tensors by checksum. No messages here."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shf.data.draws import mix

_CHUNK = 2**20
_NAMED = 5
"""How many differences an error spells out."""


def to_text(facts: Mapping[str, Any]) -> str:
    """Facts as JSON, equal for equal facts."""
    return json.dumps(facts, sort_keys=True, ensure_ascii=False, default=str)


def differences(texts: Sequence[str]) -> tuple[str, list[int]]:
    """In what the processes' facts differ from the first one's, in words, and which processes those are."""
    first = _entries(json.loads(texts[0]))
    found, ranks = [], []
    for rank, text in enumerate(texts[1:], start=1):
        other = _entries(json.loads(text))
        keys = [key for key in {**first, **other} if str(first.get(key, _ABSENT)) != str(other.get(key, _ABSENT))]
        found += [
            f"{key} is {first.get(key, _ABSENT)} on rank 0, {other.get(key, _ABSENT)} on rank {rank}" for key in keys
        ]
        ranks += [rank] if keys else []
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "; ".join(found[:_NAMED]) + more, ranks


_ABSENT = "absent"


def _entries(facts: Any, path: str = "") -> dict[str, Any]:
    """Nested facts as path → value."""
    if not isinstance(facts, dict):
        return {path: facts}
    return {k: v for key, value in facts.items() for k, v in _entries(value, f"{path}.{key}" if path else key).items()}


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


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: checksum(t) for name, t in tensors.items()}
