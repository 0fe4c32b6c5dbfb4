"""δ^ζ of the previous step, from which CG starts: where it is kept between steps."""

from dataclasses import dataclass

from torch import Tensor

from shf.distributed.collective import Collective
from shf.model.network import Network
from shf.state import OptimizerState, recall, remember


@dataclass
class LastSolution:
    """δ lies whole in the optimizer's state, parameter by parameter, as torch saves and loads it. Where processes split
    vectors among themselves, this process's part of it lies here instead, until someone asks for the whole.

    Attributes:
        part: this process's part of δ; None where the state has the whole, or there is none yet.
        network: whose flat vector it is a part of.
    """

    part: Tensor | None = None
    network: Network | None = None

    def there(self, state: OptimizerState) -> bool:
        return self.part is not None or any("delta" in entry for entry in state.values())

    def read(self, network: Network, state: OptimizerState, ranks: Collective) -> Tensor | None:
        """A copy of δ as this process holds vectors; None before the first step. Parameters that are new have zeros."""
        same = self.network is not None and self.network.names == network.names
        if self.part is not None and same:
            _refuse_alone(ranks)
            return self.part.to(network.parameters[0], copy=True)
        self.gather(state, ranks)
        deltas = [recall(state, p, "delta") for p in network.parameters]
        if all(d is None for d in deltas):
            return None
        return ranks.own(network.shapes.flatten(deltas, network.parameters[0]))

    def write(self, delta: Tensor | None, network: Network, state: OptimizerState, ranks: Collective) -> None:
        self.part, self.network = (delta, network) if ranks.split else (None, None)
        whole = None if ranks.split else delta
        pieces = [None] * len(network.parameters) if whole is None else network.shapes.split(whole)
        for p, d in zip(network.parameters, pieces, strict=True):
            remember(state, p, delta=d)

    def gather(self, state: OptimizerState, ranks: Collective) -> None:
        """Puts the whole into the optimizer's state; every process must take part."""
        if self.part is None or self.network is None:
            return
        shapes = self.network.shapes
        _refuse_alone(ranks)
        whole = ranks.whole(self.part, shapes.total)
        for p, d in zip(self.network.parameters, shapes.split(whole), strict=True):
            remember(state, p, delta=d)
        self.forget()

    def forget(self) -> None:
        self.part = self.network = None


def _refuse_alone(ranks: Collective) -> None:
    """The other parts of δ are with processes that have left."""
    if not ranks.split:
        raise RuntimeError(
            "split_vectors=True: the last CG solution is split over the processes of a group that has ended; call "
            "state_dict() on all of them before it ends, and load that where training goes on"
        )
