"""What the documentation says is so: its examples run, its tables and its map follow the code."""

import json
import re
from pathlib import Path

import pytest
import torch

import architectures_table
import shf

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/using.md"]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_first_example_runs_as_written(page, capsys):
    exec(compile(blocks(page)[0], page, "exec"), {"__name__": "example"})
    assert "nan" not in capsys.readouterr().out


def test_the_readmes_figures_are_those_of_the_records():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    for method, name in (("fast", "SHF fast"), ("shf", "SHF"), ("adam", "Adam"), ("nag", "NAG")):
        rows = (ROOT / "results" / "demo" / method / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = [row for row in map(json.loads, rows) if row["row"] == "epoch"][-1]
        assert f"| {name} | {last['train_squared_error']:.3f} | {last['test_squared_error']:.3f} |" in text


def test_the_preset_and_saving_as_described(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "example"}
    first, preset, saving, *_ = blocks("docs/using.md")
    exec(first, names)
    exec(preset, names)
    damping = names["optimizer"].damping
    exec(saving, names)
    assert names["optimizer"].damping == damping
    assert names["error"] < 1.2
    assert (tmp_path / "checkpoint.pt").exists()


def test_structural_damping_as_described():
    (block,) = [block for block in blocks("docs/using.md") if "hold_steady" in block]
    names: dict = {"__name__": "example", "torch": torch, "shf": shf}
    exec(block, names)
    assert names["optimizer"].step(torch.randn(8, 5, 2), torch.randn(8, 1)).accepted


def test_the_table_of_architectures_is_up_to_date():
    assert architectures_table.PAGE.read_text(encoding="utf-8") == architectures_table.page()


def test_the_map_names_what_exists():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(table) > 15
    for line in table:
        _, _, _, functions, tests, _ = line.split("|")
        for module, name in re.findall(r"`(\w+)\.(\w+)", functions):
            source = (ROOT / "src" / "shf" / f"{module}.py").read_text(encoding="utf-8")
            assert re.search(rf"(def|class) {name}\b", source), f"{module}.{name}"
        for name, function in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", tests):
            assert f"def {function}" in (ROOT / "tests" / name).read_text(encoding="utf-8"), name
