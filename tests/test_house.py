"""What can be counted of the house does not get worse: tools/house.py counts it."""

import runpy
from pathlib import Path

import pytest

import shf

HOUSE = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "house.py"))


def test_no_module_imports_more_than_twelve_others():
    assert HOUSE["fan_out"]()[0] <= 12


def test_every_option_is_a_field_of_one_part():
    owners = HOUSE["declared"]()
    selectors = {"damping_rule", "preconditioner", "solver"}
    assert set(owners) == {*shf.Config.names(), *shf.HFConfig.names()} - selectors
    assert not {name: parts for name, parts in owners.items() if len(parts) != 1}


@pytest.mark.parametrize(("name", "own"), [("default", 750), ("fast", 600)])
def test_a_small_step_calls_no_more_functions_and_goes_no_deeper(name, own):
    found = HOUSE["calls"](HOUSE["OPTIONS"][name])
    assert 0 < found.across < found.own <= own
    assert 0 < found.own_frames <= 10


def test_rooms_and_lines_are_counted():
    lines = HOUSE["lines"]()
    assert lines["core"] + lines["laboratory and commands"] == lines["all"]
    assert all(HOUSE["since"]().values())
    assert all(HOUSE["_lines_of"](name) for names in HOUSE["SINCE"].values() for name in names)
    assert ("problems", "model") in HOUSE["edges"]()
    assert ("model", "problems") not in HOUSE["edges"]()
