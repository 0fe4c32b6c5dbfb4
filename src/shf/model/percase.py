"""Σ_j (J_j'u_j)²: squares of per-case gradients, summed over cases, without one backward pass per case where possible.

Case j's gradient is J'(E_j u): the cotangent u with all rows but j's set to zero. This is right for every module, also
where a layer is used more than once: the square of the sum over uses, not the sum of squares.

Layers that keep cases apart have formulas (`layersquares`). What is left (recurrent layers, tied weights, batch statistics,
parameters used outside of their module) takes the exact fallback: a batched backward pass over the cotangents of several
cases.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from shf.data.rows import RowAxis, even_chunks
from shf.errors import AmbiguousRowsError
from shf.model.jacobian import Graph, Jacobian
from shf.model.layersquares import MOST_NUMBERS, Comparison, Squares, Use, agree, formula
from shf.model.network import Network
from shf.model.recording import Call

CallAxes = dict[nn.Module, list[RowAxis | None]]
"""For each module, in the order of its calls, where the rows lie in the call's input."""

Formula = Callable[[nn.Module, dict[str, Tensor], list[Use]], dict[str, Squares]]
"""See `layersquares.formula`."""

_CASES_AT_ONCE = 16
"""Cases per batched backward pass of the fallback: it does the work of that many passes over as many rows."""


def squared_vjp(
    jacobian: Jacobian,
    cotangents: Sequence[Tensor],
    *,
    axes: CallAxes | None,
    costs: Callable[[float], None] = lambda evaluations: None,
) -> tuple[Tensor, Tensor]:
    """J'u and Σ_j (J_j'u_j)², both flat, from one backward pass where the layers allow it.

    Args:
        jacobian: J on the batch, with its module calls recorded. The record is let go: it holds every layer's output.
        cotangents: u, one tensor per output.
        axes: where the rows lie in each recorded call; None if cases influence each other (batch statistics), in which
            case only the fallback is right.
        costs: is told what the fallback will cost before it begins, in evaluations of the model on all rows.
    """
    shapes, like = jacobian.network.shapes, jacobian.network.parameters[0]
    found: Found | None = None
    for rows, graph, part in jacobian.graphs_with(cotangents):
        here, _ = squares_by_layers(jacobian, graph, part, axes or {}, len(rows))
        found = here if found is None else found.plus(here)
        graph.calls.of.clear()
    assert found is not None
    gradient, squares = found
    left = [i for i, square in enumerate(squares) if square is None]
    if left:
        for i, square in _case_by_case(jacobian, cotangents, left, costs, separable=axes is not None).items():
            squares[i] = square
    return shapes.flatten(gradient, like), shapes.flatten(squares, like)


class Found(NamedTuple):
    """Parameter by parameter, what the layers of one graph say.

    Attributes:
        gradient: J'u; None for parameters without influence or not wanted.
        squares: Σ_j (J_j'u_j)²; None where no layer has a formula for it, zeros where there is no influence, or no wish.
    """

    gradient: list[Tensor | None]
    squares: list[Tensor | None]

    def plus(self, other: "Found") -> "Found":
        """The sums over the rows of both."""
        pairs = zip(self.gradient, other.gradient, strict=True)
        gradient = [p if g is None else g if p is None else g + p for g, p in pairs]
        squares = zip(self.squares, other.squares, strict=True)
        return Found(gradient, [None if s is None or f is None else s.add_(f) for s, f in squares])


