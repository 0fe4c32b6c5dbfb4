"""Nothing depends on how fast the machine is: one module reads the time; with wrong clocks tests come out the same."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shf.lab
from shf.lab import clock

TESTS = Path(__file__).parents[1]
LABORATORY = Path(shf.lab.__file__).parent
WRONG = ("stopped", "hundredfold")
FILES = ("test_tuning.py", "test_fast_benchmarks.py")
"""Of the laboratory, what has budgets in seconds and is done soon; `make test-slow` takes all tests."""


def python(program: str, wrong: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, clock.VARIABLE: wrong}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=1200
    )


def test_a_clock_goes_as_it_is_told_in_other_processes_too() -> None:
    look = (
        "from time import perf_counter as now; from shf.lab.clock import CLOCKS; print(now(), CLOCKS['wall'](), now())"
    )
    before, right, after = map(float, python(look, "").stdout.split())
    assert before <= right <= after
    before, fast, after = map(float, python(look, "hundredfold").stdout.split())
    assert 100 * before <= fast <= 100 * after
    assert float(python(look, "stopped").stdout.split()[1]) == 0
    refused = python(look, "slow")
    assert refused.returncode != 0
    assert "SHF_CLOCK=slow: must be stopped or hundredfold" in refused.stderr


def test_the_laboratorys_clocks_go() -> None:
    started = {name: now() for name, now in clock.CLOCKS.items()}
    sum(range(100_000))
    assert all(now() >= started[name] for name, now in clock.CLOCKS.items())


def reads_the_time(path: Path) -> bool:
    """Whether a file imports the module `time`; dates are something else."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return "time" in named | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def test_one_module_of_the_laboratory_reads_the_time() -> None:
    assert [path.name for path in LABORATORY.rglob("*.py") if reads_the_time(path)] == ["clock.py"]


BUDGETS = re.compile(r"minutes=0?\.\d|--minutes\W+0?\.\d|process_time\(|time\.time\(")


def test_no_test_has_a_budget_of_moments() -> None:
    """A fraction of a minute that a test trains for is another number of steps on every machine."""
    files = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    assert not [path.name for path in files if BUDGETS.search(path.read_text(encoding="utf-8"))]


def outcomes(wrong: str, *words: str) -> dict[str, str]:
    """What pytest says of every test, with the laboratory's clocks replaced in all its processes."""
    command = [sys.executable, "-m", "pytest", "-v", "--color", "no", "-p", "no:cacheprovider", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {clock.VARIABLE: wrong, "COLUMNS": "400"}
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, env=environment)
    found = re.findall(
        r"^(?:\[gw\d\].*?(PASSED|FAILED|ERROR|SKIPPED|XFAIL) )?(tests/\S+::.*?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL).*)?$",
        done.stdout,
        re.M,
    )
    told = {name: before or after for before, name, after in found if before or after}
    assert done.returncode == 0, f"with {wrong} clocks:\n{done.stdout[-20_000:]}"
    return told


def test_budgets_are_spent_alike_whatever_the_clock_says() -> None:
    files = [str(Path(__file__).with_name(name).relative_to(TESTS.parent)) for name in FILES]
    stopped, fast = (outcomes(wrong, *files, "-m", "not slow and not waits", "-k", "not survives") for wrong in WRONG)
    assert stopped == fast
    assert len(stopped) > 50


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_tests_come_out_alike_whatever_the_clock_says() -> None:
    stopped, fast = (
        outcomes(wrong, "-n", "2", "--dist", "loadgroup", "-m", "not slow and not waits") for wrong in WRONG
    )
    assert stopped == fast
    assert len(stopped) > 4000
