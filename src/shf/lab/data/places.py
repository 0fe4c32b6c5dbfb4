"""Where data live: a directory the user names, and the user cache.

Both are laid out alike: ``mnist/*.gz``, ``usps/usps_all.mat``, ``reuters/Reuters21578.mat``, ``curves/digs3pts_1.mat``.
"""

import os
from pathlib import Path

import platformdirs

from .errors import NoSuchDataError

DATA_VARIABLE = "SHF_DATA"
CACHE_VARIABLE = "SHF_CACHE"


def data_directory(data_dir: Path | str | None = None) -> Path | None:
    """The user's own data directory: the argument, else the variable SHF_DATA, else none. It is read, never written."""
    chosen, named_by = (data_dir, "--data-dir") if data_dir else (os.environ.get(DATA_VARIABLE), DATA_VARIABLE)
    if not chosen:
        return None
    path = Path(chosen).expanduser()
    if not path.is_dir():
        raise NoSuchDataError(
            f"{named_by}={path}: not a directory. Name the directory that holds mnist/, usps/ and reuters/."
        )
    return path


def cache_directory() -> Path:
    """Where fetched and generated data are kept: the variable SHF_CACHE, else the platform's cache for users."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("shf", appauthor=False)


def roots(data_dir: Path | str | None = None) -> list[Path]:
    """The directories to look in, first the user's own."""
    own = data_directory(data_dir)
    return [cache_directory()] if own is None else [own, cache_directory()]
