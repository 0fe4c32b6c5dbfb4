"""Parameter groups: which parameters are trained, and with what weight decay."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


_PAGES = ("accelerate", "deepxde", "lightning", "pina", "skorch", "transformers")
"""Frameworks that have a section in docs/integrations.md."""


def page() -> str:
    """Where it is said how SHF is called: of the nearest framework among the callers, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "").split(".")[0].removeprefix("pytorch_")
        if name in _PAGES:
            return f"docs/integrations.md#{name}"
        frame = frame.f_back
    return "docs/integrations.md"


def refuse_incomplete(owner: str, model: Any, loss: Any) -> None:
    """Refuses what optimizers with a learning rate are made of."""
    right = f"shf.{owner}(model, torch.nn.CrossEntropyLoss()), say; no learning rate. See {page()}"
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{owner}(model=<{type(model).__name__}>): expected a torch.nn.Module, the model itself and not its "
            f"parameters, and the loss: {right}"
        )
    if loss is None:
        raise TypeError(f"{owner}(model) without a loss: it evaluates model and loss by itself; give both, {right}")


def check_decay(owner: str, weight_decay: Any) -> float:
    """The weight decay as Python's own number, whichever kind it was given as; refused if it is out of range."""
    number = isinstance(weight_decay, Real) and not isinstance(weight_decay, bool)
    if not number or not 0 <= weight_decay < float("inf"):
        raise ValueError(f"{owner}(weight_decay={weight_decay!r}): must be a number at least 0")
    return float(weight_decay)


def refuse_settings(owner: str, group: Mapping[str, Any], options: Iterable[str]) -> None:
    """A group may have a weight decay of its own, and labels; a learning rate or an option in it would do nothing."""
    if "lr" in group:
        raise ValueError(
            f"{owner}: parameter group with lr={group['lr']!r}: there is no learning rate in this optimizer; leave it out, "
            "and freeze what is not to be trained (requires_grad=False)"
        )
    for name in options:
        if name in group:
            raise ValueError(
                f"{owner}: parameter group with {name}={group[name]!r}: one value holds for all parameters, give it to "
                f"{owner} itself"
            )


class Group(dict[str, Any]):
    """A parameter group; to schedulers and monitors, which ask it for a learning rate, it says that there is none."""

    def __missing__(self, key: str) -> Any:
        if key == "lr":
            raise KeyError(
                "there is no learning rate in this optimizer, so nothing to schedule or to monitor: leave the learning rate "
                "scheduler out (λ, optimizer.damping, is what changes from step to step)"
            )
        raise KeyError(key)


def make_groups(model: nn.Module, params: Parameters | None, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups. Where none are given explicitly, weights (ndim ≥ 2) decay and the rest does not."""
    if (
        isinstance(params, Mapping)
        and params
        and not any(map(torch.is_tensor, params.values()))
        and "params" not in params
    ):
        raise TypeError(
            f"params is a {type(params).__name__} with {', '.join(map(repr, list(params)[:3]))}: options are given by name; "
            "unpack it, as in **shf.presets.fast"
        )
    if isinstance(params, Tensor | set | frozenset | Mapping) or not isinstance(params, Iterable | None):
        raise TypeError(
            f"params is a {type(params).__name__}: expected a list of parameters, or of dicts, whose order stays the same"
        )
    given = list(model.parameters() if params is None else params)
    if not given:
        raise ValueError("the model has no parameters" if params is None else "params is empty")
    if all(isinstance(group, dict) for group in given):
        groups = [_listed(dict(group)) for group in given]  # type: ignore[call-overload]
        in_groups = [p for group in groups if "params" in group for p in members(group)]
        if not in_groups and all("params" in group for group in groups):  # torch names the key that is missing
            raise ValueError("params is empty: none of its groups has a parameter")
        _refuse_shapeless(in_groups)
        return groups
    given = _unnamed(given)
    if not all(isinstance(p, Tensor) for p in given):
        raise TypeError(
            f"params: expected parameters or dicts of them, got {sorted({type(p).__name__ for p in given})}"
        )
    parameters = [p for p in given if isinstance(p, Tensor)]
    _refuse_shapeless(parameters)
    weights = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    made = [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in made if group["params"]]


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    """The group with its parameters in a list where they come from a generator, which can be read but once."""
    params = group.get("params")
    return {**group, "params": list(params)} if isinstance(params, Iterator) else group


def _refuse_shapeless(parameters: Iterable[Any]) -> None:
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        raise ValueError(
            "parameters of the model have no shape yet (a lazy module): run it once on a batch, then make SHF"
        )


def members(group: Mapping[str, Any]) -> list[Tensor]:
    """The parameters of a group, which may be one, several, or pairs with their names."""
    params = group["params"]
    return [params] if isinstance(params, Tensor) else _unnamed(params)


def _unnamed(params: Iterable[Any]) -> list[Any]:
    """Parameters out of pairs such as those of `named_parameters()`, as torch takes them too."""
    return [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]


def trainable(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter]:
    """The groups' parameters that require grad, in the model's order."""
    own = {id(p) for p in model.parameters()}
    if gone := [tuple(p.shape) for group in groups for p in group["params"] if id(p) not in own]:
        raise ValueError(
            f"parameters of shape {gone} are no longer the model's: a layer was replaced, or its state was loaded with "
            "assign=True; make a new optimizer, and load the old one's state_dict into it"
        )
    members = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    active = [p for p in model.parameters() if id(p) in members]
    if not active:
        raise ValueError("no parameter of the model is trainable: requires_grad is False for all that were given")
    kinds = sorted({f"{p.dtype} on {p.device}" for p in active})
    if len(kinds) > 1:
        raise ValueError(f"parameters are {' and '.join(kinds)}: they must share one dtype and one device")
    if active[0].dtype not in (torch.float32, torch.float64):
        raise ValueError(f"parameters are {active[0].dtype}: expected torch.float32 or torch.float64")
    return active


def decay_weights(parameters: Sequence[nn.Parameter], groups: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """w of each parameter's group."""
    of = {id(p): float(group["weight_decay"]) for group in groups for p in group["params"]}
    return tuple(of[id(p)] for p in parameters)
