"""What one process brings to a step: its rows, and what it believes it has in common with the other processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shf.data.draws import mix
from shf.model.network import Network
from shf.state import OptimizerState


@dataclass(frozen=True)
class Contribution:
    """A process's part in a step.

    Attributes:
        network: the network with the parameters that it trains.
        counts: rows, and what else is laid end to end over the processes.
        seed: of the step's random draws; the first process's becomes everyone's.
        settings: options, counters, weight decay: what the optimizer itself is made of.
        state: what the optimizer remembers of each parameter: δ, averages, Kronecker factors.
        data: what the step is about; the other processes have their own.
        required: what the first counts are of, in words: of each of these some process must have a row.
    """

    network: Network
    counts: Sequence[int]
    seed: int
    settings: Callable[[], Mapping[str, Any]]
    state: OptimizerState
    data: Any = field(repr=False)
    required: Sequence[str] = ("the batch",)

    def facts(self) -> Mapping[str, Any]:
        """What must be the same everywhere: options, shapes, counters. Anything that JSON can say."""
        model, trained = self.network.model, set(self.network.names)
        parameters = {
            name: f"{p.dtype} {list(p.shape)} {'trained' if name in trained else 'frozen'}{self._entries_in_words(p)}"
            for name, p in model.named_parameters()
        }
        return {
            **self.settings(),
            "parameter": parameters,
            "buffer": {name: f"{b.dtype} {list(b.shape)}" for name, b in model.named_buffers()},
            "mode": _mode(model),
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """What must be bitwise the same everywhere, by name: all parameters, frozen ones too, and what is remembered of
        them."""
        named = dict(self.network.model.named_parameters())
        return {f"parameter {name}": p for name, p in named.items()} | {
            f"{_IN_WORDS.get(entry, entry)} of {name}": self.state[p][entry]
            for name, p in named.items()
            for entry in self._entries(p)
        }

    def _entries(self, parameter: Tensor) -> list[str]:
        return sorted(self.state.get(parameter, ()))

    def _entries_in_words(self, parameter: Tensor) -> str:
        """Part of the facts: only where the same entries are there can they be compared."""
        return "".join(f", with {_IN_WORDS.get(entry, entry)}" for entry in self._entries(parameter))


_IN_WORDS = {"delta": "the last CG solution", "average": "the average", "moved": "the last move"}


def _mode(model: nn.Module) -> str:
    flags = [m.training for m in model.modules()]
    if all(flags) or not any(flags):
        return "train" if all(flags) else "eval"
    return f"train and eval mixed (pattern {mix(*flags):x})"
