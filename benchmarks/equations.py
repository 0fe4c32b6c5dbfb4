"""Differential equations for networks to solve: points, residuals and solutions, as data (benchmarks/physics.py).

The first eight are those of the K-FAC-for-PINNs study (Dangel, Müller, Zeinhofer, 2024): ½ mean(interior residual²) +
½ mean(boundary residual²), tanh networks in double precision with torch's initialisation. Derivatives by the inputs are
carried forwards through the layers, for every method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shf

Rows = tuple[Tensor, Tensor]


def derivatives(model: nn.Module, x: Tensor, second: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """u, (∂u/∂x_i)_i and Σ_i c_i ∂²u/∂x_i² of a network of linear and tanh layers, (rows, 1), (rows, d), (rows, 1)."""
    h, c = x, torch.tensor(second, dtype=x.dtype)[:, None]
    d = torch.eye(x.shape[1], dtype=x.dtype).expand(len(x), -1, -1)
    s: Tensor | None = None
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            h, d = layer(h), F.linear(d, layer.weight)
            s = None if s is None else F.linear(s, layer.weight)
        else:
            h = h.tanh()
            slope = 1 - h * h
            bend = -2 * h * slope * (c * d * d).sum(1)
            s = bend if s is None else slope * s + bend
            d = slope[:, None] * d
    assert s is not None
    return h, d.squeeze(2), s


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


SIZES: Mapping[str, Callable[[int], nn.Module]] = {
    "one": lambda d: mlp(d, 64, 1),
    "four": lambda d: mlp(d, 64, 64, 48, 48, 1),
    "wide": lambda d: mlp(d, 256, 256, 128, 128, 1),
}


@dataclass(frozen=True)
class Problem:
    """An equation on [0,1]^d, its last coordinate time if `heat`.

    Attributes:
        size: of the network.
        dimension: of space and time.
        residual: what an interior point's residual is, from (x, u, ∂u, Σ c ∂²u).
        second: c.
        solution: u, also on the boundary.
        sizes: points in the interior and on the boundary.
        fresh: whether points are new in every step.
        initial: whether the last coordinate is time: half of the boundary's points are then at its beginning.
    """

    size: str
    dimension: int
    residual: Callable[..., Tensor]
    second: Sequence[float]
    solution: Callable[[Tensor], Tensor]
    sizes: tuple[int, int] = (900, 120)
    fresh: bool = False
    initial: bool = False
    low: float = 0.0
    high: float = 1.0

    def model(self) -> nn.Module:
        return SIZES[self.size](self.dimension)

    def interior(self, rows: int, source: torch.Generator) -> Tensor:
        return torch.rand(rows, self.dimension, dtype=torch.float64, generator=source)

    def points(self, source: torch.Generator) -> Mapping[str, Rows]:
        inside, edge = self.interior(self.sizes[0], source), self.interior(self.sizes[1], source)
        space = self.dimension - self.initial
        axis = torch.randint(space, (len(edge),), generator=source)
        edge[torch.arange(len(edge)), axis] = torch.randint(2, (len(edge),), generator=source).double()
        if self.initial:
            half = len(edge) // 2
            edge[:half] = self.interior(half, source)
            edge[:half, -1] = 0
        return {
            "interior": (inside, torch.zeros(len(inside), 1, dtype=torch.float64)),
            "boundary": (edge, self.solution(edge)),
        }

    def unseen(self) -> Rows:
        x = self.interior(10 * self.sizes[0], torch.Generator().manual_seed(2**31))
        return x, self.solution(x)

    def terms(self) -> Mapping[str, shf.Term]:
        def inside(model: nn.Module, x: Tensor) -> Tensor:
            return self.residual(x, *derivatives(model, x, self.second))

        return {
            "interior": shf.Term(nn.MSELoss(), weight=0.5, forward=inside),
            "boundary": shf.Term(nn.MSELoss(), weight=0.5, forward=lambda model, x: model(x)),
        }


def sine(x: Tensor) -> Tensor:
    return (math.pi * x).sin().prod(1, keepdim=True)


def cosines(x: Tensor) -> Tensor:
    return (math.pi * x).cos().sum(1, keepdim=True)


def poisson(source: Callable[[Tensor], Tensor], x: Tensor, u: Tensor, d: Tensor, s: Tensor) -> Tensor:
    return s + source(x)


def heat(x: Tensor, u: Tensor, d: Tensor, s: Tensor) -> Tensor:
    return d[:, -1:] - s


def sines(size: str) -> Problem:
    return Problem(size, 2, partial(poisson, lambda x: 2 * math.pi**2 * sine(x)), (1, 1), sine)


def of_cosines(size: str, dimension: int, **how: Any) -> Problem:
    return Problem(
        size, dimension, partial(poisson, lambda x: math.pi**2 * cosines(x)), (1,) * dimension, cosines, **how
    )


def heat1d(size: str) -> Problem:
    def solution(x: Tensor) -> Tensor:
        return (-(math.pi**2) / 4 * x[:, 1:]).exp() * (math.pi * x[:, :1]).sin()

    return Problem(size, 2, heat, (0.25, 0), solution, initial=True)


def heat4d(size: str) -> Problem:
    def solution(x: Tensor) -> Tensor:
        return (-x[:, 4:]).exp() * (2 * x[:, :4]).sin().sum(1, keepdim=True)

    return Problem(size, 5, heat, (0.25,) * 4 + (0,), solution, (3000, 500), fresh=True, initial=True)


MANY: Mapping[str, Any] = {"sizes": (3000, 500), "fresh": True}

PROBLEMS: Mapping[str, Problem] = {
    "poisson2d-257": sines("one"),
    "heat1d-257": heat1d("one"),
    "poisson2d-9873": sines("four"),
    "heat1d-9873": heat1d("four"),
    "poisson5d-449": of_cosines("one", 5, **MANY),
    "heat4d-small": heat4d("one"),
    "poisson5d-10065": of_cosines("four", 5, **MANY),
    "poisson2d-116865": sines("wide"),
    "poisson2d-cos-116865": of_cosines("wide", 2),
}
