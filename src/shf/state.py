"""What the optimizer remembers of each parameter between steps, in its state, as torch saves and loads it."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from shf.model.network import Network

OptimizerState = MutableMapping[Tensor, dict[str, Any]]


def recall(state: OptimizerState, parameter: Tensor, name: str) -> Tensor | None:
    """The entry, of the parameter's present dtype and on its present device (after `model.double()`, say)."""
    found = state.get(parameter, {}).get(name)
    return None if found is None else found.to(parameter.device, parameter.dtype)


def remember(state: OptimizerState, parameter: Tensor, **entries: Tensor | None) -> None:
    """Replaces these entries and keeps the others; None removes one. The old dict is left as it was: it may be wanted
    back."""
    kept = {name: value for name, value in state.get(parameter, {}).items() if name not in entries}
    state[parameter] = {**kept, **{name: value for name, value in entries.items() if value is not None}}


def forget_others(network: Network, state: OptimizerState, name: str) -> None:
    """Removes an entry of parameters that are not trained now (frozen ones): it would be stale when they are again."""
    trained = {id(p) for p in network.parameters}
    for p in [p for p, entries in state.items() if name in entries and id(p) not in trained]:
        remember(state, p, **{name: None})


def refuse_other_shapes(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a saved state whose vectors do not have the parameters' shapes: it is of another model."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    for number, p in zip(numbers, parameters, strict=False):  # torch itself compares how many there are
        for name in ("delta", "average", "moved"):
            found = state_dict["state"].get(number, {}).get(name)
            if found is not None and found.shape != p.shape:
                raise ValueError(
                    f"the state is of another model: {name} of parameter {number} has shape {tuple(found.shape)}, expected "
                    f"{tuple(p.shape)}"
                )
