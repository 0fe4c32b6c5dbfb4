"""Arrays of numbers out of an ``.npz``, within bounded memory: sizes are checked before anything is unpacked.

numpy's own reader allocates what an array's header promises; here a header that does not fit its content is refused.
"""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_MOST_ARRAYS = 16


class NpzError(ValueError):
    """Not an ``.npz`` of numbers, damaged, or larger than expected."""


def read_npz(content: bytes, *, limit: int) -> dict[str, NDArray[Any]]:
    """The arrays in `content`, which may unpack to at most `limit` bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if len(members) > _MOST_ARRAYS or sum(member.file_size for member in members) > limit:
                raise NpzError(f"more than {_MOST_ARRAYS} arrays, or more than {limit} bytes unpacked")
            return {m.filename.removesuffix(".npy"): _read_array(archive, m, limit) for m in members}
    except NpzError:
        raise
    except Exception as error:  # zipfile, zlib, tokenize and numpy raise almost anything on malformed content
        raise NpzError(f"{type(error).__name__}: {error}"[:300]) from error


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> NDArray[Any]:
    with archive.open(member) as stream:
        content = io.BytesIO(stream.read(limit + 1))
    version = np.lib.format.read_magic(content)
    if version not in _HEADERS:
        raise NpzError(f"{member.filename}: array format {version}")
    shape, _, dtype = _HEADERS[version](content)
    if dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(content.getvalue()) - content.tell():
        raise NpzError(f"{member.filename}: no numbers, or a header that does not fit the content")
    content.seek(0)
    array: NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
    return array
