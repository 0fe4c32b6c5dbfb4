"""Points around the present parameters, for trials and for the update itself."""

import torch
from torch import Tensor

from shf.distributed.collective import Collective
from shf.model.network import Network


class Points:
    """(δ, rate) ↦ θ + rate·δ, θ being a network's present parameters, which are not copied for it.

    Args:
        network: whose parameters.
        ranks: the processes, where each holds a part of δ.
    """

    def __init__(self, network: Network, ranks: Collective) -> None:
        self._network = network
        self._ranks = ranks
        self._part: Tensor | None = None
        self._own: Tensor | None = None

    def __call__(self, delta: Tensor, rate: float, out: Tensor | None = None) -> Tensor:
        """The point, in `out`, or else in a vector that the next one overwrites."""
        if out is None:
            out = self._own = torch.empty_like(delta) if self._own is None else self._own
        if self._ranks.split:
            self._part = self._ranks.own(self._network.theta()) if self._part is None else self._part
            return torch.add(self._part, delta, alpha=rate, out=out)
        split = self._network.shapes.split
        for p, d, piece in zip(self._network.parameters, split(delta), split(out), strict=True):
            torch.add(p.detach(), d, alpha=rate, out=piece)
        return out