def squares_by_layers(
    jacobian: Jacobian,
    graph: Graph,
    cotangents: Sequence[Tensor],
    axes: CallAxes,
    rows: int,
    only: Collection[int] | None = None,
    also: Sequence[Tensor] = (),
    *,
    of_layer: Formula = formula,
    intact: bool = True,
) -> tuple[Found, Sequence[Tensor | None]]:
    """One backward pass through one graph.

    Args:
        jacobian: J, with its module calls recorded.
        graph: one of J's.
        cotangents: u, the graph's share of it.
        axes: as in `squared_vjp`; empty for none.
        rows: of the graph.
        only: the numbers of the parameters that are wanted; by default all.
        also: other tensors of the graph.
        of_layer: squares of a layer's parameters, from its calls.
        intact: whether it needs outputs that nobody has overwritten.

    Returns:
        What the layers say, and the gradients of u'z by the other tensors.
    """
    network, count = jacobian.network, len(jacobian.network.names)
    wanted = list(range(count)) if only is None else sorted(only)
    layers = network.once(layers_of)
    owners = {
        m: calls
        for m, calls in sole_owners(network, graph, intact=intact).items()
        if len(axes.get(m, ())) == len(calls)
    }
    if only is not None:
        owners = {m: c for m, c in owners.items() if not set(wanted).isdisjoint(layers[m].values())}
    edges = [c.edge for calls in owners.values() for c in calls if c.edge is not None]
    beside = [] if only is None else _asked_beside(graph)
    pulled = jacobian.pull(graph, cotangents, [*also, *(graph.theta[i] for i in wanted), *edges, *beside])
    others, pulled = pulled[: len(also)], pulled[len(also) :]
    gradient: list[Tensor | None] = [None] * count
    for i, g in zip(wanted, pulled, strict=False):
        gradient[i] = g
    by_edge = {id(e): g for e, g in zip(edges, pulled[len(wanted) :], strict=False)}

    squares = [
        torch.zeros_like(p) if g is None or not p.numel() else None for g, p in zip(gradient, graph.theta, strict=True)
    ]
    claims: list[tuple[int, Tensor, Comparison]] = []
    for module, own in layers.items():
        gradients = [by_edge.get(id(c.edge)) for c in owners.get(module, [])]
        uses = row_uses(owners[module], axes[module], gradients, rows) if module in owners else None
        values = {name: graph.theta[i].detach() for name, i in own.items() if only is None or i in only}
        if not values or uses is None:
            continue
        for name, square in of_layer(module, values, uses).items():
            if (g := gradient[own[name]]) is not None and g.numel():
                claims.append((own[name], square.total, square.compared(g)))
    for (place, total, _), held in zip(claims, agree([compared for *_, compared in claims]), strict=True):
        if held:  # the layer explains the gradient
            squares[place] = total
    return Found(gradient, squares), others


def layers_of(network: Network) -> dict[nn.Module, dict[str, int]]:
    """The modules without modules inside, with the numbers of their parameters by name, as far as these are trained."""
    numbers = {id(p): i for i, p in enumerate(network.parameters)}
    return {
        module: {name: numbers[id(p)] for name, p in module.named_parameters() if id(p) in numbers}
        for module in network.modules
        if not any(module.children())
    }


def _asked_beside(graph: Graph) -> list[Tensor]:
    """Tensors whose gradients are asked for though nobody wants them: torch (2.13, CPU) crashes in the backward pass of a
    GroupNorm on channels-last images where its parameters' gradients are wanted and its input's is not."""
    inputs = [c.input for m, calls in graph.calls.of.items() if isinstance(m, nn.GroupNorm) for c in calls]
    return [a for a in inputs if a is not None and a.requires_grad and not a.is_contiguous()]


def sole_owners(network: Network, graph: Graph, *, intact: bool = True) -> dict[nn.Module, list[Call]]:
    """Recorded leaf modules that share no parameter with another module and whose outputs, if that matters, nobody
    overwrote."""
    return {
        module: calls
        for module, calls in graph.calls.of.items()
        if module in network.once(_own_layers) and all(c.input is not None and (c.intact or not intact) for c in calls)
    }


def _own_layers(network: Network) -> set[nn.Module]:
    return {module for module in network.once(layers_of) if all(map(network.is_held_once, module.parameters()))}


def row_uses(
    calls: list[Call], axes: list[RowAxis | None], gradients: Sequence[Tensor | None], rows: int
) -> list[Use] | None:
    """The layer's uses with rows in front, or None where a call does not keep the rows on one axis; with the gradients by
    their outputs."""
    uses = []
    for call, axis, g in zip(calls, axes, gradients, strict=True):
        a, z = call.input, call.output
        if axis is None or a is None or z is None:
            return None
        if a.shape[axis.axis] != rows * axis.fold or z.shape[: axis.axis + 1] != a.shape[: axis.axis + 1]:
            return None
        if g is None:
            continue
        if a.layout == torch.strided:
            uses.append(Use(axis.to_front(a.detach()), axis.to_front(g)))
        elif axis == RowAxis(0):
            uses.append(Use(a.detach(), g))
        else:
            return None
    return uses


