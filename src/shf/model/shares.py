"""Σ_j s_j², s_j being row j's share of J'u, at the cost of one gradient at most: for models whose rows do not keep apart.

Let each row use a copy θ_j of the parameters. Then J'u = Σ_j s_j with s_j = ∂(u'z)/∂θ_j, whatever the rows do to each
other. Where they keep apart s_j is the gradient of case j, J_j'u_j. Where they do not (batch statistics), that one costs a
backward pass over all rows for each of them; the shares come with the gradient's own pass.

A linear layer's shares are g_j a_j', batch normalisation's g_j x̂_j. What has no such formula is summed in groups of rows
with random signs ε, (Σ_j ε_j s_j)², an unbiased estimate: layers by their own pullback, the rest through the whole model.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shf.data.rows import RowAxis, even_chunks
from shf.hessian.expansion import Signs
from shf.model.jacobian import Jacobian
from shf.model.layersquares import (
    HasPerCaseSquares,
    Squares,
    Use,
    apart,
    equals,
    formula,
    projection,
    projects_to,
)
from shf.model.network import plain_gradients
from shf.model.percase import CallAxes, Found, refuse_unclear_rows, squares_by_layers

GROUPS = 6
"""Of rows with random signs: the estimate's relative variance is 2 over this, or less."""
_DRAW = 1 << 20
"""Number of the signs' draw: apart from those of samples of L''."""


class Rows(NamedTuple):
    """What is known of the rows of a model.

    Attributes:
        axes: where they lie in the input of each call of a layer, as far as that is known.
        separable: whether each row's output depends on that row alone.
        signs: draws independent ±1.
    """

    axes: CallAxes
    separable: bool
    signs: Signs


