"""CURVES: images of smooth random curves, generated; or the original file, when a user has it.

The original digs3pts_1.mat cannot be had any more. The generator was calibrated so that 18 principal components leave
about 6 squared error per case (5.90 is published for the original). It is CURVES-like: absolute errors on it are not
the paper's, rankings between optimizers are what counts.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.special import expit

from shf.lab.npz import NpzError, read_npz

from .errors import DamagedDataError, DataError
from .files import sha256
from .matfile import read_variables
from .storage import read_bounded, write_atomic

IMAGE_SHAPE = (28, 28)
PIXELS = 784
TRAIN, TEST = 20_000, 10_000
MOST_CASES = 1_000_000
GENERATOR = 1  # raised when the same seed gives other images

INSIDE = (6.0, 21.0)  # the control points, in pixels
SAMPLES = 60  # along a curve
RADIUS, SOFTNESS = 0.85, 0.25  # of the pen, in pixels
BLOCK = 256  # curves drawn at once: their images stay in the processor's cache

ORIGINAL = "curves/digs3pts_1.mat"
ORIGINAL_LIMIT = 1 << 29

Images = NDArray[np.float32]


def generate(train: int = TRAIN, test: int = TEST, seed: int = 0) -> tuple[Images, Images]:
    """(train, 784) and (test, 784) images in [0, 1], the same for the same seed.

    The two sets have streams of their own: a smaller set is the beginning of a larger one.
    """
    train_stream, test_stream = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    return draw(_control_points(train, train_stream)), draw(_control_points(test, test_stream))


def _control_points(cases: int, stream: np.random.Generator) -> NDArray[np.float64]:
    return stream.uniform(*INSIDE, size=(cases, 3, 2))


def draw(points: NDArray[np.float64]) -> Images:
    """The images (cases, 784) of curves through ``points`` (cases, 3, 2), each point (x, y).

    The curve is the natural cubic spline through the three points at t = 0, ½, 1. A pixel at distance d from the
    nearest of its 60 samples has ink 1 / (1 + exp((d - 0.85) / 0.25)); pixel centres lie at the integers 0..27.
    """
    curves = CubicSpline([0.0, 0.5, 1.0], points, axis=1, bc_type="natural")(np.linspace(0.0, 1.0, SAMPLES))
    images = np.empty((len(points), PIXELS), dtype=np.float32)
    for start in range(0, len(points), BLOCK):
        block = slice(start, start + BLOCK)
        distance = _distance_to_nearest(curves[block].astype(np.float32))
        images[block] = expit((RADIUS - distance) / SOFTNESS).reshape(-1, PIXELS)
    return images


def _distance_to_nearest(curves: Images) -> Images:
    """(cases, 28, 28): distance of each pixel (row y, column x) to the nearest of ``curves`` (cases, samples, 2)."""
    centres = np.arange(IMAGE_SHAPE[0], dtype=np.float32)
    dx2, dy2 = ((centres - curves[:, :, axis, None]) ** 2 for axis in (0, 1))
    nearest = np.full((len(curves), *IMAGE_SHAPE), np.inf, dtype=np.float32)
    for k in range(SAMPLES):
        np.minimum(nearest, dy2[:, k, :, None] + dx2[:, k, None, :], out=nearest)
    return np.sqrt(nearest)


def cache_path(root: Path, train: int, test: int, seed: int) -> Path:
    return root / "curves" / f"generated-{GENERATOR}-seed{seed}-{train}x{test}.npz"


def generate_cached(root: Path, train: int, test: int, seed: int) -> tuple[Images, Images]:
    """The generated sets from the cache under ``root``; generated and kept there when absent or damaged."""
    path = cache_path(root, train, test, seed)
    try:
        return _read_cached(path, train, test)
    except DataError:
        images = generate(train, test, seed)
        packed = io.BytesIO()
        np.savez(packed, train=images[0], test=images[1])
        write_atomic(path, packed.getvalue())
        return images


def _read_cached(path: Path, train: int, test: int) -> tuple[Images, Images]:
    size = (train + test) * PIXELS * 4 + 4096  # two .npy headers and the zip's own tables
    content = read_bounded(path, size)
    try:
        arrays = read_npz(content, limit=size)
        found: tuple[Images, Images] = arrays["train"], arrays["test"]
    except (NpzError, KeyError) as fault:
        raise DamagedDataError(f"{path}: not a cached set ({fault}).") from fault
    if any(images.shape != (cases, PIXELS) for images, cases in zip(found, (train, test), strict=True)):
        raise DamagedDataError(f"{path}: images of another shape.")
    return found


def read_original(root: Path) -> tuple[Images, Images, str]:
    """(train images, test images, the file's sha256) of digs3pts_1.mat: variables bdata and bdatatest."""
    path = root / ORIGINAL
    content = read_bounded(path, ORIGINAL_LIMIT)
    found = read_variables(content, ["bdata", "bdatatest"], limit=2 * ORIGINAL_LIMIT, label=str(path))
    train, test = (_original_images(found[name], name, path) for name in ("bdata", "bdatatest"))
    return train, test, sha256(content)


def _original_images(values: NDArray[np.float64], name: str, path: Path) -> Images:
    """Cases in rows, 784 pixels in [0, 1]."""
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == PIXELS:
        images = values.astype(np.float32)
        if images.size and images.min() >= 0 and images.max() <= 1:
            return images
    raise DamagedDataError(
        f"{path}: variable {name} is {type(values).__name__} {values.shape}, expected images in rows, "
        f"(cases, {PIXELS}), with values from 0 to 1. Put the original digs3pts_1.mat there, or remove the file and "
        "generated images are used."
    )
