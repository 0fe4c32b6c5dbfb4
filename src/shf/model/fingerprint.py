"""What a model is made of, so that what follows from it need not be found anew in every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Of a model and of the parameters that groups name: it changes where a module, a parameter or a buffer is another one,
    has another name, shape, kind or place, or is frozen, and where a module has another mode or other plain attributes (the
    probability of a dropout, say).

    Attributes:
        things: modules, parameters and buffers, held so that their identities stay theirs.
        facts: what else there is.
    """

    things: Sequence[object]
    facts: Sequence[object]

    @classmethod
    def of(cls, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> "Fingerprint":
        things: list[object] = []
        facts: list[object] = []
        for module in model.modules():
            parameters = module._parameters
            things.append(module)
            if isinstance(module, torch.jit.ScriptModule):  # is refused, and has no dicts of its own
                continue
            things.extend(parameters.values())
            things.extend(module._buffers.values())
            facts.extend((*parameters, None, *module._buffers, None, *module._modules))
            facts.extend((p.shape, p.dtype, p.device, p.requires_grad) for p in parameters.values() if p is not None)
            facts.append(plain_attributes(module))
        for group in groups:
            things.extend(group["params"])
            facts.append(len(group["params"]))
        return cls(things, facts)

    def equals(self, other: "Fingerprint") -> bool:
        return (
            len(self.things) == len(other.things)
            and all(map(is_, self.things, other.things))
            and self.facts == other.facts
        )


def plain_attributes(module: nn.Module) -> tuple[object, ...]:
    """A module's own plain attributes, its mode and the probability of its dropout among them: at 0 it draws nothing."""
    return tuple(
        value
        for name, value in vars(module).items()
        if name not in _OF_TORCH and isinstance(value, float | int | str | None)
    )
