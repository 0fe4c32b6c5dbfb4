"""Plain numbers out of a MATLAB file (MAT 5) that may come from anywhere: the original CURVES, whose checksum nobody knows.

Every length is compared with the bytes that are there, and unpacking ends at a limit. Files whose sha256 is pinned
need no such care: scipy reads them.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DamagedDataError

HEADER_BYTES = 128
MATRIX, COMPRESSED = 14, 15  # types of the outermost elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
DENSE = range(6, 16)  # classes of matrices: double, single, and integers
COMPLEX = 0x0800  # flag


def read_variables(content: bytes, names: Sequence[str], *, limit: int, label: str) -> dict[str, NDArray[Any]]:
    """The dense arrays ``names``, in the types they are stored in, of a file that unpacks to at most ``limit`` bytes."""
    order = {b"IM": "<", b"MI": ">"}.get(content[126:HEADER_BYTES])
    if order is None or struct.unpack(f"{order}H", content[124:126]) != (0x0100,):
        raise DamagedDataError(f"{label}: not a MAT 5 file (of version 7.3? Save it with MATLAB's option -v7).")
    try:
        found = dict(_matrices(memoryview(content)[HEADER_BYTES:], order, limit))
    except (ValueError, KeyError, struct.error, zlib.error) as fault:
        raise DamagedDataError(f"{label}: not a readable MAT file ({type(fault).__name__}: {fault}).") from fault
    chosen = {}
    for name in names:
        if (values := found.get(name)) is None:
            what = "not an array of numbers" if name in found else "absent"
            raise DamagedDataError(f"{label}: variable {name} is {what}. The file holds {sorted(found) or 'nothing'}.")
        chosen[name] = values
    return chosen


def _matrices(content: memoryview, order: str, left: int) -> Iterator[tuple[str, NDArray[Any] | None]]:
    """Name and values of every variable; values None where they are not dense real numbers."""
    for kind, body in _elements(content, order):
        if kind == COMPRESSED:
            unpacked = zlib.decompressobj().decompress(body, left + 1)
            left -= len(unpacked)
            if left < 0:
                raise ValueError("it unpacks to more bytes than expected")
            ((kind, body),) = _elements(memoryview(unpacked), order)
        if kind != MATRIX:
            raise ValueError(f"an element of type {kind} where a matrix should be")
        yield _matrix(body, order)


def _matrix(body: memoryview, order: str) -> tuple[str, NDArray[Any] | None]:
    (_, flags), (_, lengths), (_, name), *values = _elements(body, order)
    (flag,) = struct.unpack_from(f"{order}I", flags)
    if flag & 0xFF not in DENSE or flag & COMPLEX:
        return str(name, "latin-1"), None
    ((kind, raw),) = values
    shape = np.frombuffer(lengths, f"{order}u4").tolist()
    return str(name, "latin-1"), np.frombuffer(raw, order + NUMBERS[kind]).reshape(shape, order="F")


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and content of one element after the other: a tag of type and length, then so many bytes, padded to eight.

    Up to four bytes may be packed into the tag itself, with the length in the upper half of the first word.
    """
    position = 0
    while position < len(content):
        kind, size = struct.unpack_from(f"{order}II", content, position)
        start, following = position + 8, position + 8 + size + (0 if kind == COMPRESSED else -size % 8)
        if kind >> 16:
            kind, size, start, following = kind & 0xFFFF, kind >> 16, position + 4, position + 8
        if size > len(content) - start:
            raise ValueError(f"an element promises {size} bytes, {len(content) - start} are there")
        yield kind, content[start : start + size]
        position = following
