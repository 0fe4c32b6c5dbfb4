"""What becomes of a step: β before it (§4.3), and each unit's squared incoming norm held to a bound after it (§5)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shf.component import Component, number, option
from shf.linear.flat import Shapes
from shf.model.network import Network

_Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True, kw_only=True)
class Update(Component):
    """θ ← θ + βαδ with β_e = cβ_{e-1}; then clipping."""

    decay: float = option(
        1.0,
        number(above=0.0, most=1.0),
        "β, the factor before every update, is multiplied by this at every following epoch [c].",
        name="update_decay",
    )
    max_norm: float | str | None = option(
        None,
        number(above=0.0, words=("fan-in", None)),
        """bound on each unit's squared incoming norm after an update: a number, "fan-in" for round(√inputs) as in the
        author's program, or None.""",
    )

    def first(self) -> dict[str, Any]:
        return {"update_scale": 1.0}

    def next_epoch(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {"update_scale": numbers["update_scale"] * self.decay}

    def clip_(self, theta: Tensor, network: Network) -> None:
        """The bound, in place."""
        if self.max_norm is not None:
            clip_norms_(theta, network.shapes, self.max_norm, input_major_groups(network.model, network.parameters))


def input_major_groups(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[int]:
    """For each parameter, in how many groups it is stored inputs first, (inputs, units, …); 0 if units come first.

    Inputs come first in transposed convolutions, whose groups of inputs share the second axis, and in the `weight` of a
    module that says so by a true attribute `input_major`.
    """
    groups = {
        id(m.weight): m.groups if isinstance(m, _Transposed) else 1
        for m in model.modules()
        if isinstance(m, _Transposed) or getattr(m, "input_major", False)
    }
    return [groups.get(id(p), 0) for p in parameters]


@torch.no_grad()
def clip_norms_(theta: Tensor, shapes: Shapes, bound: float | str, input_major: Sequence[int] = ()) -> Tensor:
    """Scales, in place, the incoming weights w of every unit so that ‖w‖² ≤ bound.

    Weights are the parameters with two or more dimensions, units their first axis unless `input_major` says otherwise.

    Args:
        theta: θ, flat.
        bound: the bound, or "fan-in" for round(√inputs), as in the author's program.
        input_major: as `input_major_groups` finds it; by default no parameter is stored inputs first.
    """
    weights = shapes.split(theta)
    for weight, groups in zip(weights, input_major or [0] * len(weights), strict=True):
        if weight.ndim < 2:
            continue
        incoming, axes = _incoming(weight, groups)
        inputs = math.prod(incoming.shape[axis] for axis in axes)
        limit = float(round(inputs**0.5)) if bound == "fan-in" else float(bound)
        squared = incoming.square().sum(axes, keepdim=True)
        incoming.mul_(torch.where(squared > limit, (limit / squared).sqrt(), torch.ones_like(squared)))
    return theta


def _incoming(weight: Tensor, groups: int) -> tuple[Tensor, tuple[int, ...]]:
    """A view of the weights, and its axes that run over the incoming weights of one unit."""
    if groups:
        return weight.view(groups, -1, weight.shape[1], math.prod(weight.shape[2:])), (1, 3)
    return weight.view(len(weight), -1), (1,)
