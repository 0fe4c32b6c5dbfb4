"""Builds the sdist and the wheel, and tries them as a user would, each in an empty environment: python tools/wheel.py

    python tools/wheel.py --python python3.11 python3.13 --torch 2.13.0 --out benchmarks/results/wheels.json
    python tools/wheel.py page                                   the table of that record, in docs/release.md

In every environment: the wheel with torch alone, then the first example of the README, a state saved and loaded as data, and
`shf --version`. With `--tests` the tests of the core run there too, against the installed wheel.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "benchmarks" / "results" / "wheels.json", ROOT / "docs" / "release.md"
STATE = """
import io
saved = io.BytesIO()
torch.save(optimizer.state_dict(), saved)
saved.seek(0)
optimizer.load_state_dict(torch.load(saved, weights_only=True))
assert optimizer.step(inputs, targets).loss_before > 0
print(torch.__version__)
"""
CORE_TESTS = (
    "test_golden.py",
    "test_cases.py",
    "test_optimizer.py",
    "test_state.py",
    "test_hf.py",
    "linear",
    "damping",
)


def call(*command: str | Path, cwd: Path | None = None) -> str:
    """What it prints; ends with what it says if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def build(directory: Path) -> tuple[Path, Path]:
    """sdist, and the wheel made from it, as an index would serve them."""
    call(sys.executable, "-m", "build", "--outdir", directory, ROOT)
    return next(directory.glob("*.tar.gz")), next(directory.glob("*.whl"))


def first_example() -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def attempt(python: str, torch: str, wheel: Path, *, tests: bool) -> dict[str, Any]:
    """One environment: what was in it, and what it said."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        call(python, "-m", "venv", home / "env")
        own = home / "env" / "bin" / "python"
        pip = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        call(*pip, f"torch=={torch}", wheel)
        packages = json.loads(call(own, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
        (home / "first.py").write_text(first_example() + STATE, encoding="utf-8")
        row: dict[str, Any] = {
            "python": call(own, "-c", "import platform; print(platform.python_version())").strip(),
            "torch": call(own, "first.py", cwd=home).split()[-1],
            "numpy": any(package["name"] == "numpy" for package in packages),
            "version": call(home / "env" / "bin" / "shf", "--version", cwd=home).split()[-1],
        }
        if tests:
            call(*pip, "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "numpy", "scipy")
            chosen = [ROOT / "tests" / name for name in CORE_TESTS]
            said = call(own, "-m", "pytest", "-q", "-n", "2", "-c", ROOT / "pyproject.toml", *chosen, cwd=home)
            row["tests"] = said.strip().splitlines()[-1].strip("= ")
        return row


def page() -> None:
    """The record's table, between its marks."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    head = "| Python | torch | numpy there | first example, state, `shf --version` | tests of the core |\n"
    head += "|---|---|---|---|---|\n"
    rows = "".join(
        f"| {row['python']} | {row['torch']} | {'yes' if row['numpy'] else 'no'} | {row['version']} | "
        f"{row.get('tests', 'not run')} |\n"
        for row in record["environments"]
    )
    sdist, wheel = (record[name] / 1e3 for name in ("sdist", "wheel"))
    sizes = f"\nThe sdist has {sdist:.0f} kB, the wheel {wheel:.0f} kB. {record['system']}.\n"
    text = PAGE.read_text(encoding="utf-8")
    table = f"<!-- wheels -->\n\n{head}{rows}{sizes}\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- wheels -->.*?<!-- end -->", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["try", "page"], default="try")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--torch", nargs="+", default=["2.13.0"], help="versions")
    parser.add_argument("--tests", action="store_true", help="run the tests of the core in every environment")
    parser.add_argument("--out", type=Path, help="add the rows to this record")
    chosen = parser.parse_args()
    if chosen.what == "page":
        return page()
    with tempfile.TemporaryDirectory() as place:
        sdist, wheel = build(Path(place))
        rows = []
        for python in chosen.python:
            for torch in chosen.torch:
                rows.append(attempt(python, torch, wheel, tests=chosen.tests))
                print(json.dumps(rows[-1]), flush=True)
        record = {"sdist": sdist.stat().st_size, "wheel": wheel.stat().st_size, "system": platform.platform()}
    if chosen.out is not None:
        before = json.loads(chosen.out.read_text(encoding="utf-8"))["environments"] if chosen.out.exists() else []
        made = {(row["python"], row["torch"]) for row in rows}
        kept = [row for row in before if (row["python"], row["torch"]) not in made]
        chosen.out.write_text(json.dumps({**record, "environments": [*kept, *rows]}, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
