"""Differential equations for networks to solve: points, residuals and solutions, as data (benchmarks/physics.py).

The first eight are those of the K-FAC-for-PINNs study (Dangel, Müller, Zeinhofer, 2024): ½ mean(interior residual²) +
½ mean(boundary residual²), tanh networks in double precision with torch's initialisation. The last four equations have
20-20-20 units and 3000 + 300 points, Burgers' also with new points in every step. Derivatives by the inputs are carried
forwards through the layers, for every method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.integrate import solve_ivp
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
    "three": lambda d: mlp(d, 20, 20, 20, 1),
    "four": lambda d: mlp(d, 64, 64, 48, 48, 1),
    "wide": lambda d: mlp(d, 256, 256, 128, 128, 1),
}


@dataclass(frozen=True)
class Problem:
    """An equation in a box.

    Attributes:
        size: of the network.
        box: the range of every coordinate.
        residual: of interior points, from (x, u, ∂u, Σ c ∂²u).
        second: c.
        solution: u, which is also what the boundary is given.
        sizes: points in the interior and on the boundary.
        fresh: whether points are new in every step.
        initial: whether the last coordinate is time: half of the boundary's points are then at its beginning.
        periodic: whether the other half says only that u is the same at both ends of the first coordinate.
    """

    size: str
    box: Sequence[tuple[float, float]]
    residual: Callable[..., Tensor]
    second: Sequence[float]
    solution: Callable[[Tensor], Tensor]
    sizes: tuple[int, int] = (900, 120)
    fresh: bool = False
    initial: bool = False
    periodic: bool = False

    def model(self) -> nn.Module:
        return SIZES[self.size](len(self.box))

    def inside(self, rows: int, source: torch.Generator) -> Tensor:
        low, high = torch.tensor(self.box, dtype=torch.float64).unbind(1)
        return low + (high - low) * torch.rand(rows, len(self.box), dtype=torch.float64, generator=source)

    def points(self, source: torch.Generator) -> Mapping[str, Rows]:
        inside, edge = self.inside(self.sizes[0], source), self.inside(self.sizes[1], source)
        ends = torch.tensor(self.box, dtype=torch.float64)
        axis = torch.randint(len(self.box) - self.initial, (len(edge),), generator=source)
        edge[torch.arange(len(edge)), axis] = ends[axis, torch.randint(2, (len(edge),), generator=source)]
        if self.initial:
            half = len(edge) // 2
            edge[:half] = self.inside(half, source)
            edge[:half, -1] = self.box[-1][0]
        values = self.solution(edge)
        if self.periodic:
            values[half:] = 0
        return {"interior": (inside, torch.zeros(len(inside), 1, dtype=torch.float64)), "boundary": (edge, values)}

    def unseen(self) -> Rows:
        x = self.inside(10 * self.sizes[0], torch.Generator().manual_seed(2**31))
        return x, self.solution(x)

    def terms(self) -> Mapping[str, shf.Term]:
        def inside(model: nn.Module, x: Tensor) -> Tensor:
            return self.residual(x, *derivatives(model, x, self.second))

        def edge(model: nn.Module, x: Tensor) -> Tensor:
            if not self.periodic:
                return model(x)  # type: ignore[no-any-return]
            other = x.clone()
            other[:, 0] = sum(self.box[0]) - x[:, 0]
            return model(x) - (x[:, 1:] > self.box[-1][0]) * model(other)  # type: ignore[no-any-return]

        return {
            name: shf.Term(nn.MSELoss(), 0.5, forward) for name, forward in (("interior", inside), ("boundary", edge))
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
    return Problem(size, UNIT * 2, partial(poisson, lambda x: 2 * math.pi**2 * sine(x)), (1, 1), sine)


def of_cosines(size: str, dimension: int, **how: Any) -> Problem:
    source = partial(poisson, lambda x: math.pi**2 * cosines(x))
    return Problem(size, UNIT * dimension, source, (1,) * dimension, cosines, **how)


def heat1d(size: str) -> Problem:
    def solution(x: Tensor) -> Tensor:
        return (-(math.pi**2) / 4 * x[:, 1:]).exp() * (math.pi * x[:, :1]).sin()

    return Problem(size, UNIT * 2, heat, (0.25, 0), solution, initial=True)


def heat4d(size: str) -> Problem:
    def solution(x: Tensor) -> Tensor:
        return (-x[:, 4:]).exp() * (2 * x[:, :4]).sin().sum(1, keepdim=True)

    return Problem(size, UNIT * 5, heat, (0.25,) * 4 + (0,), solution, (3000, 500), fresh=True, initial=True)


def burgers() -> Problem:
    """u_t + u u_x = ν u_xx, u = -sin(πx) at first, ν = 0.01/π; by Cole and Hopf's formula, with Gauss-Hermite quadrature."""
    nu = 0.01 / math.pi
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite.hermgauss(160))

    def solution(x: Tensor) -> Tensor:
        y = x[:, :1] - (4 * nu * x[:, 1:]).sqrt() * nodes
        share = torch.softmax(-(math.pi * y).cos() / (2 * math.pi * nu) + weights.log(), 1)
        return -(share * (math.pi * y).sin()).sum(1, keepdim=True)

    def residual(x: Tensor, u: Tensor, d: Tensor, s: Tensor) -> Tensor:
        return d[:, 1:] + u * d[:, :1] - s

    return Problem("three", SPACE_TIME, residual, (nu, 0), solution, (3000, 300), initial=True)


