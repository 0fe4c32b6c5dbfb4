"""Parameter groups: which parameters are trained, and with what weight decay."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def check_decay(owner: str, weight_decay: Any) -> None:
    number = isinstance(weight_decay, int | float) and not isinstance(weight_decay, bool)
    if not number or not 0 <= weight_decay < float("inf"):
        raise ValueError(f"{owner}(weight_decay={weight_decay!r}): must be a number at least 0")


def make_groups(model: nn.Module, params: Parameters | None, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups. Where none are given explicitly, weights (ndim ≥ 2) decay and the rest does not."""
    given = list(model.parameters() if params is None else params)
    if not given:
        raise ValueError("the model has no parameters" if params is None else "params is empty")
    if all(isinstance(group, dict) for group in given):
        return [dict(group) for group in given]  # type: ignore[call-overload]
    if not all(isinstance(p, Tensor) for p in given):
        raise TypeError(
            f"params: expected parameters or dicts of them, got {sorted({type(p).__name__ for p in given})}"
        )
    parameters = [p for p in given if isinstance(p, Tensor)]
    weights = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
