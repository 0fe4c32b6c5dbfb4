"""The shape of the code: imports point one way, the core needs torch alone, and the public names are these."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shf

FOLDER = Path(shf.__file__).parent
CORE = {
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): path
    for path in sorted(FOLDER.rglob("*.py"))
    if path.relative_to(FOLDER).parts[0] not in ("lab", "cli.py", "__main__.py")
}
"""The files of the core by their names below shf, "cg" or "beyond.kronecker"."""
LEAVES = {"cg", "damping", "search", "batching", "randomness", "rows", "flat", "steady", "tree"}
LABORATORY = ("numpy", "scipy", "matplotlib", "rich", "typer", "tensorboard", "platformdirs", "filelock")


def imported(path: Path) -> set[str]:
    """All modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def siblings(name: str) -> set[str]:
    """The modules of the core that a module of the core imports."""
    return {m.removeprefix("shf.") for m in imported(CORE[name])} & set(CORE)


def test_leaves_know_only_leaves():
    assert set(CORE) >= LEAVES
    assert {name: siblings(name) - LEAVES for name in LEAVES} == {name: set() for name in LEAVES}


@pytest.mark.parametrize("name", ["cg", "damping", "search", "flat"])
def test_the_innermost_know_no_networks(name):
    assert not {m for m in imported(CORE[name]) if m.startswith(("torch.nn", "shf"))}


def test_damping_and_search_are_about_floats():
    assert not {m for name in ("damping", "search") for m in imported(CORE[name]) if m.startswith("torch")}


def test_imports_have_no_circles():
    remaining = {name: siblings(name) - {"__init__"} for name in CORE}
    while remaining:
        free = {name for name, known in remaining.items() if not known & set(remaining)}
        assert free, f"a circle among {sorted(remaining)}"
        remaining = {name: known for name, known in remaining.items() if name not in free}


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("curvature", {"cg.conjugate_gradient", "damping", "step", "optimizer"}),
        ("preconditioner", {"cg.conjugate_gradient", "step", "optimizer"}),
        ("step", {"network", "optimizer", "processes.distributed", "objective", "hf"}),
        ("objective", {"optimizer", "processes.distributed", "hf"}),
        ("batching", {"network"}),
    ],
)
def test_who_does_not_know_whom(name, never):
    known = {m.removeprefix("shf.") for m in imported(CORE[name]) if m.startswith("shf.")}
    assert not known & never


def test_one_module_talks_to_other_processes():
    talks = {name for name in CORE for m in imported(CORE[name]) if m.startswith("torch.distributed")}
    assert talks == {"processes.distributed"}
    assert {name for name in CORE if "processes.distributed" in siblings(name)} == {"processes.together"}


def test_only_the_adapters_know_the_optimizer():
    assert {name for name in CORE if "optimizer" in siblings(name)} <= {"__init__", "hf"}


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_torch_and_itself_alone(name):
    roots = {m.split(".")[0] for m in imported(CORE[name])}
    assert roots <= {"torch", "shf"} | sys.stdlib_module_names


@pytest.mark.parametrize("name", CORE)
def test_the_core_does_not_know_the_laboratory(name):
    assert not {m for m in imported(CORE[name]) if m == "shf.lab" or m.startswith("shf.lab.")}


def test_a_step_works_where_there_is_only_torch():
    program = f"""
import sys
for name in {LABORATORY!r}:
    sys.modules[name] = None  # any import of it fails
import torch, shf
model = torch.nn.Linear(3, 2)
info = shf.SHF(model, torch.nn.CrossEntropyLoss()).step(torch.randn(8, 3), torch.randint(2, (8,)))
assert info.accepted
assert not [name for name in sys.modules if name.startswith("shf.lab")]
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=1200)


def test_public_names():
    assert shf.__all__ == [
        "HF",
        "SHF",
        "CGResult",
        "CGStop",
        "Config",
        "DampingBound",
        "GrowingLoader",
        "HFConfig",
        "NonFiniteError",
        "RankError",
        "SHFWarning",
        "StepInfo",
        "StepMemoryError",
        "conjugate_gradient",
        "gauss_newton_product",
        "hold_steady",
        "losses",
        "presets",
    ]
    assert all(hasattr(shf, name) for name in shf.__all__)


def test_public_names_are_documented():
    assert all(getattr(shf, name).__doc__ for name in shf.__all__)


@pytest.mark.parametrize("name", CORE)
def test_nothing_writes_grad_or_goes_around_autograd(name):
    """`.grad` belongs to the user; `p.data` would be a write that autograd does not see."""
    tree = ast.parse(CORE[name].read_text(encoding="utf-8"))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not [node.lineno for node in attributes if node.attr == "grad" and isinstance(node.ctx, ast.Store)]
    assert not [node.lineno for node in attributes if node.attr == "data" and isinstance(node.ctx, ast.Store)]
