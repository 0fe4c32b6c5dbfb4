"""What a loss does with the rows of a batch, found by calling it on one of them and on that one twice."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shf.data.batches import Batch
from shf.data.draws import Draws
from shf.data.rows import take_outputs
from shf.data.tree import leaves, map_leaves
from shf.hessian.expansion import LossExpansion
from shf.losses import Loss, Reduction
from shf.model.network import REFUSALS, Network
from shf.probing.layout import Layout, few_rows
from shf.runtime.context import warn
from shf.runtime.memory import is_out_of_memory

_NEAR = 1e-3
"""A relative difference that rounding makes; a mean and a sum differ by 1."""
_TRIES = 32
"""Rows of a batch that are looked at, at most, for one that the loss says something of."""


@torch.no_grad()
def refuse_contradictions(loss: Loss, network: Network, batch: Batch, layout: Layout, seed: int) -> bool:
    """Refuses a loss that is not one function of outputs and targets, or that scales with rows otherwise than it says.

    Nothing is said of a loss that cannot be called on so few rows, or is neither a mean nor a sum over them. One without
    curvature gets a warning: B is zero then, and steps are those of gradient descent. So does one that takes every output
    together with every target.

    Returns:
        Whether that is all there is to find out. It is not where the loss says nothing of the rows that were tried, being 0
        or not a number on each of them (rows without a target): another batch may tell.

    Raises:
        RuntimeError: if it gives different numbers for the same outputs and targets.
        ValueError: if it adds up rows and is taken for a mean over them, or the other way round; or if it depends on the
            parameters otherwise than through the outputs.
    """
    few, values = few_rows(batch, layout), network.leaves()
    with torch.enable_grad(), Draws(seed, few.rows).over():
        outputs = map_leaves(Tensor.detach, network(values, few.inputs))
    _refuse_other_ways(loss, network, values, outputs, few.targets)
    _warn_of_own_parameters(loss, network)
    _warn_of_lost_precision(network, outputs)
    once, again = (_value(loss, outputs, few.targets) for _ in range(2))
    if once is not None and again is not None and once != again and not math.isnan(once) and not math.isnan(again):
        raise RuntimeError(
            f"loss {loss.name} gives different numbers for the same outputs and targets ({once:.6g} and {again:.6g}): it "
            "draws random numbers or has a hidden state. Every evaluation in a step must see the same function; draw in "
            "the model's forward, where draws are frozen for the step"
        )
    if _is_flat(loss, outputs, few.targets):
        warn(
            f"loss {loss.name} has no curvature in the outputs: the Gauss-Newton matrix is zero, and steps are those of "
            "gradient descent with the rate 1/λ; use one that is curved in them: nn.HuberLoss in place of nn.L1Loss, a "
            "smoothed one in place of a quantile loss, nn.CrossEntropyLoss on logits in place of nn.NLLLoss on "
            "log-probabilities"
        )
    _warn_of_broadcasting(loss, outputs, batch.targets)
    if not layout.separable or any(axis is None for axis in layout.outputs):
        return True
    return _refuse_other_scaling(loss, outputs, layout, batch) or once is None or _says_something(once)


@contextmanager
def explained_dtypes(network: Network, batch: Batch) -> Iterator[None]:
    """An error of a model that was given inputs of another precision than its parameters' says that."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        own = network.parameters[0].dtype
        given = {x.dtype for x in leaves(batch.inputs) if x.is_floating_point()} - {own}
        if not given or "type" not in str(error):
            raise
        right = "inputs.double()" if own is torch.float64 else "inputs.float()"
        raise ValueError(
            f"the model's parameters are {own}, inputs are {', '.join(sorted(map(str, given)))}: expected the same; give "
            f"{right} ({error})"
        ) from error


def _warn_of_lost_precision(network: Network, outputs: Any) -> None:
    """Of outputs in single precision of a model in double: f is then summed in single precision."""
    if network.parameters[0].dtype is torch.float64 and any(z.dtype is torch.float32 for z in leaves(outputs)):
        warn(
            "the model's parameters are torch.float64, its outputs torch.float32: the loss is summed in that, and steps end "
            "at its rounding; leave outputs in torch.float64"
        )


