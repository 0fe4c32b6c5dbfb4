"""How often the host waits for the device in a step: `python tools/waits.py` prints the table of docs/performance.md.

It counts on the pretend accelerator of the tests: numbers read one by one or together, what is sent to the device, and
operations that must know entries to know a shape.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shf

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import pretend

ROWS, FEATURES, CLASSES = 60, 8, 3
STEPS = 5
"""Enough for factors to be renewed again; the fewest waits of the later ones are a step's, the most a renewal's."""


@dataclass(frozen=True)
class Found:
    """Waits of the first step, of the later ones at least and at most, and what a later one did."""

    first: int
    least: int
    most: int
    cg_steps: int
    evaluations: int
    lines: Counter[str]


def network(*hidden: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 12), *hidden, nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, CLASSES)]
    return nn.Sequential(*layers).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, FEATURES, generator=source)
    return inputs.to(dtype), torch.randint(CLASSES, (ROWS,), generator=source)


def count(step: Callable[[], shf.StepInfo]) -> Found:
    """The waits of some steps."""
    numbers = []
    for _ in range(STEPS):
        with pretend.waits() as seen:
            info = step()
        numbers.append(len(seen))
    first, *later = numbers
    lines = Counter(f"{wait.operation} {wait.line}" for wait in seen)
    return Found(first, min(later), max(later), info.cg_steps, info.evaluations, lines)


def of_shf(*hidden: nn.Module, **options: Any) -> Found:
    device, (inputs, targets) = pretend.register(), batch()
    optimizer = shf.SHF(network(*hidden).to(device), nn.CrossEntropyLoss(), seed=3, **options)
    inputs, targets = inputs.to(device), targets.to(device)
    return count(lambda: optimizer.step(inputs, targets))


def of_residual() -> Found:
    device, (inputs, targets) = pretend.register(), batch(torch.float64)
    model = network(dtype=torch.float64).to(device)
    optimizer = shf.SHF(model, nn.MSELoss(), seed=3, **shf.presets.residual)
    inputs, targets = inputs.to(device), nn.functional.one_hot(targets, CLASSES).to(device, torch.float64)
    return count(lambda: optimizer.step(inputs, targets))


def of_hf() -> Found:
    device, (inputs, targets) = pretend.register(), batch()
    optimizer = shf.HF(network().to(device), nn.CrossEntropyLoss(), seed=3)
    batches = [(inputs[:40].to(device), targets[:40].to(device)), (inputs[40:].to(device), targets[40:].to(device))]
    return count(lambda: optimizer.step(batches, curvature=batches[0]))


CASES: dict[str, Callable[[], Found]] = {
    "default": of_shf,
    "default, dropout": lambda: of_shf(nn.Dropout(0.3)),
    "default, BatchNorm": lambda: of_shf(nn.BatchNorm1d(12)),
    "curvature batch, weight decay": lambda: of_shf(curvature_batch=20, weight_decay=1e-3),
    "`fast`": lambda: of_shf(**shf.presets.fast),
    "`fast`, dropout": lambda: of_shf(nn.Dropout(0.3), **shf.presets.fast),
    "`residual`": of_residual,
    "`HF`, two batches": of_hf,
}


def table() -> str:
    """For docs/performance.md."""
    rows = [
        "| step | CG iterations | evaluations | waits | in the first step |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, case in CASES.items():
        found = case()
        waits = f"{found.least}" if found.least == found.most else f"{found.least} to {found.most}"
        rows.append(f"| {name} | {found.cg_steps} | {found.evaluations} | {waits} | {found.first} |")
    return "\n".join(rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--lines"]:
        for name, case in CASES.items():
            print(name, *(f"\n{n:6} {line}" for line, n in case().lines.most_common()))
    else:
        print(table())
