"""Each protection has a test that fails when the protection is taken out."""

import ast
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutations import A_FILE, A_RUN, A_STEP, MUTATIONS, SUPPLY, Mutation

ROOT = Path(__file__).parents[1]
PARTS = ("src", "tests", "tools", "examples", "Makefile", "pyproject.toml", "requirements.lock", "constraints.txt")
LARGEST = 12 << 30


def docstring(test: str) -> str:
    """Of a test, given as file.py::Class::name[case]."""
    file, *names = test.partition("[")[0].split("::")
    node: ast.AST = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    for name in names:
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == name)
    return ast.get_docstring(node) or ""


def test_the_list_is_about_what_is_there() -> None:
    """Each place is there once, and each test says in words when it fails. Whoever changes such a place looks at the test
    that belongs to it."""
    assert len(MUTATIONS) == len((*A_STEP, *A_RUN, *A_FILE, *SUPPLY))
    for mutation in MUTATIONS.values():
        assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1, mutation
        assert "fails" in docstring(mutation.test).lower(), mutation


def apply(mutation: Mutation, copy: Path) -> None:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / part)
    file = copy / mutation.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("protection", MUTATIONS)
def test_a_protection_taken_out_is_missed(tmp_path: Path, protection: str) -> None:
    """In a copy, under a limit on memory. Fails if the protection's test passes without the protection."""
    print(f"figures: {json.dumps({'mutations': len(MUTATIONS)})}")  # for benchmarks/reliability.py
    mutation = MUTATIONS[protection]
    apply(mutation, tmp_path)
    seconds = "60" if mutation.hangs else "900"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow or not slow", "--timeout", seconds]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"tests/{mutation.test}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LARGEST, LARGEST)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]  # 2: could not be collected
    assert ("Failed: Timeout" in done.stdout) == mutation.hangs, done.stdout[-3000:]
