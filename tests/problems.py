"""Small problems drawn at random: models × losses × pathologies of the data × options, each from one number."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import torch
from torch import Tensor, nn

import shf
from helpers import CLASSES, FEATURES

ROWS = (1, 2, 5, 9)
SCALES = (0.0, 1e-42, 1e-30, 1e-6, 1.0, 1e4, 1e12, 1e18, 1e25, 1e37)
BAD = (math.nan, math.inf, -math.inf)


def _classes(targets: Tensor, dtype: torch.dtype) -> Tensor:
    return targets.abs().nan_to_num(0.0, 0.0, 0.0).fmod(CLASSES).long()[:, 0]


def _values(targets: Tensor, dtype: torch.dtype) -> Tensor:
    return targets.to(dtype)


def _shares(targets: Tensor, dtype: torch.dtype) -> Tensor:
    return targets.sigmoid().to(dtype)


def _counts(targets: Tensor, dtype: torch.dtype) -> Tensor:
    return targets.abs().to(dtype)


LOSSES = (
    (nn.CrossEntropyLoss(), _classes),
    (nn.CrossEntropyLoss(reduction="sum"), _classes),
    (nn.MSELoss(), _values),
    (nn.MSELoss(reduction="sum"), _values),
    (nn.BCEWithLogitsLoss(), _shares),
    (nn.PoissonNLLLoss(), _counts),
    (nn.SmoothL1Loss(), _values),
    (nn.L1Loss(), _values),
    (shf.losses.per_case(nn.MSELoss()), _values),
)


class Steady(nn.Module):
    """Passes on what it is given, and names it as worth holding steady: structural damping acts on it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return shf.hold_steady(inputs)


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, CLASSES), Steady())


def _body(activation: type[nn.Module], *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), *more, activation(), Steady(), nn.Linear(5, CLASSES))


def _dead() -> nn.Module:
    """Rectifiers that no input reaches."""
    model = _body(nn.ReLU)
    nn.init.constant_(model[0].bias, -1e9)  # type: ignore[index, arg-type]
    return model


def _zero() -> nn.Module:
    model = _body(nn.Tanh)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def _huge() -> nn.Module:
    model = _body(nn.ReLU)
    for p in model.parameters():
        nn.init.constant_(p, 1e12)
    return model


class Recurrent(nn.Module):
    """Reads a row from left to right."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(1, 4), nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.new_zeros(len(inputs), 4)
        for entry in inputs.split(1, dim=1):
            hidden = shf.hold_steady(self.cell(entry, hidden))
        return self.out(hidden)


class Convolved(nn.Module):
    """Takes a row as a short signal."""

    def __init__(self) -> None:
        super().__init__()
        self.signal, self.out = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(2 * FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(shf.hold_steady(self.signal(inputs[:, None, :]).tanh()).flatten(1))


MODELS = (
    _linear,
    lambda: _body(nn.Tanh),
    lambda: _body(nn.ReLU),
    lambda: _body(nn.Sigmoid),
    lambda: _body(nn.Tanh, nn.BatchNorm1d(5)),
    lambda: _body(nn.GELU, nn.LayerNorm(5)),
    lambda: _body(nn.ReLU, nn.Dropout(0.5)),
    _dead,
    _zero,
    _huge,
    Recurrent,
    Convolved,
)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem: an optimizer with its model, and the batches of a few steps."""

    optimizer: shf.SHF
    batches: list[tuple[Tensor, Tensor]]
    words: str


def _spoil(data: Tensor, draw: random.Random) -> Tensor:
    """Constant, duplicated, with a column of zeros, with entries that are not finite; or as it is."""
    kind = draw.choice(("as it is", "as it is", "constant", "equal rows", "zero column", "bad entry", "mixed scales"))
    data = data.clone()
    if kind == "constant":
        data[:] = data[0, 0]
    elif kind == "equal rows":
        data[:] = data[0]
    elif kind == "zero column":
        data[:, 0] = 0
    elif kind == "bad entry":
        data[draw.randrange(len(data)), draw.randrange(data.shape[1])] = draw.choice(BAD)
    elif kind == "mixed scales":
        data *= torch.tensor([10.0 ** draw.randint(-20, 20) for _ in range(data.shape[1])], dtype=data.dtype)
    return data


def _options(draw: random.Random) -> dict[str, Any]:
    options = {
        "damping": draw.choice((1e-15, 1e-6, 0.1, 1.0, 100.0, 1e15, "auto")),
        "damping_factor": draw.choice((0.99, 2 / 3, 0.1)),
        "damping_rise": draw.choice((1.0, 1.0, 4.0)),
        "damping_rule": draw.choice(("batch", "batch", "held-out")),
        "structural_damping": draw.choice((0.0, 0.0, 0.1, 1e6)),
        "cg_iterations": draw.choice((1, 3, 12)),
        "cg_worth": draw.choice((False, False, True)),
        "curvature_batch": draw.choice((None, None, 1, 3)),
        "curvature_rows": draw.choice(("block", "strided")),
        "delta_momentum": draw.choice(("start", "exact")),
        "cg_decay": draw.choice((0.0, 0.5, 1.0)),
        "update_decay": draw.choice((1.0, 0.5)),
        "preconditioner": draw.choice(("empirical-fisher", "jacobi", "kronecker", None)),
        "preconditioner_squares": draw.choice(("auto", "exact", "sampled")),
        "preconditioner_exponent": draw.choice((0.0, 0.75, 1.0)),
        "factor_every": draw.choice((None, 1)),
        "backtracking": draw.choice(("all", "first-worse", None)),
        "line_search_steps": draw.choice((0, 5, 60)),
        "max_norm": draw.choice((None, None, 1e-3, 1.0, "fan-in")),
        "averaging": draw.choice((0.0, 0.0, 0.9, "auto")),
        "noise_every": draw.choice((None, None, 1)),
        "decay_direction": draw.choice((False, True)),
        "microbatch": draw.choice((None, None, 1, 2)),
        "weight_decay": draw.choice((0.0, 0.0, 1e-4, 10.0)),
        "max_rejections": None,
        "nonfinite": draw.choice(("raise", "skip")),
    }
    heard = None if options["noise_every"] is None else 0.5
    return {**options, "cg_noise": heard, "cg_survival": heard}


def draw_problem(seed: int) -> Drawn:
    """The problem of this number, the same on every machine."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice((torch.float32, torch.float32, torch.float64))
    model = draw.choice(MODELS)().to(dtype)
    loss, form = draw.choice(LOSSES)
    rows, options = draw.choice(ROWS), _options(draw)
    inputs_scale, targets_scale = draw.choice(SCALES), draw.choice(SCALES)
    same_labels = draw.random() < 0.2
    batches = []
    for _ in range(draw.choice((2, 2, 2, 5))):
        inputs = _spoil(inputs_scale * torch.randn(rows, FEATURES, dtype=torch.float64), draw).to(dtype)
        targets = targets_scale * torch.randn(rows, CLASSES, dtype=torch.float64)
        targets = _spoil(targets, draw) if draw.random() < 0.3 else targets
        batches.append((inputs, form(targets[:1].expand(rows, -1) if same_labels else targets, dtype)))
    words = f"{seed}: {model}, {loss}, {rows} rows, scales {inputs_scale:g} and {targets_scale:g}, {dtype}, {options}"
    return Drawn(shf.SHF(model, loss, seed=seed, **options), batches, words)
