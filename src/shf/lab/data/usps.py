"""USPS: 1100 images of each digit, and the paper's five splits, carried as figures in usps_splits.json.

The released splits (perms1 … perms5) are permutations of 1..1100; for every digit the first 800 images of a
permutation are for training and the other 300 for testing.
"""

import io
import json
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat

from .files import DataFile

HOME = "https://cs.nyu.edu/~roweis/data/"
FILE = DataFile(
    "usps/usps_all.mat",
    1_484_005,
    "da2c8d6e8bd743da00c67020f444e0f28250dfbd16c55d8135c50ffa7719a5f9",
    f"{HOME}usps_all.mat",
)
IMAGE_SHAPE = (16, 16)
PER_DIGIT, TRAIN_PER_DIGIT, DIGITS = 1100, 800, 10
SPLITS = 5


@cache
def permutations() -> NDArray[np.int64]:
    """(5, 1100): the five permutations, counted from 1 as published."""
    text = resources.files(__package__).joinpath("usps_splits.json").read_text(encoding="utf-8")
    return np.array([json.loads(text)[f"perms{k}"] for k in range(1, SPLITS + 1)], dtype=np.int64)


def read(root: Path) -> NDArray[np.uint8]:
    """(10, 1100, 256): pixels by digit 0..9, image and pixel, the pixels row by row.

    In the file the axes are (pixel, image, digit), the pixels column by column, the digits in the order 1, 2, …, 9, 0.
    """
    data: NDArray[np.uint8] = loadmat(io.BytesIO(FILE.read(root)))["data"]  # type: ignore[arg-type]
    by_digit = np.roll(data.transpose(2, 1, 0), 1, axis=0).reshape(DIGITS, PER_DIGIT, *IMAGE_SHAPE)
    return by_digit.swapaxes(2, 3).reshape(DIGITS, PER_DIGIT, -1)


def split(images: NDArray[np.uint8], number: int) -> tuple[tuple[NDArray[np.uint8], NDArray[np.int64]], ...]:
    """((train pixels, digits), (test pixels, digits)) of split ``number`` = 1..5: 8,000 and 3,000 cases.

    The digits alternate, 0 1 2 … 9 0 1 2 …, so that every batch cut from consecutive rows holds all of them equally.
    """
    if number not in range(1, SPLITS + 1):
        raise ValueError(f"split={number}: USPS has the splits 1 to {SPLITS}")
    order = permutations()[number - 1] - 1
    return _cases(images[:, order[:TRAIN_PER_DIGIT]]), _cases(images[:, order[TRAIN_PER_DIGIT:]])


def _cases(images: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    pixels = images.swapaxes(0, 1).reshape(-1, images.shape[-1])
    return pixels, np.tile(np.arange(DIGITS), images.shape[1])
