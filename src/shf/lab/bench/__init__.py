"""`shf bench`: what a step costs, measured against the matrix products it cannot do without, and beside its peers.

from shf.lab.bench import run
run()                                     # everything; a quarter of an hour on two cores
run(cases=["step", "memory/usps"])        # a section, one case of another
run(quick=True)                           # shrunk shapes, once each: shows that it works, measures nothing
"""

import sys
from pathlib import Path

from shf.lab.bench.sections import CASES, measure_cases, select
from shf.lab.bench.targets import Target, judge
from shf.lab.outlet import Outlet

__all__ = ["CASES", "Target", "judge", "measure_cases", "run", "select"]

RESULTS = Path("benchmarks") / "results"
"""Where results go by default, from the directory the command is started in."""


def run(out: Path | None = None, cases: list[str] | None = None, quick: bool = False) -> int:
    """Measures, prints tables, and writes JSON and a plot.

    Args:
        out: directory for the results; by default benchmarks/results, and benchmarks/results/some for a choice of cases.
        cases: names of cases ("step/usps") or of whole sections ("step"); by default all.
        quick: shrunk shapes and one repetition of each.

    Returns:
        An exit code: 0 if everything was measured. Missed targets are shown, not failed on: they may be the machine's
        fault.

    Raises:
        ExperimentError: if a name is unknown.
        OSError: if there can be no such directory.
    """
    from rich.console import Console

    from shf.lab.bench import report

    console, errors, chosen = Console(), Outlet(sys.stderr), select(cases)
    place = out or (RESULTS if cases is None else RESULTS / "some")
    place.mkdir(parents=True, exist_ok=True)  # a place that cannot be had is refused before a quarter of an hour
    results = measure_cases(chosen, quick=quick, progress=errors.line)
    report.show(results, console)
    path = report.write(results, place)
    console.print(f"written: {path} and {path.with_suffix('.svg').name}", highlight=False)
    return 0
