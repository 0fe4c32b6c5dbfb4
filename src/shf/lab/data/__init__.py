"""Data of the paper's experiments: found, fetched, verified, loaded.

``load("mnist")`` gives a `Dataset`; ``available()`` says what is on this machine; ``fetch("usps")`` brings one here.
"""

from .catalogue import OF_DATASET
from .datasets import Dataset, load
from .errors import DamagedDataError, DataError, MissingDataError, NoSuchDataError
from .fetching import DataStatus, available, fetch, fetch_original
from .places import cache_directory, data_directory

DATASETS = tuple(OF_DATASET)

__all__ = [
    "DATASETS",
    "DamagedDataError",
    "DataError",
    "DataStatus",
    "Dataset",
    "MissingDataError",
    "NoSuchDataError",
    "available",
    "cache_directory",
    "data_directory",
    "fetch",
    "fetch_original",
    "load",
]
