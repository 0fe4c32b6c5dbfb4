"""CURVES: images of smooth random curves, generated; or the original file, when a user has it.

The generator's second version was calibrated to what linear codes leave of the original's test images, in squared error per
image: PCA with 18 components, logistic PCA with 18 and with 6 (Hinton & Salakhutdinov 2006; tools/curves_calibration.py
measures ours). It is CURVES-like: absolute errors on it are not the paper's, rankings between optimizers are what counts.
"""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from shf.lab.npz import NpzError, read_npz

from .errors import DamagedDataError, DataError
from .files import read_bounded, sha256, write_atomic
from .matfile import read_variables

IMAGE_SHAPE = (28, 28)
PIXELS = 784
TRAIN, TEST = 20_000, 10_000
MOST_CASES = 1_000_000
GENERATOR = 2  # its version: benchmarks/curves.py has the first
INSIDE = (6.5, 20.5)  # the range of the points' coordinates, in pixels, uniform
SAMPLES = 60  # along a curve
REACH = 0.6
RADIUS, SOFTNESS = 0.85, 0.14  # of the ink, in pixels
BLOCK = 256  # curves drawn at once: their images stay in the processor's cache

ORIGINAL = "curves/digs3pts_1.mat"
ORIGINAL_LIMIT = 1 << 29
PCA_COMPONENTS, PCA_LEFT = 18, 5.90  # published for the original's test images

Images = NDArray[np.float32]
Points = NDArray[np.float64]


def generate(train: int = TRAIN, test: int = TEST, seed: int = 0) -> tuple[Images, Images]:
    """(train, 784) and (test, 784) images in [0, 1], the same for the same seed.

    The two sets have streams of their own: a smaller set is the beginning of a larger one.
    """
    of_train, of_test = streams(seed)
    return draw(control_points(train, of_train)), draw(control_points(test, of_test))


def streams(seed: int) -> list[np.random.Generator]:
    """Of the training set and of the test set."""
    return [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2)]


def control_points(cases: int, stream: np.random.Generator) -> Points:
    """(cases, 3, 2): the points of each curve, each (x, y), y downwards; a curve goes from its uppermost to its lowest."""
    found = stream.uniform(*INSIDE, size=(cases, 3, 2))
    return np.take_along_axis(found, np.argsort(found[:, :, 1], axis=1)[:, :, None], axis=1)


def draw(points: Points) -> Images:
    """The images (cases, 784) of the curves of ``points`` (cases, 3, 2), each point (x, y)."""
    return painted(_parabola(points), SOFTNESS)


def _parabola(points: Points) -> Points:
    """60 samples on the way from a to c, bent towards b: a + t (c - a) + 4 t (1 - t) · 0.6 (b - (a + c) / 2).

    At t = ½ it is six tenths of the way from the chord's middle to b: a little beyond a Bézier curve, which is half way.
    """
    t = np.linspace(0.0, 1.0, SAMPLES)[None, :, None]
    a, b, c = (points[:, i, None] for i in range(3))
    return np.asarray(a + t * (c - a) + 4 * t * (1 - t) * REACH * (b - (a + c) / 2))


def painted(curves: Points, softness: float) -> Images:
    """(cases, 784): the ink 1 / (1 + exp((d - r) / s)) of a pixel at distance d from the nearest of a curve's 60 samples, in
    pixels; pixel centres lie at the integers 0..27."""
    images = np.empty((len(curves), PIXELS), dtype=np.float32)
    for start in range(0, len(curves), BLOCK):
        block = slice(start, start + BLOCK)
        distance = _distance_to_nearest(curves[block].astype(np.float32))
        images[block] = expit((RADIUS - distance) / softness).reshape(-1, PIXELS)
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
    """(train images, test images, the file's sha256) of digs3pts_1.mat."""
    path = root / ORIGINAL
    content = read_bounded(path, ORIGINAL_LIMIT)
    return *original_images(content, str(path)), sha256(content)


def original_images(content: bytes, label: str) -> tuple[Images, Images]:
    """The variables bdata and bdatatest of the file's bytes."""
    found = read_variables(content, ["bdata", "bdatatest"], limit=2 * ORIGINAL_LIMIT, label=label)
    train, test = (_original_images(found[name], name, label) for name in ("bdata", "bdatatest"))
    return train, test


def pca_left(train: Images, test: Images, components: int = PCA_COMPONENTS) -> float:
    """The squared error per test image that so many principal components of the training images leave."""
    mean = train.mean(axis=0, dtype=np.float64)
    centred = train - mean
    basis = np.linalg.eigh(centred.T @ centred)[1][:, -components:]
    rest = (test - mean) - (test - mean) @ basis @ basis.T
    return float((rest**2).sum(axis=1).mean())


def _original_images(values: NDArray[np.float64], name: str, path: str) -> Images:
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
