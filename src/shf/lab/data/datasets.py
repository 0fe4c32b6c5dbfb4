"""The data sets of the paper's experiments as tensors."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import curves, mnist, reuters, terrain, usps
from .catalogue import COLLECTIONS, CURVES, MNIST, REUTERS, TERRAIN, USPS, collection_name
from .errors import DataError
from .fetching import find, locate, original_root
from .files import DataFile, sha256
from .places import cache_directory
from .sources import Notify, quiet

VARIANCE_FLOOR = 0.01


@dataclass(frozen=True)
class Dataset:
    """Training and test cases, one per row.

    Inputs are float32 (Reuters: sparse CSR); targets are int64 classes, or for autoencoders the inputs themselves, or
    for a regression numbers with mean 0 and variance 1, of which 1 is worth `unit`; `whole` is all of a map that they
    are points of.
    """

    name: str
    train_inputs: torch.Tensor
    train_targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    image_shape: tuple[int, int] | None
    classes: int | None
    checksums: Mapping[str, str]  # file -> sha256 of its content; the same wherever the file came from
    note: str
    unit: float = 1.0
    whole: torch.Tensor | None = None


@dataclass(frozen=True)
class _Arrays:
    """What a reader found: cases in rows, targets None where they are the inputs."""

    train: tuple[Any, NDArray[np.int64] | None]
    test: tuple[Any, NDArray[np.int64] | None]
    image_shape: tuple[int, int] | None
    classes: int | None
    checksums: Mapping[str, str]
    note: str


def load(
    name: str,
    *,
    data_dir: Path | str | None = None,
    split: int = 1,
    seed: int = 0,
    standardise: bool | None = None,
    train: int | None = None,
    test: int | None = None,
    progress: Notify = quiet,
) -> Dataset:
    """A data set by name: mnist, usps, reuters, curves, terrain or mnist-autoencoder.

    Args:
        name: of the data set.
        data_dir: a directory laid out like the user cache, looked in first (else the variable SHF_DATA).
        split: which of the five splits of USPS.
        seed: of the generated curves, and of the order of Reuters' training documents.
        standardise: zero mean and unit variance per pixel; by default for the classifiers of images.
        train, test: keep only so many cases, the first; for generated curves, generate so many.
        progress: called with a line per stage of fetching.
    """
    which, digits = collection_name(name), name in ("mnist", "usps")
    for option, value in (("train", train), ("test", test)):
        if value is not None and not 1 <= value <= curves.MOST_CASES:
            raise ValueError(f"load({option}={value}): must be from 1 to {curves.MOST_CASES}")
    if seed < 0:
        raise ValueError(f"load(seed={seed}): must not be negative")
    if standardise and not digits:
        raise ValueError(f"load({name!r}, standardise=True): only mnist and usps can be standardised")
    if which == TERRAIN:
        return _terrain(train or terrain.TRAIN, test or terrain.TEST)
    if which == CURVES:
        found = _read_curves(data_dir, train, test, seed)
    else:
        collection = COLLECTIONS[which]
        found = _read(name, locate(collection, data_dir) or find(collection, data_dir, progress), split, seed)
    (x, y), (x_test, y_test) = found.train, found.test
    x, x_test, note = x[:train], x_test[:test], found.note
    if x.dtype == np.uint8:
        x, x_test = _scaled(x), _scaled(x_test)
    if digits and standardise is not False:
        standardise_(x, x_test)
        note = note.replace("pixels from 0 to 1", "zero mean and unit variance per pixel")
    inputs, test_inputs = _tensor(x), _tensor(x_test)
    return Dataset(
        name,
        inputs,
        inputs if y is None else torch.from_numpy(y[:train].copy()),
        test_inputs,
        test_inputs if y_test is None else torch.from_numpy(y_test[:test].copy()),
        found.image_shape,
        found.classes,
        found.checksums,
        note,
    )


def _read(name: str, root: Path, split: int, seed: int) -> _Arrays:
    """A data set that is made of files with known checksums."""
    if name == "reuters":
        note = "log(1 + count), published split; 7 of the 65 categories have no training document; "
        note += f"training documents shuffled once by seed {seed}"
        return _Arrays(*reuters.read(root, seed), None, reuters.CLASSES, _checksums(REUTERS.files), note)
    plain = "pixels from 0 to 1"
    if name == "usps":
        note = f"split {split} of the paper's five; {plain}"
        parts = usps.split(usps.read(root), split)
        return _Arrays(parts[0], parts[1], usps.IMAGE_SHAPE, 10, _checksums(USPS.files), note)
    images = (mnist.TRAIN_IMAGES, mnist.TEST_IMAGES)
    train, test = (mnist.read_images(file, root) for file in images)
    if name == "mnist-autoencoder":
        return _Arrays((train, None), (test, None), mnist.IMAGE_SHAPE, None, _checksums(images), plain)
    digits, test_digits = (mnist.read_labels(file, root) for file in (mnist.TRAIN_LABELS, mnist.TEST_LABELS))
    return _Arrays((train, digits), (test, test_digits), mnist.IMAGE_SHAPE, 10, _checksums(MNIST.files), plain)


def _checksums(files: Sequence[DataFile]) -> dict[str, str]:
    return {file.path: file.sha256 for file in files}


def _read_curves(data_dir: Path | str | None, cases: int | None, test_cases: int | None, seed: int) -> _Arrays:
    """The original file where there is one, else generated images."""
    if (root := original_root(data_dir)) is not None:
        train, test, checksum = curves.read_original(root)
        checksums, note = {curves.ORIGINAL: checksum}, "the original CURVES"
    else:
        wanted = (cases or curves.TRAIN, test_cases or curves.TEST, seed)
        try:
            train, test = curves.generate_cached(cache_directory(), *wanted)
        except DataError as fault:  # a cache that cannot be written costs seconds, not the run
            warnings.warn(f"the generated curves are not kept: {fault}", stacklevel=3)
            train, test = curves.generate(*wanted)
        checksums = {f"curves/generated/{part}": sha256(x.tobytes()) for part, x in (("train", train), ("test", test))}
        note = f"generated CURVES-like data (seed {seed}): absolute errors are not the paper's"
    return _Arrays((train, None), (test, None), curves.IMAGE_SHAPE, None, checksums, note)


def _terrain(train: int, test: int) -> Dataset:
    whole = terrain.elevations()
    where = torch.from_numpy(terrain.places(whole.shape))
    seen, unseen = map(torch.from_numpy, terrain.split(whole.size, train, test))
    heights = torch.from_numpy(whole)
    known = heights.reshape(-1)[seen]
    unit = known.std().item()
    heights = (heights - known.mean()) / unit
    targets = heights.reshape(-1, 1)
    parts = (where[seen], targets[seen], where[unseen], targets[unseen])
    note = "elevations around the Jacksboro fault (SRTM, 90 m apart); training and test points drawn at random"
    return Dataset("terrain", *parts, None, None, {terrain.NAME: terrain.SHA256}, note, unit, heights)


def standardise_(train: NDArray[np.float32], test: NDArray[np.float32]) -> None:
    """In place, per column: (x - mean) / √(variance + 0.01), mean and variance those of the training part."""
    mean = train.mean(axis=0, dtype=np.float64).astype(np.float32)
    sd = np.sqrt(train.var(axis=0, dtype=np.float64) + VARIANCE_FLOOR).astype(np.float32)
    for part in (train, test):
        part -= mean
        part /= sd


def _scaled(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return pixels.astype(np.float32) / np.float32(255)


def _tensor(values: Any) -> torch.Tensor:
    """The array, or the sparse matrix as a torch CSR tensor."""
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        starts, columns = (torch.from_numpy(part.astype(np.int64)) for part in (values.indptr, values.indices))
        stored = torch.from_numpy(values.data)
        return torch.sparse_csr_tensor(starts, columns, stored, size=values.shape, check_invariants=True)
