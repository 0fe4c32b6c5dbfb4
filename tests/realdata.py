"""Where tests find MNIST, USPS and Reuters: in $SHF_DATA, or else in shared/data beside the repository."""

import os
from pathlib import Path

import pytest

from shf.lab.data.catalogue import COLLECTIONS

DATA = Path(os.environ.get("SHF_DATA") or Path(__file__).parents[2] / "shared" / "data")


def real(name: str) -> Path:
    """The directory that has the data set's files; a visible skip where there is none."""
    if not DATA.is_dir() or COLLECTIONS[name].absent(DATA):
        pytest.skip(f"{name} is not in {DATA}: set SHF_DATA to a directory that has it")
    return DATA