def allen_cahn() -> Problem:
    """u_t = 0.001 u_xx + 5u - 5u³, u = x² cos(πx) at first, -1 at both ends; by Chebyshev collocation."""

    @cache
    def collocation() -> tuple[Any, Any]:
        n = 256
        x = np.cos(np.pi * np.arange(n + 1) / n)
        c = np.r_[2, np.ones(n - 1), 2] * (-1.0) ** np.arange(n + 1)
        D = np.outer(c, 1 / c) / (x[:, None] - x + np.eye(n + 1))
        D -= np.diag(D.sum(1))
        D2 = 0.001 * (D @ D)
        D2[0] = D2[-1] = 0

        def slope(t: float, u: Any) -> Any:
            f = D2 @ u + 5 * u - 5 * u**3
            f[0] = f[-1] = 0
            return f

        def jacobian(t: float, u: Any) -> Any:
            J = D2 + np.diag(5 - 15 * u**2)
            J[0] = J[-1] = 0
            return J

        u0 = x**2 * np.cos(np.pi * x)
        found = solve_ivp(slope, (0, 1), u0, "Radau", dense_output=True, rtol=1e-9, atol=1e-11, jac=jacobian)
        return x, found.sol

    def solution(x: Tensor) -> Tensor:
        nodes, at = collocation()
        signs = np.r_[0.5, np.ones(len(nodes) - 2), 0.5] * (-1.0) ** np.arange(len(nodes))
        w = signs / (x[:, :1].numpy() - nodes + 1e-300)
        values = at(x[:, 1].numpy()).T
        return torch.from_numpy((w * values).sum(1, keepdims=True) / w.sum(1, keepdims=True))

    def residual(x: Tensor, u: Tensor, d: Tensor, s: Tensor) -> Tensor:
        return d[:, 1:] - s - 5 * u + 5 * u**3

    return Problem("three", SPACE_TIME, residual, (0.001, 0), solution, (3000, 300), initial=True)


def helmholtz() -> Problem:
    def solution(x: Tensor) -> Tensor:
        return (math.pi * x[:, :1]).sin() * (4 * math.pi * x[:, 1:]).sin()

    def residual(x: Tensor, u: Tensor, d: Tensor, s: Tensor) -> Tensor:
        return s + u - (1 - 17 * math.pi**2) * solution(x)

    return Problem("three", ((-1, 1), (-1, 1)), residual, (1, 1), solution, (3000, 300))


def convection() -> Problem:
    """u_t + 30 u_x = 0 on a circle."""

    def solution(x: Tensor) -> Tensor:
        return (x[:, :1] - 30 * x[:, 1:]).sin()

    def residual(x: Tensor, u: Tensor, d: Tensor, s: Tensor) -> Tensor:
        return d[:, 1:] + 30 * d[:, :1]

    box = ((0, 2 * math.pi), (0, 1))
    return Problem("three", box, residual, (0, 0), solution, (3000, 300), initial=True, periodic=True)


UNIT: tuple[tuple[float, float], ...] = ((0, 1),)
SPACE_TIME: tuple[tuple[float, float], ...] = ((-1, 1), (0, 1))
MANY: Mapping[str, Any] = {"sizes": (3000, 500), "fresh": True}

DEVELOPMENT: Mapping[str, Problem] = {"poisson2d-257": sines("one"), "heat1d-257": heat1d("one")}
"""What the preset's settings were chosen on."""
PROBLEMS: Mapping[str, Problem] = {
    **DEVELOPMENT,
    "poisson2d-9873": sines("four"),
    "heat1d-9873": heat1d("four"),
    "poisson5d-449": of_cosines("one", 5, **MANY),
    "heat4d-small": heat4d("one"),
    "poisson5d-10065": of_cosines("four", 5, **MANY),
    "poisson2d-116865": sines("wide"),
    "poisson2d-cos-116865": of_cosines("wide", 2),
    "burgers": burgers(),
    "burgers-new-points": replace(burgers(), fresh=True),
    "allen-cahn": allen_cahn(),
    "helmholtz": helmholtz(),
    "convection": convection(),
}
