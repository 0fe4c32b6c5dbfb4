"""Arrays of numbers as a small ``.npz`` that may come from anywhere: sizes are checked before anything is unpacked.

numpy's own reader allocates what an array's header promises; here a header that does not fit its content is refused.
"""

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_MOST_ARRAYS = 16


class NpzError(ValueError):
    """Not an ``.npz`` of numbers, damaged, or larger than expected."""


def write_npz(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of the ``.npz``; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            npy.write_array(content, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            archive.writestr(member, content.getvalue(), compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def read_npz(content: bytes, *, limit: int) -> dict[str, NDArray[Any]]:
    """The arrays in `content`, which may unpack to at most `limit` bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if len(members) > _MOST_ARRAYS or sum(member.file_size for member in members) > limit:
                raise NpzError(f"more than {_MOST_ARRAYS} arrays, or more than {limit} bytes unpacked")
            return {m.filename.removesuffix(".npy"): _read_array(archive.open(m).read(limit + 1)) for m in members}
    except NpzError:
        raise
    except Exception as error:  # zipfile, zlib, tokenize and numpy raise almost anything on malformed content
        raise NpzError(f"{type(error).__name__}: {error}"[:300]) from error


def _read_array(content: bytes) -> NDArray[Any]:
    stream = io.BytesIO(content)
    if npy.read_magic(stream) != (1, 0):
        raise NpzError("an array of another format than 1.0")
    shape, _, dtype = npy.read_array_header_1_0(stream)
    if dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise NpzError("no numbers, or a header that does not fit the content")
    return np.load(io.BytesIO(content), allow_pickle=False)  # type: ignore[no-any-return]