def _case_by_case(
    jacobian: Jacobian,
    cotangents: Sequence[Tensor],
    wanted: list[int],
    costs: Callable[[float], None],
    *,
    separable: bool,
) -> dict[int, Tensor]:
    """The exact fallback: backward passes of several cases' cotangents at once, through the graph of these cases, or
    of the whole batch where cases influence each other, if only by the length that outputs are padded to."""
    size = cases_at_once(jacobian, wanted)
    if separable:
        costs(1 + 2 * min(size, jacobian.rows))
        if (found := _through_own_graphs(jacobian, cotangents, wanted, size)) is not None:
            return found
    costs(2 * jacobian.rows)
    return _through_whole_graphs(jacobian, cotangents, wanted, size)


def cases_at_once(jacobian: Jacobian, wanted: Sequence[int]) -> int:
    """How many cases' gradients by these parameters one batched backward pass makes."""
    numbers = sum(jacobian.network.parameters[i].numel() for i in wanted)
    return max(1, min(_CASES_AT_ONCE, MOST_NUMBERS // max(1, numbers)))


def _through_own_graphs(
    jacobian: Jacobian, cotangents: Sequence[Tensor], wanted: list[int], size: int
) -> dict[int, Tensor] | None:
    """Σ_j (J_j'u_j)² from graphs of at most `size` cases; None where outputs have another shape there than in the batch, or
    cases are only to be had together."""
    squares = _zeros(jacobian, wanted)
    for rows in even_chunks(jacobian.rows, size):
        try:
            local, part = jacobian.restricted(rows), jacobian.cotangents_of(cotangents, rows)
        except AmbiguousRowsError:
            return None
        for chunk, graph, u in local.graphs_with(part):
            if any(z.shape != v.shape for z, v in zip(graph.outputs, u, strict=True)):
                return None
            _add_squares_(squares, pull_cases(local, graph, u, torch.arange(len(chunk)), len(chunk), wanted))
    return squares


def _through_whole_graphs(
    jacobian: Jacobian, cotangents: Sequence[Tensor], wanted: list[int], size: int
) -> dict[int, Tensor]:
    """Σ_j (J_j'u_j)² from the graphs that J itself has."""
    squares = _zeros(jacobian, wanted)
    for chunk, graph, u in jacobian.graphs_with(cotangents):
        for rows in even_chunks(len(chunk), size):
            _add_squares_(squares, pull_cases(jacobian, graph, u, rows, len(chunk), wanted))
    return squares


def _zeros(jacobian: Jacobian, wanted: list[int]) -> dict[int, Tensor]:
    return {i: torch.zeros_like(jacobian.network.parameters[i]) for i in wanted}


def _add_squares_(squares: dict[int, Tensor], gradients: Sequence[Tensor | None]) -> None:
    for square, g in zip(squares.values(), gradients, strict=True):
        if g is not None:
            square += g.square().sum(0)


def pull_cases(
    jacobian: Jacobian, graph: Graph, cotangents: Sequence[Tensor], rows: Tensor, count: int, wanted: Sequence[int]
) -> Sequence[Tensor | None]:
    """Gradients of the given ones of a graph's `count` cases, stacked in front."""
    by = [graph.theta[i] for i in wanted]
    masked = [
        u.expand(len(rows), *u.shape) if jacobian.is_idle(i, u) else _one_row_each(u, jacobian.axis(i), rows, count)
        for i, u in enumerate(cotangents)
    ]
    try:
        return jacobian.pull(graph, masked, by, batched=True)
    except RuntimeError:  # some backward kernel cannot be batched: one case after the other
        single = [jacobian.pull(graph, [m[k] for m in masked], by) for k in range(len(rows))]
        return [None if any(g is None for g in c) else torch.stack(c) for c in zip(*single, strict=True)]


def _one_row_each(u: Tensor, axis: RowAxis, rows: Tensor, count: int) -> Tensor:
    """(cases, *u.shape): in entry k all of u but row rows[k] is zero."""
    if count == 1:
        return u[None]
    refuse_unclear_rows(u, axis, count)
    keep = one_hot(rows, count).to(u)
    return torch.stack([axis.factor(row, u.ndim) * u for row in keep])


def refuse_unclear_rows(
    output: Tensor, axis: RowAxis, count: int, what: str = "per-case gradients", instead: str = "preconditioner=None"
) -> None:
    """Refuses an output, or its cotangent, whose `axis` does not hold so many rows."""
    if output.ndim <= axis.axis or output.shape[axis.axis] != count * axis.fold:
        raise ValueError(
            f"{what}: an output of shape {tuple(output.shape)} does not say which entries belong to which of "
            f"{count} cases; return outputs with the rows along axis 0 (pad sequences), or use {instead}"
        )