def _refuse_other_scaling(loss: Loss, outputs: Any, layout: Layout, batch: Batch) -> bool:
    """Compares one row with the same row twice; returns whether there was a row that tells. Targets of later rows are tried
    on the outputs of the first ones."""
    for number in _rows_to_try(batch.rows):
        row = torch.tensor([number])
        one, two = (
            _value(loss, take_outputs(outputs, layout.outputs, rows.clamp(max=1)), batch.take_targets(rows))
            for rows in (row, row.repeat(2))
        )
        if one is None or two is None or not _says_something(one):
            continue
        adds, averages = abs(two / one - 2) < _NEAR, abs(two / one - 1) < _NEAR
        if (adds and loss.reduction is Reduction.MEAN) or (averages and loss.reduction is Reduction.SUM):
            does, right = ("adds up", "sum") if adds else ("averages over", "mean")
            raise ValueError(
                f"loss {loss.name} {does} the rows of a batch (one row: {one:.6g}, the same row twice: {two:.6g}) but is "
                f"taken for a {loss.reduction.value} over them: give reduction={right!r}"
            )
        return True
    return False


def _rows_to_try(rows: int) -> list[int]:
    """The first two, whose outputs are there, and others from all over the batch."""
    spread = torch.linspace(0, rows - 1, min(rows, _TRIES)).long().tolist()
    return list(dict.fromkeys([0, *range(1, min(rows, 2)), *spread]))


def _says_something(value: float) -> bool:
    return math.isfinite(value) and value != 0


def _refuse_other_ways(loss: Loss, network: Network, values: Sequence[Tensor], outputs: Any, targets: Any) -> None:
    """Refuses a loss that sees the parameters past the outputs: a penalty on weights, or on what `forward` left in an
    attribute. ∂L/∂z knows nothing of it, so that it would count in f and have no gradient."""
    with torch.enable_grad():
        try:
            total = loss(outputs, targets)
        except REFUSALS as error:
            if is_out_of_memory(error):
                raise
            return
    if not total.requires_grad:
        return
    found = torch.autograd.grad(total, [*values, *network.parameters], allow_unused=True)
    names = [name for name, g in zip([*network.names, *network.names], found, strict=True) if g is not None]
    if names:
        raise ValueError(
            f"loss {loss.name} depends on parameters ({names[0]}) otherwise than through the model's outputs: a step "
            "differentiates through them alone, and this part would have no gradient; return what it needs from forward, "
            "one for each row, and for a penalty on weights give weight_decay"
        )


def _warn_of_own_parameters(loss: Loss, network: Network) -> None:
    """Of a loss that is a module with parameters besides the model's: nothing here trains them."""
    if not isinstance(loss.function, nn.Module):
        return
    of_model = {id(p) for p in network.model.parameters()}
    own = [name for name, p in loss.function.named_parameters() if p.requires_grad and id(p) not in of_model]
    if own:
        warn(
            f"loss {loss.name} has parameters of its own ({own[0]}), which SHF does not train: put them into the model, "
            "whose outputs the loss takes, or freeze them by requires_grad_(False)"
        )


def _warn_of_broadcasting(loss: Loss, outputs: Any, targets: Any) -> None:
    """Of outputs (B, 1) and targets (B,), between which arithmetic makes a table (B, B). It makes none row by row, nor
    between (B,) and (B,), or (B, 1) and (B, 1): the warning comes if these three agree and the call as it is does not."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.ndim != 1:
        return
    if outputs.shape != (2, 1) or len(targets) < 2 or targets.layout != torch.strided or targets.is_complex():
        return
    z = outputs + torch.arange(2, device=outputs.device).view(2, 1)  # those of a last layer at zero do not differ
    order = targets.float()  # of bools and some whole numbers torch has no argmin
    t = targets[torch.stack([order.argmin(), order.argmax()])]
    called, first, second = (_value(loss, *way) for way in ((z, t), (z[:1], t[:1]), (z[1:], t[1:])))
    if called is None or first is None or second is None:
        return
    total = (first + second) / (2 if loss.reduction is Reduction.MEAN else 1)
    if _near(called, total):
        return
    if all(_near(_value(loss, *way), total) for way in ((z[:, 0], t), (z, t[:, None]))):
        warn(
            f"loss {loss.name}, of outputs of shape ({len(targets)}, 1) and targets of shape ({len(targets)},), compares "
            "every output with every target: give both one shape, by targets[:, None] or a model that ends in nn.Flatten(0)"
        )


def _near(value: float | None, other: float) -> bool:
    return value is not None and math.isclose(value, other, rel_tol=_NEAR)


def _is_flat(loss: Loss, outputs: Any, targets: Any) -> bool:
    """Whether L''u = 0 for a u without structure, here and at z = 0, where that can be found out."""
    try:
        return all(LossExpansion(loss, z, targets).is_flat() for z in (outputs, map_leaves(torch.zeros_like, outputs)))
    except REFUSALS as error:
        if is_out_of_memory(error):
            raise
        return False


def _value(loss: Loss, outputs: Any, targets: Any) -> float | None:
    """None where it cannot be called like this; if it never can, the step will say so."""
    try:
        return loss(outputs, targets).item()
    except REFUSALS as error:
        if is_out_of_memory(error):
            raise
        return None
