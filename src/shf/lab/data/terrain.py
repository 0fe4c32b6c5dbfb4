"""Terrain: elevations of hills and valleys around the Jacksboro fault, Tennessee, in a file that matplotlib brings along.

A map of 344 × 403 points about 90 m apart, from the Shuttle Radar Topography Mission (U.S. Geological Survey; in the public
domain).
"""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import DamagedDataError, MissingDataError
from .files import sha256

NAME = "matplotlib/jacksboro_fault_dem.npz"
SHA256 = "d493f50a33e82a4420494c54d1fca1539d177bdc27ab190bc5fe6e92f62fb637"
TRAIN, TEST = 20_000, 10_000

Array = NDArray[np.float32]


def path() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "sample_data" / "jacksboro_fault_dem.npz"


def elevations() -> Array:
    """The map, (344, 403), in metres."""
    try:
        content = path().read_bytes()
    except OSError as error:
        raise MissingDataError(f"terrain: this matplotlib comes without its sample data ({error})") from None
    if sha256(content) != SHA256:
        raise DamagedDataError(f"{path()}: its sha256 is {sha256(content)}, expected {SHA256}")
    found: Array = np.load(io.BytesIO(content), allow_pickle=False)["elevation"].astype(np.float32)
    return found


def places(shape: tuple[int, ...]) -> Array:
    """The points of a map of this shape, row by row: (rows · columns, 2) coordinates from -1 to 1."""
    grid = np.meshgrid(*(np.linspace(-1, 1, count, dtype=np.float32) for count in shape), indexing="ij")
    return np.stack([axis.ravel() for axis in grid], axis=1)


def split(points: int, train: int, test: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which points are for training and which for the test: disjoint, and the same draw whatever a run's seed."""
    order = np.random.default_rng(0).permutation(points)
    return order[:train], order[points - test :]
