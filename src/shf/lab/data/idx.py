"""The idx format of MNIST: two zero bytes, a type code, the number of axes, their lengths (big-endian), the values.

Only unsigned bytes (code 8) are read or written here.
"""

from __future__ import annotations

import math
import struct

import numpy as np
from numpy.typing import NDArray

from .errors import DamagedDataError

UNSIGNED_BYTE = 8
_LARGEST = 1 << 40


def decode(content: bytes, *, axes: int, label: str = "idx data") -> NDArray[np.uint8]:
    """The array in ``content``, which must have ``axes`` axes and exactly the bytes its header promises."""
    start = 4 + 4 * axes
    expected = bytes([0, 0, UNSIGNED_BYTE, axes])
    if len(content) < start or content[:4] != expected:
        raise DamagedDataError(
            f"{label}: starts with {content[:4].hex()}, expected {expected.hex()} (idx, {axes} axes)."
        )
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DamagedDataError(f"{label}: its header promises {shape}, but {len(content) - start} values follow.")
    if math.prod(length or 1 for length in shape) > _LARGEST:  # empty, with axes too long for numpy
        raise DamagedDataError(f"{label}: its header promises {shape}.")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def encode(values: NDArray[np.uint8]) -> bytes:
    """The idx bytes of an array; ``decode(encode(a), axes=a.ndim)`` is ``a``."""
    header = bytes([0, 0, UNSIGNED_BYTE, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.tobytes()
