"""What one process brings to a step: its rows, and what it believes it has in common with the other processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shf.network import Network
from shf.randomness import mix


@dataclass(frozen=True)
class Participation:
    """A process's part in a step; see `shf.ranks.Participant`.

    Attributes:
        network: the network with the parameters that it trains.
        counts: rows, and what else is laid end to end over the processes.
        seed: of the random draws.
        settings: options, counters, weight decay: what the optimizer itself is made of.
        deltas: δ of the last step for each parameter where this process has the whole of it, or None.
        data: what the step is about; the other processes have their own.
    """

    network: Network
    counts: Sequence[int]
    seed: int
    settings: Mapping[str, Any]
    deltas: Sequence[Tensor | None]
    data: Any = field(repr=False)

    def facts(self) -> Mapping[str, Any]:
        model, trained = self.network.model, set(self.network.names)
        parameters = {
            name: f"{p.dtype} {list(p.shape)} {'trained' if name in trained else 'frozen'}"
            for name, p in model.named_parameters()
        }
        return {
            **self.settings,
            "parameter": parameters,
            "buffer": {name: f"{b.dtype} {list(b.shape)}" for name, b in model.named_buffers()},
            "mode": _mode(model),
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """All parameters, frozen ones too, and δ."""
        deltas = zip(self.network.names, self.deltas, strict=True)
        return {
            **{f"parameter {name}": p for name, p in self.network.model.named_parameters()},
            **{f"the last CG solution of {name}": d for name, d in deltas if d is not None},
        }


def _mode(model: nn.Module) -> str:
    flags = [m.training for m in model.modules()]
    if all(flags) or not any(flags):
        return "train" if all(flags) else "eval"
    return f"train and eval mixed (pattern {mix(*flags):x})"
