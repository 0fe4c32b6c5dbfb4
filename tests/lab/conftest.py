"""Shared by the laboratory's tests: nothing of the user's is read or written."""

import pytest


@pytest.fixture(autouse=True)
def _own_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests, so that curves are generated once; tuned settings of each test's own."""
    monkeypatch.setenv("SHF_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    tuned = tmp_path_factory.mktemp("tuned") / "tuned.json"
    tuned.write_text("{}")
    monkeypatch.setenv("SHF_TUNED", str(tuned))
