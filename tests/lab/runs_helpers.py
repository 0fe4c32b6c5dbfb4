"""Runs small enough for tests: a tiny CURVES autoencoder, and what it takes to compare two runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from shf.lab.checkpoint import CheckpointStore
from shf.lab.configure import Request, configure
from shf.lab.experiments import Experiment, Task
from shf.lab.runconfig import RunConfig

REPOSITORY = Path(__file__).resolve().parents[2]


def tiny_experiment(**changes: Any) -> Experiment:
    """48 curves, 784-6-2 and back: an epoch is a few milliseconds."""
    experiment = Experiment(
        name="tiny",
        summary="a tiny autoencoder",
        task=Task.AUTOENCODER,
        data="curves",
        data_options={"train": 48, "test": 16},
        sizes=(784, 6, 2),
        epochs=3,
        gradient_batch=16,
        metric="train_squared_error",
        figure="Table 9",
        minutes=1,
        paper={"shf": 0.5},
        settings={"damping": 1.0, "cg_iterations": 3, "curvature_batch": 8},
    )
    return dataclasses.replace(experiment, **changes)


def tiny_config(
    method: str = "shf",
    *,
    epochs: int | None = 3,
    experiment: Experiment | None = None,
    batch: int = 16,
    **request: Any,
) -> RunConfig:
    words = Request("tiny", method, epochs=epochs, untuned=True, threads=1, **request)
    return dataclasses.replace(configure(words, experiment or tiny_experiment()), batch=batch)


def rows_without_clock(directory: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl but for fields whose names end in _seconds."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]


def final_state(directory: Path) -> dict[str, Any]:
    loaded = CheckpointStore(directory / "checkpoints").load_latest()
    assert loaded is not None
    return loaded.state


def assert_same_tree(a: Any, b: Any, path: str = "") -> None:
    """Equal structures, tensors bitwise; fields about the clock and the files are passed over."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key not in ("elapsed", "metrics"):
                assert_same_tree(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_tree(x, y, f"{path}/{i}")
    else:
        assert a == b, path


def assert_same_run(a: Path, b: Path) -> None:
    """Two run directories with the same metrics (but for the clock) and bitwise the same parameters and states."""
    assert rows_without_clock(a) == rows_without_clock(b)
    assert_same_tree(final_state(a), final_state(b))


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
