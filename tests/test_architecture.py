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
    if path.relative_to(FOLDER).parts[0] not in ("lab", "sklearn", "integrations", "cli.py", "__main__.py")
}
"""The files of the core by their names below shf, "state" or "linear.cg"; a room's face is "linear.__init__"."""
LABORATORY = ("numpy", "scipy", "sklearn", "matplotlib", "rich", "typer", "tensorboard", "platformdirs", "filelock")

ORDER = (
    ("component", "errors", "groups", "presets"),
    ("linear",),
    ("info", "selection", "solvers"),
    ("data",),
    ("runtime",),
    ("losses",),
    ("hessian",),
    ("model",),
    ("state", "update"),
    ("distributed", "local"),
    ("averaging",),
    ("damping", "lastsolution", "preconditioners", "probing"),
    ("commit", "method", "nn", "options", "problems", "product", "subject"),
    ("algorithm", "closure", "roles"),
    ("objective",),
    ("composition",),
    ("iteration", "terms"),
    ("base",),
    ("hf", "optimizer"),
    ("__init__",),
)
"""The rooms, and the files that stand in none, from the innermost to the outermost: each imports only what stands above
it."""
MOST = 12


def imported(path: Path) -> set[str]:
    """All modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str) -> str | None:
    """The file of the core that an imported name is in; a room's face where it comes from that."""
    name = name.removeprefix("shf.")
    for found in (name, f"{name}.__init__"):
        if found in CORE:
            return found
    return module_of(name.rpartition(".")[0]) if "." in name else None


def siblings(name: str) -> set[str]:
    """The modules of the core that a module of the core imports."""
    found = {module_of(m) for m in imported(CORE[name]) if m == "shf" or m.startswith("shf.")}
    return {m for m in found if m is not None} - {name}


def room(name: str) -> str:
    return name.partition(".")[0]


def test_every_room_has_its_place():
    assert {room(name) for name in CORE} - {"nn"} == {name for rooms in ORDER for name in rooms} - {"nn"}


def test_rooms_import_one_way():
    """The graph of the rooms, drawn anew from the files: no edge goes down."""
    place = {name: k for k, rooms in enumerate(ORDER) for name in rooms}
    down = {
        (name, other)
        for name in CORE
        for other in siblings(name)
        if room(name) != room(other) and place[room(other)] >= place[room(name)]
    }
    assert not down


@pytest.mark.parametrize("name", [name for name in CORE if not name.endswith("__init__")])
def test_no_module_imports_many_others(name):
    assert len(siblings(name)) <= MOST


@pytest.mark.parametrize("name", ["linear.cg", "linear.flat", "damping.levenberg", "selection"])
def test_the_innermost_know_no_networks(name):
    assert not {m for m in imported(CORE[name]) if m.startswith("torch.nn")}
    assert not {m for m in siblings(name) if room(m) in ("model", "probing", "problems")}


def test_imports_have_no_circles():
    remaining = {name: siblings(name) - {"__init__"} for name in CORE}
    while remaining:
        free = {name for name, known in remaining.items() if not known & set(remaining)}
        assert free, f"a circle among {sorted(remaining)}"
        remaining = {name: known for name, known in remaining.items() if name not in free}


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("model.gaussnewton", {"linear.solver", "damping.rule", "algorithm", "optimizer"}),
        ("preconditioners.diagonal", {"linear.solver", "algorithm", "optimizer"}),
        ("algorithm", {"model.network", "optimizer", "distributed.channel", "problems.batch", "hf", "composition"}),
        ("problems.batch", {"optimizer", "distributed.channel", "hf", "algorithm"}),
        ("data.batches", {"model.network"}),
    ],
)
def test_who_does_not_know_whom(name, never):
    assert not siblings(name) & never


def test_algorithm_1_knows_its_parts_by_their_protocols():
    """None of the rules, preconditioners and solvers that there are."""
    concrete = {"damping.heldout", "linear.warmstart", "preconditioners.diagonal", "preconditioners.kronecker"}
    assert not siblings("algorithm") & concrete


def test_one_module_talks_to_other_processes():
    talks = {name for name in CORE for m in imported(CORE[name]) if m.startswith("torch.distributed")}
    assert talks <= {"distributed.channel"}
    assert {name for name in CORE if "distributed.channel" in siblings(name)} == {"distributed.replicated"}


def test_only_the_face_knows_the_optimizers():
    assert {name for name in CORE if siblings(name) & {"optimizer", "hf"}} == {"__init__"}


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_torch_and_itself_alone(name):
    roots = {m.split(".")[0] for m in imported(CORE[name])}
    assert roots <= {"torch", "shf"} | sys.stdlib_module_names


@pytest.mark.parametrize("name", CORE)
def test_the_core_does_not_know_the_laboratory(name):
    """Nor the estimators."""
    assert not {
        m for m in imported(CORE[name]) if f"{m}.".startswith(("shf.lab.", "shf.sklearn.", "shf.integrations."))
    }


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
        "NonConvexLossWarning",
        "NonFiniteError",
        "RankError",
        "SHFWarning",
        "StepInfo",
        "StepMemoryError",
        "Term",
        "batch",
        "conjugate_gradient",
        "damping",
        "evaluate",
        "gauss_newton_product",
        "hold_steady",
        "losses",
        "preconditioners",
        "presets",
        "solvers",
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
