"""The data sets of the paper's experiments as tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from . import curves, mnist, reuters, terrain, usps
from .catalogue import MNIST, REUTERS, USPS, Collection, Progress, collection_name
from .errors import DataError, MissingDataError
from .fetching import find, locate, quiet
from .files import sha256
from .places import cache_directory, roots

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
class Request:
    """What was asked of `load`, validated."""

    name: str
    data_dir: Path | str | None
    split: int
    seed: int
    standardise: bool | None
    train: int | None
    test: int | None
    download: bool
    progress: Progress

    def __post_init__(self) -> None:
        for option, value in (("train", self.train), ("test", self.test)):
            if value is not None and not 1 <= value <= curves.MOST_CASES:
                raise ValueError(f"load({option}={value}): must be from 1 to {curves.MOST_CASES}")
        if self.seed < 0:
            raise ValueError(f"load(seed={self.seed}): must not be negative")

    def root(self, collection: Collection) -> Path:
        """The directory that holds the collection, fetched if need be and allowed."""
        if (root := locate(collection, self.data_dir)) is not None:
            return root
        if self.download:
            return find(collection, self.data_dir, self.progress)
        raise MissingDataError(f"{self.name}: not on this machine. Run `shf data get {collection.name}`.")


def load(
    name: str,
    *,
    data_dir: Path | str | None = None,
    split: int = 1,
    seed: int = 0,
    standardise: bool | None = None,
    train: int | None = None,
    test: int | None = None,
    download: bool = True,
    progress: Progress = quiet,
) -> Dataset:
    """A data set by name: mnist, usps, reuters, curves, terrain or mnist-autoencoder.

    Args:
        name: of the data set.
        data_dir: a directory laid out like the user cache, looked in first (else the variable SHF_DATA).
        split: which of the five splits of USPS.
        seed: of the generated curves, and of the order of Reuters' training documents.
        standardise: zero mean and unit variance per pixel; by default for the classifiers of images.
        train, test: keep only so many cases, the first; for generated curves, generate so many.
        download: fetch the data when they are not on this machine.
        progress: called with a line per stage of fetching.
    """
    collection_name(name)
    request = Request(name, data_dir, split, seed, standardise, train, test, download, progress)
    return _LOADERS[name](request)


def _load_mnist(request: Request) -> Dataset:
    root = request.root(MNIST)
    pixels = (mnist.read_images(mnist.TRAIN_IMAGES, root), mnist.read_images(mnist.TEST_IMAGES, root))
    digits = (mnist.read_labels(mnist.TRAIN_LABELS, root), mnist.read_labels(mnist.TEST_LABELS, root))
    return _digits(request, pixels, digits, mnist.IMAGE_SHAPE, MNIST)


def _load_usps(request: Request) -> Dataset:
    root = request.root(USPS)
    (train, train_digits), (test, test_digits) = usps.split(usps.read(root), request.split)
    note = f"split {request.split} of the paper's five; "
    return _digits(request, (train, test), (train_digits, test_digits), usps.IMAGE_SHAPE, USPS, note)


def _load_mnist_autoencoder(request: Request) -> Dataset:
    _refuse_standardise(request)
    root = request.root(MNIST)
    files = (mnist.TRAIN_IMAGES, mnist.TEST_IMAGES)
    train, test = (_scaled(mnist.read_images(file, root)) for file in files)
    checksums = {file.path: file.sha256 for file in files}
    return _autoencoder(request, train[: request.train], test[: request.test], checksums, "pixels from 0 to 1")


def _load_curves(request: Request) -> Dataset:
    _refuse_standardise(request)
    for root in roots(request.data_dir):
        if (root / curves.ORIGINAL).is_file():
            train, test, checksum = curves.read_original(root)
            parts = (train[: request.train], test[: request.test])
            return _autoencoder(request, *parts, {curves.ORIGINAL: checksum}, "the original CURVES")
    sizes = (request.train or curves.TRAIN, request.test or curves.TEST)
    train, test = _generated(*sizes, request.seed)
    checksums = {f"curves/generated/{part}": sha256(x.tobytes()) for part, x in (("train", train), ("test", test))}
    note = f"generated CURVES-like data (seed {request.seed}): absolute errors are not the paper's"
    return _autoencoder(request, train, test, checksums, note)


def _generated(train: int, test: int, seed: int) -> tuple[curves.Images, curves.Images]:
    try:
        return curves.generate_cached(cache_directory(), train, test, seed)
    except DataError as fault:  # a cache that cannot be written costs seconds, not the run
        warnings.warn(f"the generated curves are not kept: {fault}", stacklevel=2)
        return curves.generate(train, test, seed)


def _load_reuters(request: Request) -> Dataset:
    _refuse_standardise(request)
    (train, train_y), (test, test_y) = reuters.read(request.root(REUTERS), request.seed)
    keep, keep_test = request.train, request.test
    return Dataset(
        request.name,
        _csr_tensor(train[:keep]),
        torch.from_numpy(train_y[:keep]),
        _csr_tensor(test[:keep_test]),
        torch.from_numpy(test_y[:keep_test]),
        image_shape=None,
        classes=reuters.CLASSES,
        checksums={file.path: file.sha256 for file in REUTERS.files},
        note="log(1 + count), published split; 7 of the 65 categories have no training document; "
        f"training documents shuffled once by seed {request.seed}",
    )


def _load_terrain(request: Request) -> Dataset:
    _refuse_standardise(request)
    whole = terrain.elevations()
    where = torch.from_numpy(terrain.places(whole.shape))
    seen, unseen = map(torch.from_numpy, terrain.split(whole.size, request.train, request.test))
    heights = torch.from_numpy(whole)
    known = heights.reshape(-1)[seen]
    unit = known.std().item()
    heights = (heights - known.mean()) / unit
    targets = heights.reshape(-1, 1)
    parts = (where[seen], targets[seen], where[unseen], targets[unseen])
    note = "elevations around the Jacksboro fault (SRTM, 90 m apart); training and test points drawn at random"
    checksums = {terrain.NAME: terrain.SHA256}
    return Dataset(request.name, *parts, None, None, checksums, note, unit, heights)


_LOADERS: dict[str, Callable[[Request], Dataset]] = {
    "mnist": _load_mnist,
    "mnist-autoencoder": _load_mnist_autoencoder,
    "usps": _load_usps,
    "reuters": _load_reuters,
    "curves": _load_curves,
    "terrain": _load_terrain,
}


def _digits(
    request: Request,
    pixels: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    digits: tuple[NDArray[np.int64], NDArray[np.int64]],
    image_shape: tuple[int, int],
    collection: Collection,
    note: str = "",
) -> Dataset:
    keep, keep_test = request.train, request.test
    train, test = _scaled(pixels[0][:keep]), _scaled(pixels[1][:keep_test])
    standard = request.standardise is not False
    if standard:
        standardise_(train, test)
    return Dataset(
        request.name,
        torch.from_numpy(train),
        torch.from_numpy(digits[0][:keep].copy()),
        torch.from_numpy(test),
        torch.from_numpy(digits[1][:keep_test].copy()),
        image_shape=image_shape,
        classes=10,
        checksums={file.path: file.sha256 for file in collection.files},
        note=note + ("zero mean and unit variance per pixel" if standard else "pixels from 0 to 1"),
    )


def standardise_(train: NDArray[np.float32], test: NDArray[np.float32]) -> None:
    """In place, per column: (x - mean) / √(variance + 0.01), mean and variance those of the training part."""
    mean = train.mean(axis=0, dtype=np.float64).astype(np.float32)
    sd = np.sqrt(train.var(axis=0, dtype=np.float64) + VARIANCE_FLOOR).astype(np.float32)
    for part in (train, test):
        part -= mean
        part /= sd


def _scaled(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return pixels.astype(np.float32) / np.float32(255)


def _refuse_standardise(request: Request) -> None:
    if request.standardise:
        raise ValueError(f"load({request.name!r}, standardise=True): only mnist and usps can be standardised")


def _autoencoder(
    request: Request, train: NDArray[np.float32], test: NDArray[np.float32], checksums: Mapping[str, str], note: str
) -> Dataset:
    inputs, test_inputs = torch.from_numpy(train), torch.from_numpy(test)
    shape = curves.IMAGE_SHAPE
    return Dataset(request.name, inputs, inputs, test_inputs, test_inputs, shape, None, checksums, note)


def _csr_tensor(matrix: csr_array) -> torch.Tensor:
    """The sparse matrix as a torch CSR tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr.astype(np.int64)),
            torch.from_numpy(matrix.indices.astype(np.int64)),
            torch.from_numpy(matrix.data),
            size=matrix.shape,
            check_invariants=True,
        )
