"""Named numeric variables out of a MATLAB file (MAT 5), within a bounded amount of memory.

scipy does the reading. Before that the compressed parts are unpacked here, up to a limit, and every length and
type inside a matrix is checked, because scipy allocates what a length promises and crashes on a type it does not know.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from scipy import io as scipy_io
from scipy import sparse

from .errors import DamagedDataError

HEADER_BYTES = 128
COMPRESSED, MATRIX, FLAGS = 15, 14, 6  # types of elements
NUMERIC_TYPES = frozenset([1, 2, 3, 4, 5, 6, 7, 9, 12, 13])
HEADING = 3  # elements before the values: flags, shape, name
VALUES_OF_CLASS = {5: 3, **dict.fromkeys(range(6, 16), 1)}  # sparse: rows, column starts, values; 6..15: plain numbers
COMPLEX = 0x0800  # flag: one more element
NUMERIC_NAMES = frozenset(
    ["double", "single", "logical", "sparse", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
)


def read_variables(content: bytes, names: Sequence[str], *, limit: int, label: str) -> dict[str, Any]:
    """The variables ``names`` (arrays or sparse matrices) of a MAT file that unpacks to at most ``limit`` bytes."""
    plain = _plain(content, limit, label)
    try:
        # The stubs know only paths; scipy documents any file-like object.
        kinds = {name: kind for name, _, kind in scipy_io.whosmat(io.BytesIO(plain))}  # type: ignore[arg-type]
        for name in names:
            if kinds.get(name) not in NUMERIC_NAMES:
                raise DamagedDataError(
                    f"{label}: variable {name} is {kinds.get(name, 'absent')}, expected numbers. "
                    f"The file holds {sorted(kinds) or 'nothing'}."
                )
        read: dict[str, Any] = scipy_io.loadmat(io.BytesIO(plain), variable_names=list(names))  # type: ignore[arg-type]
        return {name: _numbers(read[name], name, label) for name in names}
    except DamagedDataError:
        raise
    except Exception as fault:  # scipy raises many kinds on a malformed file
        raise DamagedDataError(f"{label}: not a readable MAT file ({type(fault).__name__}: {fault}).") from fault


def _numbers(value: Any, name: str, label: str) -> Any:
    if value.dtype.kind not in "biuf":
        raise DamagedDataError(f"{label}: variable {name} has type {value.dtype}, expected numbers.")
    if isinstance(value, sparse.csc_matrix):
        value.check_format(full_check=True)  # indices out of range would be read as addresses
    return value


def _plain(content: bytes, limit: int, label: str) -> bytes:
    """The same MAT file without compression: header, then every top-level matrix unpacked."""
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None or struct.unpack(f"{order}H", content[124:126]) != (0x0100,):
        raise DamagedDataError(f"{label}: not a MAT 5 file (of version 7.3? Save it with MATLAB's option -v7).")
    parts, left, position = [content[:HEADER_BYTES]], limit, HEADER_BYTES
    while position < len(content):
        kind, size = _tag(content, position, order, label)
        end = position + 8 + size
        if end > len(content):
            raise DamagedDataError(f"{label}: truncated: {size} bytes promised, {len(content) - position - 8} there.")
        whole = content[position + 8 : end]
        part = _inflate(whole, left, label) if kind == COMPRESSED else content[position:end]
        if _tag(part, 0, order, label) != (MATRIX, len(part) - 8):
            raise DamagedDataError(f"{label}: something other than a matrix at byte {position}.")
        _check_elements(part, order, label)
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise DamagedDataError(f"{label}: unpacks to more than the {limit} bytes expected.")
        position = end
    return b"".join(parts)


def _check_elements(matrix: bytes, order: str, label: str) -> None:
    """Flags, shape and name must be there, and of a numeric matrix just the elements that scipy will read."""
    kinds = list(_element_types(matrix, order, label))
    if len(kinds) < HEADING or kinds[0] != FLAGS:
        raise DamagedDataError(f"{label}: a matrix without flags, shape and name.")
    flags: int = struct.unpack_from(f"{order}I", matrix, 16)[0]
    values = VALUES_OF_CLASS.get(flags & 0xFF)
    if values is not None and len(kinds) != HEADING + values + bool(flags & COMPLEX):
        raise DamagedDataError(f"{label}: a numeric matrix of {len(kinds)} elements.")
    if not NUMERIC_TYPES.issuperset(kinds[:HEADING] if values is None else kinds):
        raise DamagedDataError(f"{label}: a matrix with elements of types {kinds}, expected numbers.")


def _element_types(matrix: bytes, order: str, label: str) -> Iterator[int]:
    """Walk the elements of a matrix: each a type, a length and so many bytes, padded to a multiple of eight.

    An element of up to four bytes may be packed into its own tag, with the length in the upper half of the first word.
    """
    position = 8
    while position < len(matrix):
        word, size = _tag(matrix, position, order, label)
        kind, length = (word & 0xFFFF, 0) if word >> 16 else (word, size)
        if position + 8 + length > len(matrix):
            raise DamagedDataError(f"{label}: an element promises {length} bytes, {len(matrix) - position - 8} there.")
        yield kind
        position += 8 + length + -length % 8


def _tag(content: bytes, position: int, order: str, label: str) -> tuple[int, int]:
    """The (type, length) of the element at ``position``."""
    if position + 8 > len(content):
        raise DamagedDataError(f"{label}: truncated at byte {position}.")
    kind, size = struct.unpack_from(f"{order}II", content, position)
    return kind, size


def _inflate(packed: bytes, limit: int, label: str) -> bytes:
    """Unpack at most ``limit + 1`` bytes."""
    try:
        return zlib.decompressobj().decompress(packed, limit + 1)
    except zlib.error as fault:
        raise DamagedDataError(f"{label}: cannot be unpacked ({fault}).") from fault
