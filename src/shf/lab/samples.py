"""The few images a run leaves for its report, as a small ``.npz``: arrays of numbers only, never pickles.

An autoencoder leaves ``originals`` and ``reconstructions``, a classifier of images ``images``, ``labels`` and
``predictions`` of test cases it gets wrong, a regression over a map ``maps``: the map and what was learned of it.
Images are uint8, (n, height, width), 0 black.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shf.lab.files import read_at_most
from shf.lab.npz import NpzError, read_npz

_MOST_BYTES = 1 << 24


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
    """The arrays of a samples file; a hostile one cannot fill the memory."""
    try:
        return read_npz(read_at_most(path, _MOST_BYTES), limit=_MOST_BYTES)
    except FileNotFoundError:
        raise
    except (NpzError, OSError) as error:
        raise SamplesError(f"{path}: not a readable samples file: {error}") from None
