"""`shf data get curves --original`: the original CURVES from its public home.

No checksum of it is published. It is taken for the original by its shape, its range, and what 18 principal components of its
training images leave of its test images, which is; its sha256 is said, for the record of every run on it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import curves
from .errors import DamagedDataError, MissingDataError, SourceError
from .files import sha256
from .places import cache_directory
from .sources import download
from .storage import exclusive, write_atomic

HOME = "https://www.cs.toronto.edu/~jmartens/digs3pts_1.mat"
TOLERANCE = 0.01
"""Of the published figure, which has three digits."""


def fetch_original(progress: Callable[[str], None], *, get: Callable[[str, int], bytes] = download) -> Path:
    """The file in the user cache, fetched and checked.

    Raises:
        MissingDataError: if its home cannot be reached.
        DamagedDataError: if what comes is not the original.
    """
    cache = cache_directory()
    path = cache / curves.ORIGINAL
    with exclusive(cache / "curves.lock"):
        progress(f"downloading {HOME}")
        try:
            content = get(HOME, curves.ORIGINAL_LIMIT)
        except (SourceError, OSError) as fault:
            raise MissingDataError(
                f"the original CURVES could not be fetched: {fault}. Place {HOME} by hand at {path}; without it, "
                "generated images are used"
            ) from fault
        check(content, HOME)
        write_atomic(path, content)
    progress(f"sha256 {sha256(content)}")
    return path


def check(content: bytes, label: str) -> None:
    """Refuses a file that is not the original by all that is published of it."""
    train, test = curves.original_images(content, label)
    if (len(train), len(test)) != (curves.TRAIN, curves.TEST):
        raise DamagedDataError(
            f"{label}: {len(train)} and {len(test)} images, the original has {curves.TRAIN} and {curves.TEST}"
        )
    left = curves.pca_left(train, test)
    if abs(left - curves.PCA_LEFT) > TOLERANCE * curves.PCA_LEFT:
        raise DamagedDataError(
            f"{label}: {curves.PCA_COMPONENTS} principal components leave {left:.3f} of a test image, "
            f"of the original's {curves.PCA_LEFT:.2f}: another data set"
        )
