"""Numpy arrays out of a pickle that may come from anywhere.

A pickle is a program; this one may do nothing but lay out tuples of numeric arrays. Two fences, one behind the other:

1. the opcodes are scanned first, and any that tuples of arrays do not need is refused (no dictionaries, lists, sets or
   persistent ids, and no memo index above 255, with which a few bytes could claim gigabytes);
2. the only names that resolve are those numpy writes for an array, and they resolve to inert stand-ins defined here:
   no function of numpy or of any other module is ever handed to the pickle.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import DamagedDataError

Arrays: TypeAlias = "NDArray[Any] | tuple[Any, ...]"  # the tuples hold arrays and tuples

LAYOUT = {"PROTO", "STOP", "BINPUT", "BINGET", "MARK", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
VALUES = {"NONE", "NEWFALSE", "NEWTRUE", "BININT", "BININT1", "BININT2", "BINUNICODE"}
CONTENT = {"SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "GLOBAL", "REDUCE", "BUILD"}
OPCODES = LAYOUT | VALUES | CONTENT
NUMERIC = frozenset(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)) | {"f4", "f8"}
MOST_ARRAYS, MOST_AXES = 64, 8


def load_arrays(content: bytes, label: str = "pickle") -> Arrays:
    """The array, or the nested tuple of arrays, that ``content`` pickles; anything else is a DamagedDataError."""
    try:
        for opcode, _, position in pickletools.genops(content):
            if opcode.name not in OPCODES:
                raise ValueError(f"{opcode.name} at byte {position}")
        return _finished(_ArrayUnpickler(io.BytesIO(content), encoding="bytes").load(), [MOST_ARRAYS])
    except Exception as fault:  # a malformed pickle raises almost anything
        why = f"{type(fault).__name__}: {fault}"[:200]
        raise DamagedDataError(
            f"{label}: refused, only numpy arrays and tuples of them are admitted ({why})."
        ) from fault


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., object]:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise ValueError(f"it asks for {module}.{name}") from None


class _Kind:
    """Stands for ``numpy.ndarray``: an argument of ``_reconstruct``, never called."""


class _Dtype:
    """Stands for ``numpy.dtype``: a plain numeric type, told by ``code`` and byte order."""

    def __init__(self, code: bytes | str, *_: object) -> None:
        self.code = _text(code)
        self.order = "="
        if self.code not in NUMERIC:
            raise ValueError(f"array of type {self.code!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])
        if self.order not in set("<>|="):
            raise ValueError(f"byte order {self.order!r}")

    def real(self) -> np.dtype[Any]:
        return np.dtype(f"{self.order}{self.code}")


class _Array:
    """Stands for an array between ``_reconstruct`` and the state that fills it."""

    values: NDArray[Any] | None = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise ValueError("array without plain bytes or a numeric type")
        if len(shape) > MOST_AXES or not all(isinstance(length, int) for length in shape):
            raise ValueError("array with an absurd shape")
        kind = dtype.real()
        if math.prod(shape) * kind.itemsize != len(raw):
            raise ValueError(f"array of shape {shape} with {len(raw)} bytes")
        self.values = np.frombuffer(raw, kind).reshape(shape, order="F" if fortran else "C")


_STAND_INS: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Kind,
    ("numpy", "dtype"): _Dtype,
}


def _text(value: bytes | str) -> str:
    if isinstance(value, bytes):
        return value.decode("ascii")
    if isinstance(value, str):
        return value
    raise TypeError("a name that is not text")


def _finished(value: object, left: list[int]) -> Arrays:
    """Arrays for stand-ins, at most ``left[0]`` nodes: nested references could otherwise unfold without end."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"more than {MOST_ARRAYS} arrays")
    if isinstance(value, _Array) and value.values is not None:
        return value.values
    if isinstance(value, tuple):
        return tuple(_finished(part, left) for part in value)
    raise TypeError(f"it holds a {type(value).__name__}")
