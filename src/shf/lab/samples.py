"""The few images a run leaves for its report, as a small ``.npz``: arrays of numbers only, never pickles.

An autoencoder leaves ``originals`` and ``reconstructions``, a classifier of images ``images``, ``labels`` and
``predictions`` of test cases it gets wrong. Images are uint8, (n, height, width), 0 black.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_BYTES = 1 << 24
_MOST_ARRAYS = 16


class SamplesError(RuntimeError):
    """A samples file that is damaged or is not one."""


def encode_samples(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of the ``.npz``; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            archive.writestr(member, content.getvalue(), compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def read_samples(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a samples file. Sizes are checked before unpacking: a hostile file cannot fill the memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > _MOST_ARRAYS or sum(member.file_size for member in members) > _MOST_BYTES:
                raise SamplesError(
                    f"{path}: more than {_MOST_ARRAYS} arrays or {_MOST_BYTES >> 20} MiB; not a samples file"
                )
            return {m.filename.removesuffix(".npy"): _read_array(archive, m) for m in members}
    except FileNotFoundError:
        raise
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise SamplesError(f"{path}: not a readable samples file: {error}") from None


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as stream:
        content = io.BytesIO(stream.read(_MOST_BYTES + 1))
    version = np.lib.format.read_magic(content)
    if version != (1, 0):
        raise ValueError(f"{member.filename}: array format {version}, expected (1, 0)")
    shape, _, dtype = np.lib.format.read_array_header_1_0(content)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content.getvalue()) - content.tell():
        raise ValueError(f"{member.filename}: its header does not fit its content")
    content.seek(0)
    array: NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
    return array
