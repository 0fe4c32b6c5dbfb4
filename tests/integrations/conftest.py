"""Tests against the real frameworks: `make test-integrations` installs these and runs them; elsewhere they are skipped."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if os.environ.get("SHF_INTEGRATIONS") == "1":
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="against real frameworks: make test-integrations"))
