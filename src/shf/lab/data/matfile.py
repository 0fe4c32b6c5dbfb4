"""Named numeric variables out of a MATLAB file (MAT 5), within a bounded amount of memory.

scipy does the reading. Before that the compressed parts are unpacked here, up to a limit, so that scipy sees a plain
file and can never allocate more than lies before it; and the headers are checked, so that only numbers are read.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from scipy import io as scipy_io

from .errors import DamagedDataError

HEADER_BYTES = 128
COMPRESSED, MATRIX = 15, 14
NUMERIC = frozenset(
    ["double", "single", "logical", "sparse", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
)


def read_variables(content: bytes, names: Sequence[str], *, limit: int, label: str) -> dict[str, Any]:
    """The variables ``names`` (arrays or sparse matrices) of a MAT file that unpacks to at most ``limit`` bytes."""
    plain = _plain(content, limit, label)
    try:
        # The stubs know only paths; scipy documents any file-like object.
        kinds = {name: kind for name, _, kind in scipy_io.whosmat(io.BytesIO(plain))}  # type: ignore[arg-type]
        for name in names:
            if kinds.get(name) not in NUMERIC:
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
    return value


def _plain(content: bytes, limit: int, label: str) -> bytes:
    """The same MAT file without compression: header, then every top-level matrix unpacked."""
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    version = struct.unpack(f"{order}H", content[124:126])[0] if order else None
    if version != 0x0100:
        raise DamagedDataError(f"{label}: not a MAT 5 file (of version 7.3? Save it with MATLAB's option -v7).")
    parts, left, position = [content[:HEADER_BYTES]], limit, HEADER_BYTES
    while position < len(content):
        kind, size = _tag(content, position, f"{order}II", label)
        end = position + 8 + size
        if end > len(content):
            raise DamagedDataError(f"{label}: truncated: {size} bytes promised, {len(content) - position - 8} there.")
        whole = content[position + 8 : end]
        part = _inflate(whole, left, label) if kind == COMPRESSED else content[position:end]
        if _tag(part, 0, f"{order}II", label) != (MATRIX, len(part) - 8):
            raise DamagedDataError(f"{label}: something other than a matrix at byte {position}.")
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise DamagedDataError(f"{label}: unpacks to more than the {limit} bytes expected.")
        position = end
    return b"".join(parts)


def _tag(content: bytes, position: int, form: str, label: str) -> tuple[int, int]:
    if position + 8 > len(content):
        raise DamagedDataError(f"{label}: truncated at byte {position}.")
    kind, size = struct.unpack_from(form, content, position)
    return kind, size


def _inflate(packed: bytes, limit: int, label: str) -> bytes:
    """Unpack at most ``limit + 1`` bytes."""
    try:
        return zlib.decompressobj().decompress(packed, limit + 1)
    except zlib.error as fault:
        raise DamagedDataError(f"{label}: cannot be unpacked ({fault}).") from fault
