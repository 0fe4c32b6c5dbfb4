"""What the parts of an optimizer remember between steps: tensors of each parameter and numbers, as torch saves and loads
them."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shf.data.draws import mix
from shf.model.network import Network

OptimizerState = MutableMapping[Tensor, dict[str, Any]]


class Memory:
    """What is remembered, in one step: read as it was before the step; what is to be kept is written when the step is done.

    Args:
        network: with the parameters that are trained now.
        state: the optimizer's, parameter by parameter.
        numbers: the optimizer's.
        cache: what follows from the rest, and is made again where it is missing; it is not saved.
    """

    def __init__(
        self,
        network: Network,
        state: OptimizerState,
        numbers: Mapping[str, Any],
        cache: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.network = network
        self.cache = {} if cache is None else cache
        self.numbers: Mapping[str, Any] = numbers
        self._state = state
        self._kept: dict[str, Sequence[Tensor | None]] = {}
        self._numbers: dict[str, Any] = {}

    def number(self, name: str, default: Any = None) -> Any:
        """A number as it was before the step, or as it was kept in it."""
        return self._numbers.get(name, self.numbers.get(name, default))

    def entries(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        """Of each trained parameter, those of these tensors that there are."""
        found = [(p, self._state.get(p, {})) for p in self.network.parameters]
        return [{name: _fitted(own[name], p) for name in names if name in own} for p, own in found]

    def pieces(self, name: str) -> list[Tensor | None]:
        """A tensor of each trained parameter; None where there is none."""
        return [recall(self._state, p, name) for p in self.network.parameters]

    def vector(self, name: str) -> Tensor | None:
        """Tensors of the parameters' shapes as one flat vector; None if one of them is missing."""
        pieces = self.pieces(name)
        if any(piece is None for piece in pieces):
            return None
        return self.network.shapes.flatten(pieces, self.network.parameters[0])

    def keep(self, **numbers: Any) -> None:
        """These numbers are to be remembered."""
        self._numbers.update(numbers)

    def keep_pieces(self, name: str, pieces: Sequence[Tensor | None]) -> None:
        """A tensor of each trained parameter is to be remembered; None removes one."""
        self._kept[name] = pieces

    def keep_vector(self, name: str, vector: Tensor | None) -> None:
        """A flat vector of θ's size is to be remembered; None removes what there is."""
        count = len(self.network.parameters)
        self._kept[name] = [None] * count if vector is None else self.network.shapes.split(vector)

    def commit(self) -> dict[str, Any]:
        """Writes the tensors, and drops those of parameters that are not trained any more: they would be stale when these
        are again. Returns the numbers."""
        for p, values in zip(self.network.parameters, zip(*self._kept.values(), strict=True), strict=False):
            remember(self._state, p, **dict(zip(self._kept, values, strict=True)))
        trained = {id(p) for p in self.network.parameters}
        for other in [p for p, entries in self._state.items() if entries and id(p) not in trained]:
            self._state[other] = {}
        return {**self.numbers, **self._numbers}


def recall(state: OptimizerState, parameter: Tensor, name: str) -> Tensor | None:
    """The entry, of the parameter's present dtype and on its present device (after `model.double()`, say)."""
    found: Tensor | None = state.get(parameter, {}).get(name)
    return None if found is None else _fitted(found, parameter)


def _fitted(found: Tensor, parameter: Tensor) -> Tensor:
    if found.dtype == parameter.dtype and found.device == parameter.device:
        return found
    return found.to(parameter.device, parameter.dtype)


def remember(state: OptimizerState, parameter: Tensor, **entries: Tensor | None) -> None:
    """Replaces these entries and keeps the others; None removes one. The old dict is left as it was: it may be wanted
    back."""
    kept = {name: value for name, value in state.get(parameter, {}).items() if name not in entries}
    state[parameter] = {**kept, **{name: value for name, value in entries.items() if value is not None}}


def forget_all_but(state: OptimizerState, names: Iterable[str]) -> None:
    """Removes the entries that nobody owns: what options that are off have left would be stale once they are on again."""
    known = set(names)
    for p in list(state):
        remember(state, p, **dict.fromkeys(name for name in state[p] if name not in known))


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


def step_seed(numbers: Mapping[str, Any]) -> int:
    """Of the random draws of the step that these numbers precede."""
    return mix(numbers["seed"], numbers["iteration"])


class Move:
    """A step that was made: θ before and after it, flat."""

    def __init__(self, before: Tensor, after: Tensor, *, accepted: bool) -> None:
        self.after = after
        self.accepted = accepted
        self._before = before

    def difference(self) -> Tensor | None:
        """What was added to θ; None where nothing was, or not only finite numbers."""
        moved = self.after - self._before if self.accepted else None
        return moved if moved is not None and bool(torch.isfinite(moved).all()) else None
