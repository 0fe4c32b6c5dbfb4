"""The benchmark of models as people have them, on networks of moments: it runs, and its tables say what its records say."""

import json

import pytest
import torch
from torch import nn

import models
import networks
from helpers import ticking


def gated():
    body = [*networks.convolved(3, 3, 3, groups=3), networks.Squeeze(3, 2)]
    return nn.Sequential(*body, *networks.head(3))


GATED = models.Case("gated", gated, networks.images(4), 4, training=False)


@pytest.mark.parametrize(
    ("make", "parameters"),
    [(networks.resnet, 11_181_642), (networks.efficientnet, 4_020_358), (networks.mobilenet, 2_236_682)],
)
def test_networks_have_the_published_layers(make, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == parameters


def test_the_parts_of_a_first_step_are_found(monkeypatch):
    monkeypatch.setattr(models, "clock", ticking())
    found = models.first_step(GATED)
    assert {"probing", "renewal", "first damping", "depthwise", "squeeze", "squeeze inverses"} == set(found["parts"])
    assert min(found["parts"].values()) > 0
    assert found["parts"]["probing"] + found["parts"]["renewal"] + found["parts"]["first damping"] < found["first"]


def test_rows_that_mix_are_compared_and_trained(monkeypatch):
    monkeypatch.setattr(models, "clock", ticking())
    monkeypatch.setattr(models, "STEPS", 2)
    monkeypatch.setattr(models, "SEEDS", (0,))
    monkeypatch.setattr(models, "ROUNDS", 1)
    tiny = models.Case("tiny", lambda: networks.Packed(2, 3), networks.sequences(2, 4), 6)
    found = models.mixed(tiny, tiny)
    assert len(found["seconds"]["default"]) == len(found["seconds"]["none"]) == models.ROUNDS
    assert set(found["final"]["1"]) == {"default", "exact", "none"}


def test_tables_say_what_records_say(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "RECORDS", tmp_path)
    parts = {"probing": 1.0, "renewal": 2.0, "first damping": 0.5, "depthwise": 0.1, "squeeze inverses": 0.2}
    first = {"parameters": 1000, "rows": 8, "gradient": 0.5, "first": 6.0, "later": [2.0, 1.0, 3.0], "parts": parts}
    final = {"1": {"default": [1.0, 2.0], "exact": [1.0], "none": [3.0]}}
    mixed = {"rows": 8, "seconds": {"default": [3.0, 2.0], "none": [2.0, 2.0]}, "steps": 2, "final": final}
    records = {
        "fast/efficientnet": first,
        "mixed/packed": mixed,
        "memory/resnet18": {"gradient": 2**20, "fast": 2**22, "soap": 2**23},
    }
    for name, found in records.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.json").write_text(json.dumps({"found": found}))
    assert list(next(models.firsts())[1:]) == ["1,000", "8", "0.5 s", "2 s", "6 s", "3.00", "0.50", "1.00", "0.25"]
    assert list(next(models.channels())[1:]) == ["0.20", "0.00", "0.40", "0.60"]
    assert list(next(models.mixtures())[1:]) == ["8", "2 s", "2.5 s", "1.25"]
    assert list(next(models.trainings())[1:]) == ["1", "1.5 (1 to 2)", "1 (1 to 1)", "3 (3 to 3)"]
    assert list(next(models.eaten())[1:]) == ["1 MiB", "4 MiB", "8 MiB", "4.00", "0.50"]
