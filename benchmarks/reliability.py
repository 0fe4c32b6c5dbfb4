"""The slow tests and the fuzzers of docs/reliability.md: run here, recorded, and written into the page.

python benchmarks/reliability.py slow tests/test_problems.py …   # `pytest -m slow` of each file
python benchmarks/reliability.py fuzz idx npz … --seconds 600    # a parser after the other; all of them if none is named
python benchmarks/reliability.py report                          # these records and the soak's, into docs/reliability.md

Records: benchmarks/results/reliability.json, where the last run of a test or parser replaces the one before.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shf.lab.pages import fill, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reliability.md"
FUZZER = "tests/fuzz/fuzz.py"


def note(folder: Path, part: str, name: str, record: dict[str, Any]) -> None:
    """Puts one record in its place, beside those that others have written meanwhile."""
    file = folder / "reliability.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known.setdefault(part, {})[name] = record
    known[part] = dict(sorted(known[part].items()))
    file.write_text(json.dumps(known, indent=1) + "\n")


def run(command: Sequence[str]) -> tuple[int, str, dict[str, Any]]:
    """Exit code, everything that was said, and when and how long."""
    began, started = datetime.datetime.now(datetime.UTC), time.monotonic()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    print(done.stdout, flush=True)
    seconds = round(time.monotonic() - started)
    return done.returncode, done.stdout, {"began": began.isoformat(timespec="seconds"), "seconds": seconds}


def slow(files: Sequence[str], folder: Path) -> None:
    for file in files:
        code, said, when = run(["-m", "pytest", "-m", "slow", "-s", "-q", "--timeout", "7200", file])
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", said)}
        figures = [json.loads(line.partition("figures: ")[2]) for line in said.splitlines() if "figures: {" in line]
        tests = {"passed": counts.get("passed", 0), "failed": counts.get("failed", 0) + counts.get("error", 0)}
        note(folder, "slow", file, {**when, **tests, "code": code, "figures": figures[0] if figures else {}})


def fuzz(targets: Sequence[str], seconds: int, folder: Path) -> None:
    for target in targets:
        inputs = tempfile.mkdtemp(prefix=f"fuzz-{target}-")
        code, said, when = run(["-W", "ignore", FUZZER, target, str(seconds), inputs])
        note(folder, "fuzz", target, {**when, "runs": executed(said), "code": code})


def executed(said: str) -> int:
    """libFuzzer's own count of inputs."""
    found = re.findall(r"stat::number_of_executed_units: *(\d+)", said)
    return int(found[-1]) if found else 0


# --- the page -----------------------------------------------------------------------------------------------------------


RIGHT = "---:"
"""The rule of columns that hold numbers."""


def report(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Puts the figures of the records between the marks of the page."""
    tried = json.loads((folder / "reliability.json").read_text())
    fuzzed = [(name, of["seconds"], f"{of['runs']:,}") for name, of in tried["fuzz"].items()]
    ran = [(f"`{name}`", of["passed"], of["failed"], of["seconds"]) for name, of in tried["slow"].items()]
    parts = {
        "soak": soak_words(json.loads((folder / "soak.json").read_text())),
        "fuzz": table(("parser", "seconds", "inputs"), fuzzed, RIGHT),
        "problems": problems_line(tried["slow"]["tests/test_problems.py"]),
        "mutations": mutations_line(tried["slow"]["tests/test_mutations.py"]),
        "slow": table(("file", "passed", "failed", "seconds"), ran, RIGHT),
    }
    fill(page, parts)


def soak_words(soaked: dict[str, Any]) -> str:
    words = (
        f"`{soaked['command']}`, begun {soaked['began']}: {soaked['minutes']:g} minutes, {soaked['rounds']} rounds of "
        f"{soaked['iterations per round']} iterations; each ended with the same metrics and bitwise the same parameters, "
        "δ and λ as its undisturbed twin."
    )
    times = [pair for part in ("faults", "the runs' own words") for pair in sorted(soaked[part].items())]
    return f"{words}\n\n{table(('what', 'times'), times, RIGHT)}"


def problems_line(of: dict[str, Any]) -> str:
    figures = of["figures"]
    outcomes = ", ".join(f"{number} had a step {word}" for word, number in figures["outcomes"].items())
    first, last = figures["seeds"]
    return (
        f"`python benchmarks/reliability.py slow tests/test_problems.py`, seeds {first} to {last}, {of['seconds']} s: "
        f"{outcomes} (a problem counts under each that it had); {figures['broken']} broke an invariant."
    )


def mutations_line(of: dict[str, Any]) -> str:
    return (
        "`python benchmarks/reliability.py slow tests/test_mutations.py`: "
        f"{of['figures'].get('mutations', of['passed'] + of['failed'] - 1)} protections were taken out one at a time; "
        f"{of['failed']} times no test failed."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["slow", "fuzz", "report"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--results", type=Path, default=RESULTS)
    words = parser.parse_args()
    if words.action == "slow":
        slow(words.names, words.results)
    elif words.action == "fuzz":
        fuzz(
            words.names or sorted(p.name for p in (ROOT / "tests/fuzz/corpus").iterdir()), words.seconds, words.results
        )
    else:
        report(words.results)


if __name__ == "__main__":
    main()
