"""Shared by the laboratory's tests: nothing of the user's is read or written."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests and workers, so that curves are generated once; tuned settings of each test's own."""
    monkeypatch.setenv("SHF_CACHE", str(_shared(tmp_path_factory) / "cache"))
    tuned = tmp_path_factory.mktemp("tuned") / "tuned.json"
    tuned.write_text("{}")
    monkeypatch.setenv("SHF_TUNED", str(tuned))


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the whole session; a worker of xdist has its own below it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
