"""What 0.1.0 saved loads, and goes on as it did there: tests/checkpoints.py made the fixture with that version."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import checkpoints
from helpers import assert_close

SAVED = torch.load(Path(__file__).parent / "fixtures" / "0.1.0.pt", weights_only=True)

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"


def test_the_page_names_modules_that_exist():
    table = PAGE.read_text(encoding="utf-8").partition("## Imports")[2]
    new = [line.split("|")[2] for line in table.splitlines() if line.startswith("| `shf")]
    names = {name for cell in new for name in re.findall(r"`(shf[\w.]*)`", cell)}
    assert len(names) > 15
    assert all(importlib.import_module(name) for name in names)


def test_the_fixture_is_that_versions():
    assert SAVED["version"] == "0.1.0"
    assert set(SAVED["cases"]) == set(checkpoints.CASES)


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_a_state_of_the_first_version_goes_on_as_it_did(name):
    saved = SAVED["cases"][name]
    optimizer = checkpoints.make(name, seed=2)
    optimizer.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    last = checkpoints.BEFORE + checkpoints.AFTER
    found = checkpoints.advance(optimizer, SAVED["data"], checkpoints.BEFORE, last)
    for new, old in zip(found, saved["after"], strict=True):
        assert new.keys() == old.keys()
        for key in old:
            assert_close(new[key], old[key], 1e-6)


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_nothing_of_it_is_left_out_or_made_up(name):
    """Numbers and tensors have the names that they had."""
    saved, optimizer = SAVED["cases"][name]["optimizer"], checkpoints.make(name)
    optimizer.load_state_dict(saved)
    loaded = optimizer.state_dict()
    assert set(loaded["param_groups"][0]["shf"]) == {*saved["param_groups"][0]["shf"], "options", "held"}
    assert {k: set(v) for k, v in loaded["state"].items()} == {k: set(v) for k, v in saved["state"].items()}


def test_without_the_state_the_steps_are_others():
    """The comparison above sees what the state holds: a new optimizer on the same weights goes elsewhere."""
    saved = SAVED["cases"]["default"]
    optimizer = checkpoints.make("default")
    optimizer.model.load_state_dict(saved["model"])
    found = checkpoints.advance(optimizer, SAVED["data"], checkpoints.BEFORE, checkpoints.BEFORE + 1)
    assert (found[0]["theta"] - saved["after"][0]["theta"]).abs().max() > 1e-3