def squared_shares(jacobian: Jacobian, cotangents: Sequence[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    """J'u and Σ_j s_j², both flat; the latter in expectation. The record of calls is let go."""
    shapes, like = jacobian.network.shapes, jacobian.network.parameters[0]
    signs = _row_signs(jacobian, cotangents, rows.signs)
    found: Found | None = None
    for chunk, graph, part in jacobian.graphs_with(cotangents):
        own = partial(_of_layer, signs=signs if len(chunk) == len(signs) else signs[chunk])
        here, _ = squares_by_layers(jacobian, graph, part, rows.axes, len(chunk), of_layer=own, intact=False)
        found = here if found is None else found.plus(here)
        graph.calls.of.clear()
    assert found is not None
    gradient, squares = found
    if left := [i for i, square in enumerate(squares) if square is None]:
        _fill(squares, left, jacobian, cotangents, signs, separable=rows.separable)
    return shapes.flatten(gradient, like), shapes.flatten(squares, like)


def _row_signs(jacobian: Jacobian, cotangents: Sequence[Tensor], signs: Signs) -> Tensor:
    """ε: ±1 for each row."""
    number = next(i for i, u in enumerate(cotangents) if not jacobian.is_idle(i, u))
    drawn = signs(cotangents[number], number, _DRAW)
    return jacobian.axis(number).to_front(drawn).reshape(jacobian.rows, -1)[:, 0]


def _of_layer(module: nn.Module, values: dict[str, Tensor], uses: list[Use], signs: Tensor) -> dict[str, Squares]:
    """Σ_j s_j² of a layer's parameters: exactly, where there is a formula that costs no more than the gradient."""
    if not uses:
        return {}
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
        return _normalised(module.eps, values, uses[0]) if len(uses) == 1 else {}
    linear = isinstance(module, nn.Linear) and len(uses) == 1 and uses[0].a.ndim == 2
    if linear or isinstance(module, HasPerCaseSquares | nn.Embedding):
        return formula(module, values, uses)
    if any(use.a.layout != torch.strided for use in uses):
        return {}
    try:
        return _grouped(module, values, uses, signs)
    except RuntimeError:  # it does not accept some of the rows
        return {}


def _normalised(eps: float, values: dict[str, Tensor], use: Use) -> dict[str, Squares]:
    """Batch normalisation γx̂ + β: the shares are Σ g x̂ and Σ g, over a row's positions."""
    x = F.batch_norm(use.a, None, None, training=True, eps=eps)
    shares = {"weight": use.g * x, "bias": use.g}
    summed = {name: shares[name].reshape(*x.shape[:2], -1).sum(2) for name in values}
    return {name: Squares(s.square().sum(0), equals(s.sum(0), s.abs().sum(0))) for name, s in summed.items()}


def _grouped(module: nn.Module, values: dict[str, Tensor], uses: list[Use], signs: Tensor) -> dict[str, Squares]:
    """(Σ_j ε_j s_j)² over groups of rows, by the layer's own pullback of those with ε = 1 and of the others."""
    squares = {name: torch.zeros_like(v) for name, v in values.items()}
    projections: dict[str, list[Tensor]] = {name: [] for name in values}
    for halves in _signed_groups(signs):
        pulled = [_pullback(module, values, uses, rows) for rows in halves if len(rows)]
        for name, first, *others in zip(values, *pulled, strict=True):
            projections[name] += map(projection, (first, *others))
            difference = first.sub_(others[0]) if others else first
            squares[name].addcmul_(difference, difference)
    return {n: Squares(squares[n], projects_to(torch.stack(p), projection)) for n, p in projections.items()}


def _signed_groups(signs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers of the rows of each group, by their signs."""
    positive = (signs > 0).cpu()
    for rows in even_chunks(len(signs), -(-len(signs) // GROUPS)):
        yield rows[positive[rows]].to(signs.device), rows[~positive[rows]].to(signs.device)


def _pullback(module: nn.Module, values: dict[str, Tensor], uses: list[Use], rows: Tensor) -> list[Tensor]:
    """Σ s_j over some rows, parameter by parameter."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    with torch.enable_grad(), plain_gradients(module.modules()):
        outputs = [apart(module, leaves, use.a[rows].contiguous()) for use in uses]
    given = [use.g[rows] for use in uses]
    found = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(found, values.values(), strict=True)]


def _signed(u: Tensor, axis: RowAxis, signs: Tensor) -> Tensor:
    """A cotangent with each row by its sign."""
    refuse_unclear_rows(u, axis, len(signs))
    return axis.factor(signs, u.ndim) * u


def _fill(
    squares: list[Tensor | None],
    wanted: list[int],
    jacobian: Jacobian,
    cotangents: Sequence[Tensor],
    signs: Tensor,
    *,
    separable: bool,
) -> None:
    """(Σ_j ε_j s_j)² of what no layer explains: over groups of rows through graphs of their own where rows keep apart, else
    over all rows."""
    signed = [u if jacobian.is_idle(i, u) else _signed(u, jacobian.axis(i), signs) for i, u in enumerate(cotangents)]
    found = _through_groups(jacobian, signed, wanted) if separable else None
    for i, square in zip(wanted, found or _squares_of(jacobian, signed, wanted), strict=True):
        squares[i] = square


def _through_groups(jacobian: Jacobian, signed: Sequence[Tensor], wanted: list[int]) -> list[Tensor] | None:
    """None where outputs have another shape on some of the rows."""
    total = [torch.zeros_like(jacobian.network.parameters[i]) for i in wanted]
    for rows in even_chunks(jacobian.rows, -(-jacobian.rows // GROUPS)):
        local, part = jacobian.restricted(rows), jacobian.cotangents_of(signed, rows)
        shapes = [z.shape for _, graph in local.graphs() for z in graph.outputs]
        if shapes != [u.shape for u in part]:
            return None
        total = [t.add_(square) for t, square in zip(total, _squares_of(local, part, wanted), strict=True)]
    return total


def _squares_of(jacobian: Jacobian, cotangents: Sequence[Tensor], wanted: list[int]) -> list[Tensor]:
    """(J'u)² of some parameters, summed over the chunks that rows are taken in."""
    total = [torch.zeros_like(jacobian.network.parameters[i]) for i in wanted]
    for _, graph, part in jacobian.graphs_with(cotangents):
        pulled = jacobian.pull(graph, part, [graph.theta[i] for i in wanted])
        total = [t if g is None else t.add_(g.square()) for t, g in zip(total, pulled, strict=True)]
    return total
