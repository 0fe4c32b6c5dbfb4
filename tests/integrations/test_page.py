"""The sections of docs/integrations.md run as they stand there, one after the other; each has at most ten lines."""

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))


@pytest.fixture
def names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "DDE_BACKEND", "pytorch")
    found: dict = {"__name__": "example"}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], found)
    found["loader"] = DataLoader(TensorDataset(found["inputs"], found["targets"]), batch_size=25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found


def of_deepxde(names):
    import deepxde
    from test_physics import poisson

    names["pde"] = poisson(deepxde)


def of_pina(names):
    from pina.model import FeedForward
    from pina.problem.zoo import Poisson2DSquareProblem

    names["problem"], names["network"] = Poisson2DSquareProblem(), FeedForward(2, 1, layers=[8])
    names["problem"].discretise_domain(5, "grid")


BEFORE = {"DeepXDE": of_deepxde, "PINA": of_pina}


def test_every_framework_has_one():
    assert {s.lower() for s in SECTIONS} == {"lightning", "transformers", "accelerate", "skorch", "deepxde", "pina"}


@pytest.mark.parametrize("framework", SECTIONS)
def test_it_runs(framework, names):
    code = SECTIONS[framework]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    BEFORE.get(framework, lambda names: None)(names)
    before = torch.cat([p.detach().reshape(-1).clone() for p in names["model"].parameters()])
    exec(code, names)
    if framework == "Lightning":
        names["trainer"].fit(names["Classifier"](), names["loader"])
        assert names["trainer"].global_step == 6
    if framework in ("Lightning", "Accelerate"):
        assert not torch.equal(torch.cat([p.detach().reshape(-1) for p in names["model"].parameters()]), before)
    if framework == "skorch":
        assert len(names["net"].history) == 3
    if framework in ("Transformers", "PINA"):
        assert names["trainer"].global_step == 10 if framework == "PINA" else names["trainer"].state.global_step == 4
    if framework == "DeepXDE":
        assert names["optimizer"].info.loss_after < 1e-2
