"""Optimizers in the middle of a run, to be saved by one version of shf and loaded by another.

`PYTHONPATH=OLD/src python tests/checkpoints.py tests/fixtures/0.1.0.pt` saves them with the version in OLD: the state after
three steps, and what the two steps after it came to.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shf

FEATURES, CLASSES, ROWS, BEFORE, AFTER = 4, 3, 30, 3, 2
CASES: dict[str, tuple[type[shf.SHF] | type[shf.HF], dict[str, Any]]] = {
    "default": (shf.SHF, {}),
    "options": (shf.SHF, {"curvature_batch": 10, "weight_decay": 1e-3, "delta_momentum": "exact", "cg_iterations": 5}),
    "fast": (shf.SHF, dict(shf.presets.fast)),
    "held-out": (shf.SHF, {"damping_rule": "held-out", "damping_factor": 0.8, "averaging": 0.9}),
    "HF": (shf.HF, {"cg_iterations": 20}),
}
COMPARED = ("loss_before", "loss_after", "gradient_norm", "reduction_ratio", "damping", "step_size")


def make(name: str, seed: int = 1) -> Any:
    """An optimizer of a small network with dropout."""
    kind, options = CASES[name]
    torch.manual_seed(seed)
    layers = [nn.Linear(FEATURES, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, CLASSES)]
    return kind(nn.Sequential(*layers).double(), nn.CrossEntropyLoss(), seed=seed, **options)


def batches() -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(ROWS, FEATURES, generator=source, dtype=torch.float64),
            torch.randint(CLASSES, (ROWS,), generator=source),
        )
        for _ in range(BEFORE + AFTER)
    ]


def advance(optimizer: Any, data: list[tuple[Tensor, Tensor]], first: int, last: int) -> list[dict[str, Any]]:
    """What some steps come to, an epoch's end after the second; plain numbers and tensors."""
    found = []
    for k in range(first, last):
        batch = data[k]
        info = optimizer.step(data[:2], curvature=batch) if isinstance(optimizer, shf.HF) else optimizer.step(*batch)
        if k == 1:
            optimizer.next_epoch()
        theta = torch.cat([p.detach().reshape(-1) for p in optimizer.model.parameters()])
        values = dataclasses.asdict(info)
        found.append({"theta": theta, **{name: float(values[name]) for name in COMPARED}})
    return found


def save(path: Path) -> None:
    data, cases = batches(), {}
    for name in CASES:
        optimizer = make(name)
        advance(optimizer, data, 0, BEFORE)
        model = {key: value.clone() for key, value in optimizer.model.state_dict().items()}
        state = optimizer.state_dict()
        after = advance(optimizer, data, BEFORE, BEFORE + AFTER)
        cases[name] = {"model": model, "optimizer": state, "after": after}
    torch.save({"version": shf.__version__, "data": data, "cases": cases}, path)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
