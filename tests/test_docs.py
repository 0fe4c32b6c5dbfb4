"""What the documentation says is so: its examples run, its tables and its map follow the code."""

import copy
import doctest
import re
from pathlib import Path

import pytest
import torch

import architectures_table
import shf
from shf import closure, losses, optimizer, product, terms
from shf.data import growing
from shf.linear import cg
from shf.model import steady

ROOT = Path(__file__).parent.parent
BESIDE = ("lab", "sklearn", "integrations")
ROOMS = [path.parent.name for path in (ROOT / "src" / "shf").glob("*/__init__.py") if path.parent.name not in BESIDE]
"""The packages of the core."""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/using.md"])
def test_the_first_example_runs_as_written(page):
    names: dict = {"__name__": "example"}
    exec(compile(blocks(page)[0], page, "exec"), names)
    assert names["info"].loss_after < names["info"].loss_before
    assert names["optimizer"].epoch_index == 3


def test_the_examples_of_using_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {"__name__": "example"}
    first, from_adam, preset, evaluating, gaussian, saving, batch_method, steady, terms, time_first, other_data = (
        blocks("docs/using.md")
    )
    exec(first, names)
    start = torch.nn.functional.cross_entropy(names["model"](names["data"].tensors[0]), names["data"].tensors[1])
    for block in (from_adam, preset, evaluating):
        exec(block, names)
    assert names["error"] < 0.98 * start
    exec(gaussian, apart := {"torch": torch, "shf": shf})
    with pytest.warns(shf.NonConvexLossWarning, match="Fisher"):
        assert apart["optimizer"].step(torch.randn(20, 784), torch.randn(20, 1)).accepted
    save, load = saving.split("\n\n")
    exec(save, names)
    kept = {name: copy.deepcopy(part.state_dict()) for name, part in names["parts"].items()}
    for batch in names["loader"]:
        names["loader"].hear(names["optimizer"].step(*batch))
    assert not same(kept, {name: part.state_dict() for name, part in names["parts"].items()})
    exec(load, names)
    assert same(kept, {name: part.state_dict() for name, part in names["parts"].items()})
    exec(batch_method, names)
    assert names["info"].loss_after < names["info"].loss_before
    exec(steady, names)
    assert names["optimizer"].step(torch.randn(8, 5, 2), torch.randn(8, 1)).accepted
    exec(terms, names)
    assert sum(names["info"].terms.values()) == pytest.approx(names["info"].loss_before)
    assert names["info"].loss_after < 0.2
    names["model"], names["loss"] = torch.nn.Linear(3, 4), lambda z, t: torch.nn.functional.mse_loss(z, t)
    exec(time_first, names)
    assert names["optimizer"]._subject.count(torch.randn(5, 8, 3)) == 8
    assert names["optimizer"].step(torch.randn(5, 8, 3), torch.randn(5, 8, 4)).accepted
    graphs, names["model"], names["loss"] = [torch.randn(3) for _ in range(6)], Graphs(), torch.nn.MSELoss()
    exec(other_data, names)
    assert names["optimizer"].step(graphs, torch.randn(6, 1)).accepted


def test_the_closure_of_the_page_on_loops_runs():
    names: dict = {"__name__": "example"}
    exec(blocks("docs/integrations.md")[0], names)
    assert names["info"].loss_after < names["info"].loss_before


class Graphs(torch.nn.Module):
    """Stands for a model of things that are not rows of tensors."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def run(self, graphs):
        return self.layer(torch.stack(graphs))


def same(a, b):
    leaves, others = (torch.utils._pytree.tree_flatten(value)[0] for value in (a, b))
    return len(leaves) == len(others) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(leaves, others, strict=True)
    )


MODULES = [cg, closure, growing, losses, optimizer, product, steady, terms]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(module, extraglobs={"torch": torch, "nn": torch.nn, "shf": shf})
    assert result.attempted
    assert not result.failed


def test_the_table_of_architectures_is_up_to_date():
    assert architectures_table.PAGE.read_text(encoding="utf-8") == architectures_table.page()


def test_the_map_names_what_exists():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(table) > 15
    for line in table:
        _, _, _, functions, tests, _ = line.split("|")
        for room, module, names in re.findall(rf"`({'|'.join(ROOMS)})?\.?(\w+)\.([\w.]+)", functions):
            source = (ROOT / "src" / "shf" / room / f"{module}.py").read_text(encoding="utf-8")
            for name in names.split("."):
                assert re.search(rf"(def|class) {name}\b", source), f"{module}.{names}"
        for name, function in re.findall(r"`((?:\w+/)?test_\w+\.py)(?:::(\w+))?`", tests):
            source = (ROOT / "tests" / name).read_text(encoding="utf-8")
            assert not function or re.search(rf"def {function}\b", source), f"{name}::{function}"


def listed(words: str) -> dict[str, list[str]]:
    """The modules of a list of the map by their room, "" for those in none: a line's words before its sentence."""
    found: dict[str, list[str]] = {"": []}
    room = ""
    for line in filter(None, words.splitlines()):
        names = re.split(r"\s{3,}", line.strip())[0].split()
        if not line.startswith(" "):
            room = names[0].rstrip("/") if names[0].endswith("/") else ""
        found.setdefault(room, []).extend(name for name in names if not name.endswith("/"))
    return found


def test_the_map_has_every_module_of_the_core_once():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8").partition("## Modules")[2]
    found = listed(re.findall(r"```\n(.*?)```", text, re.DOTALL)[0])
    assert set(ROOMS) <= set(found)
    for room in ("", *ROOMS):
        modules = {path.stem for path in (ROOT / "src" / "shf" / room).glob("[!_]*.py")}
        assert sorted(found[room]) == sorted(modules), room


def test_the_map_has_every_module_of_the_laboratory():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8").partition("## Modules")[2]
    named = set(re.findall(r"\w+/?", re.findall(r"```\n(.*?)```", text, re.DOTALL)[1]))
    folder = ROOT / "src" / "shf" / "lab"
    packages = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert not ({path.stem for path in folder.glob("[!_]*.py")} | packages) - named


def test_the_walk_names_modules_in_the_order_of_a_step():
    """Those of the way down and up, and none that does not exist."""
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    walk = text.partition("## A walk through one step")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([\w.]+)`", walk, re.MULTILINE)
    assert steps[0] == steps[-1] == "optimizer"
    assert all((ROOT / "src" / "shf" / f"{name.replace('.', '/')}.py").exists() for name in steps)
    methods = re.findall(r"    - \*\*([\w.]+)\*\*", walk)
    source = (ROOT / "src" / "shf" / "algorithm.py").read_text(encoding="utf-8").partition("def shf_step")[2]
    calls = {"solver.solve": "method.solver", "precondition": "expansion.precondition"}
    places = [source.index(calls.get(name, f"{name}(")) for name in methods]
    assert places == sorted(places)
    assert len(methods) == 7
