"""A picture as a function of the place, by a network of sines: `shf.presets.residual` against tuned first-order methods.

    python benchmarks/field.py --seconds 60 --seed 0 1 2    runs that are not yet in results/field
    python benchmarks/field.py page                         their table, in docs/physics.md

64 × 64 grey pixels of scikit-learn's picture of a flower, all in each step; unseen are the pixels half way between them.
The network is 2-32-32-1 with the initialisation of Sitzmann et al. (2020), ω = 30, 1,185 parameters. Seconds are those of
the processor, of one thread and of updates alone.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import shf
from shf.lab.contest import Method, Row, Step, Task, contest, parser, read_contest
from shf.lab.pages import fill, table

ROOT = Path(__file__).resolve().parent.parent
RECORDS, PAGE = ROOT / "results" / "field", ROOT / "docs" / "physics.md"
SIDE, OMEGA = 64, 30.0
MSE = nn.MSELoss()


class Sines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)])
        with torch.no_grad():
            for k, layer in enumerate(self.layers):
                reach = (6 / layer.in_features) ** 0.5 / OMEGA if k else 1 / layer.in_features  # type: ignore[operator]
                layer.weight.uniform_(-reach, reach)  # type: ignore[operator, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.sin(OMEGA * layer(x))
        return last(x)  # type: ignore[no-any-return]


def pixels() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Places in [-1, 1]² and grey levels in [0, 1]: of every second pixel both ways, and of those between them."""
    grey = torch.from_numpy(load_sample_image("flower.jpg").mean(2) / 255)[100 : 100 + 2 * SIDE, 250 : 250 + 2 * SIDE]
    line = torch.linspace(-1, 1, 2 * SIDE, dtype=torch.float64)
    places = torch.stack(torch.meshgrid(line, line, indexing="ij"), 2)

    def every_second(first: int) -> tuple[Tensor, Tensor]:
        return places[first::2, first::2].reshape(-1, 2), grey[first::2, first::2].reshape(-1, 1)

    return every_second(0), every_second(1)


def task() -> Task:
    seen, unseen = pixels()

    def batches(_: int, __: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield seen

    def evaluate(model: nn.Module) -> Row:
        rows = {"training": seen, "unseen": unseen}
        return {f"{name}_error": MSE(model(x), t).item() for name, (x, t) in rows.items()}

    return Task("flower", lambda: Sines().double(), batches, evaluate, "training_error")


def residual(model: nn.Module, _: float) -> Step:
    return shf.SHF(model, MSE, **shf.presets.residual).step


def muon(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices of hidden layers, AdamW for the rest, with updates of equal size."""
    matrices = [p for p in model.parameters() if p.ndim == 2][:-1]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate),
    ]


def by_gradient(name: str, model: nn.Module, rate: float) -> Step:
    optimizers = muon(model, rate) if name == "muon" else [torch.optim.Adam(model.parameters(), lr=rate)]

    def step(x: Tensor, t: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        MSE(model(x), t).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()

    return step


def lbfgs(model: nn.Module, _: float) -> Step:
    optimizer = torch.optim.LBFGS(
        model.parameters(), history_size=100, line_search_fn="strong_wolfe", tolerance_change=0.0
    )

    def step(x: Tensor, t: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = MSE(model(x), t)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)

    return step


RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def methods() -> list[Method]:
    return [
        Method("residual", 0, residual, settings=dict(shf.presets.residual)),
        Method("adam", 0, partial(by_gradient, "adam"), RATES),
        Method("muon", 0, partial(by_gradient, "muon"), RATES),
        Method("lbfgs", 0, lbfgs, (1.0,)),
    ]


def decibels(error: float) -> str:
    return f"{-10 * torch.tensor(error).log10().item():.1f}"


def summary() -> str:
    heads = ("", "rate", "seeds", "seconds", "steps", "training, dB", "unseen, dB", "`residual` there after")
    found, rows = read_contest(RECORDS / "flower"), []
    for method, records in found.items():
        ends = {name: statistics.median(r.column(name)[-1].item() for r in records.values()) for name in COLUMNS}
        best = (r.column("training_error").min().item() for r in records.values())
        ours = zip(found["residual"].values(), best, strict=False)
        there = statistics.median(r.reached("training_error", level, "processor_seconds") for r, level in ours)
        rate = next(iter(records.values())).config["settings"].get("rate")
        said = "" if rate is None or method == "lbfgs" else f"{rate:g}"
        errors = (decibels(ends[name]) for name in COLUMNS[2:])
        count = (str(len(records)), f"{ends['processor_seconds']:.0f}", f"{ends['updates']:.0f}")
        ahead = "" if method == "residual" else f"{there:.3g}" if there < math.inf else "not reached"
        rows.append((method, said, *count, *errors, ahead))
    return table(heads, rows)


COLUMNS = ("processor_seconds", "updates", "training_error", "unseen_error")


def main() -> None:
    if sys.argv[1:] == ["page"]:
        return fill(PAGE, {"field": summary()})
    options = parser(__doc__, seconds=60)
    options.set_defaults(out=RECORDS, points=60)
    return contest([task()], methods(), options.parse_args())


if __name__ == "__main__":
    main()
