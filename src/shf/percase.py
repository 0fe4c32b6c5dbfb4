"""Σ_j (J_j'u_j)²: squares of per-case gradients, summed over cases, without one backward pass per case where possible.

Case j's gradient is J'(E_j u): the cotangent u with all rows but j's set to zero. This is right for every module, also
where a layer is used more than once: the square of the sum over uses, not the sum of squares.

A linear layer that is used once has J_j'u_j = g_j a_j' with its input a and output gradient g, so that the sum of squares
is (g²)'(a²): one matrix product. An embedding's per-case gradients are zero but for the rows that the case looks up, and
only these are made. Other layers that keep cases apart get their own small per-case pullback, all cases at once. What is
left (recurrent layers, tied weights, batch statistics, parameters used outside of their module) takes the exact fallback: a
batched backward pass over the cotangents of several cases.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.functional import one_hot

from shf.jacobian import Graph, Jacobian
from shf.network import holders, plain_gradients
from shf.recording import Call
from shf.rows import RowAxis, even_chunks

CallAxes = dict[nn.Module, list[RowAxis | None]]
"""For each module, in the order of its calls, where the rows lie in the call's input."""

_CHUNK_NUMBERS = 2**24
"""How many numbers the per-case gradients of one chunk may have."""
_CASES_AT_ONCE = 16
"""Cases per batched backward pass of the fallback: it does the work of that many passes over as many rows."""


class Use(NamedTuple):
    """One use of a layer: its input and the gradient by its output, both with the rows in front."""

    a: Tensor
    g: Tensor


@runtime_checkable
class HasPerCaseSquares(Protocol):
    """A module with a formula of its own, such as a layer on sparse inputs."""

    def per_case_squares(self, inputs: Tensor, output_gradients: Tensor) -> dict[str, Tensor]:
        """Σ_j g_j² of each of its parameters, for one call on rows `inputs` with these gradients by its output."""


class Squares(NamedTuple):
    """Σ_j g_j² of one parameter, and a test whether Σ_j g_j is the gradient that the backward pass found for it.

    It is not where the parameter was also used outside of its module's calls; then the squares are not right either.
    """

    total: Tensor
    explains: Callable[[Tensor], Tensor]


def squared_vjp(jacobian: Jacobian, cotangents: Sequence[Tensor], *, axes: CallAxes | None) -> tuple[Tensor, Tensor]:
    """J'u and Σ_j (J_j'u_j)², both flat, from one backward pass where the layers allow it.

    Args:
        jacobian: J on the batch, with its module calls recorded. The record is let go: it holds every layer's output.
        cotangents: u, one tensor per output.
        axes: where the rows lie in each recorded call; None if cases influence each other (batch statistics), in which
            case only the fallback is right.
    """
    shapes, like = jacobian.network.shapes, jacobian.network.parameters[0]
    gradient, squares = layer_squares(jacobian, cotangents, axes=axes)
    left = [i for i, square in enumerate(squares) if square is None]
    if left:
        for i, square in _case_by_case(jacobian, cotangents, left, separable=axes is not None).items():
            squares[i] = square
    return shapes.flatten(gradient, like), shapes.flatten(squares, like)


def layer_squares(
    jacobian: Jacobian, cotangents: Sequence[Tensor], *, axes: CallAxes | None, only: Collection[int] | None = None
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """J'u and Σ_j (J_j'u_j)² parameter by parameter, from layer formulas alone.

    Args:
        jacobian: as in `squared_vjp`; its record of calls is let go.
        cotangents: u.
        axes: as in `squared_vjp`.
        only: the numbers of the parameters that are wanted; by default all.

    Returns:
        The gradient, None for parameters without influence or not wanted; and the squares, None where no layer has a
        formula for them (zeros where there is no influence, or no wish).
    """
    gradient: list[Tensor | None] = []
    squares: list[Tensor | None] = []
    for rows, graph, part in jacobian.graphs_with(cotangents):
        pulled, found = _by_layers(jacobian, graph, part, axes or {}, len(rows), only)
        if not gradient:
            gradient, squares = pulled, found
        else:
            gradient = [p if g is None else g if p is None else g + p for g, p in zip(gradient, pulled, strict=True)]
            squares = [None if s is None or f is None else s.add_(f) for s, f in zip(squares, found, strict=True)]
        graph.calls.of.clear()
    return gradient, squares


def _by_layers(
    jacobian: Jacobian,
    graph: Graph,
    cotangents: Sequence[Tensor],
    axes: CallAxes,
    rows: int,
    only: Collection[int] | None,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradient, and the sums of squares of the parameters whose layer has a formula (None for the others)."""
    model, names = jacobian.network.model, jacobian.network.names
    wanted = sorted(range(len(names)) if only is None else only)
    places = {names[i]: i for i in wanted}
    owners = {m: calls for m, calls in sole_owners(model, graph).items() if len(axes.get(m, [])) == len(calls)}
    if only is not None:
        members = {id(jacobian.network.parameters[i]) for i in wanted}
        owners = {m: c for m, c in owners.items() if any(id(p) in members for p in m.parameters())}
    outputs = [c.output for calls in owners.values() for c in calls if c.output is not None and c.output.requires_grad]
    pulled = jacobian.pull(graph, cotangents, [*(graph.theta[i] for i in wanted), *outputs])
    gradient: list[Tensor | None] = [None] * len(names)
    for i, g in zip(wanted, pulled[: len(wanted)], strict=True):
        gradient[i] = g
    by_output = {id(z): g for z, g in zip(outputs, pulled[len(wanted) :], strict=True)}

    squares = [
        torch.zeros_like(p) if g is None or not p.numel() else None for g, p in zip(gradient, graph.theta, strict=True)
    ]
    claims: list[tuple[int, Tensor, Tensor]] = []
    for prefix, module in model.named_modules():
        if module not in owners:
            continue
        own = {name: places.get(f"{prefix}.{name}" if prefix else name) for name, _ in module.named_parameters()}
        values = {name: graph.theta[i].detach() for name, i in own.items() if i is not None}
        uses = _uses(owners[module], axes[module], by_output, rows)
        if not values or uses is None:
            continue
        for name, found in _layer_squares(module, values, uses).items():
            place = own[name]
            if place is not None and (g := gradient[place]) is not None and g.numel():
                claims.append((place, found.total, found.explains(g)))
    verdicts = torch.stack([holds for _, _, holds in claims]).tolist() if claims else []  # the device is asked once
    for (place, total, _), holds in zip(claims, verdicts, strict=True):
        if holds:
            squares[place] = total
    return gradient, squares


def sole_owners(model: nn.Module, graph: Graph) -> dict[nn.Module, list[Call]]:
    """Recorded leaf modules that share no parameter with another module and whose outputs nobody overwrote."""
    held = holders(model)
    return {
        module: calls
        for module, calls in graph.calls.of.items()
        if not any(module.children())
        and all(c.input is not None and c.intact for c in calls)
        and all(held[id(p)] == 1 for p in module.parameters())
    }


def _uses(
    calls: list[Call], axes: list[RowAxis | None], gradients: dict[int, Tensor | None], rows: int
) -> list[Use] | None:
    """The layer's uses with rows in front, or None where a call does not keep the rows on one axis."""
    uses = []
    for call, axis in zip(calls, axes, strict=True):
        a, z = call.input, call.output
        if axis is None or a is None or z is None:
            return None
        if a.shape[axis.axis] != rows * axis.fold or z.shape[: axis.axis + 1] != a.shape[: axis.axis + 1]:
            return None
        if (g := gradients.get(id(z))) is None:
            continue
        if a.layout == torch.strided:
            uses.append(Use(axis.to_front(a.detach()), axis.to_front(g)))
        elif axis == RowAxis(0):
            uses.append(Use(a.detach(), g))
        else:
            return None
    return uses


def _layer_squares(module: nn.Module, values: dict[str, Tensor], uses: list[Use]) -> dict[str, Squares]:
    if isinstance(module, nn.Linear) and len(uses) == 1 and uses[0].a.ndim == 2:
        return _linear(uses[0], values)
    if isinstance(module, HasPerCaseSquares) and len(uses) == 1:
        return _own_formula(module, values, uses[0])
    if any(use.a.layout != torch.strided for use in uses):
        return {}
    if isinstance(module, nn.Linear):
        return _summed(values, uses, _linear_per_case)
    if type(module).forward is nn.Embedding.forward and values.keys() == {"weight"}:
        return _embedding(uses, values["weight"], module.padding_idx)  # type: ignore[arg-type]
    return _summed(values, uses, lambda some: _pullback_per_case(module, values, some))


def _own_formula(module: "HasPerCaseSquares", values: dict[str, Tensor], use: Use) -> dict[str, Squares]:
    """A layer that brings its own formula; its own gradient is the test of whether it was used once only."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        z = _apart(module, leaves, use.a)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(z, list(leaves.values()), use.g)
    squares = module.per_case_squares(use.a, use.g)
    return {
        name: Squares(squares[name], _equals(gradient, gradient.abs()))
        for name, gradient in zip(leaves, gradients, strict=True)
    }


def _linear(use: Use, values: dict[str, Tensor]) -> dict[str, Squares]:
    """A linear layer used once on (rows, features): per-case gradients g_j a_j', sum of squares (g²)'(a²)."""
    a, g = use
    found: dict[str, Squares] = {}
    g_squared, left = g.square(), _probe(g.shape[1], g)
    projected = g @ left
    if "weight" in values:
        right = _probe(a.shape[1], g)
        total = _products_of_squares(g_squared, a)
        found["weight"] = Squares(total, _projects_to(projected * (a @ right), lambda G: left @ (G @ right)))
    if "bias" in values:
        found["bias"] = Squares(g_squared.sum(0), _projects_to(projected, lambda G: left @ G))
    return found


def _products_of_squares(g_squared: Tensor, a: Tensor) -> Tensor:
    """(g²)'(a²); a CSR input stays sparse."""
    if a.layout != torch.sparse_csr:
        return g_squared.t() @ a.square()
    squared = torch.sparse_csr_tensor(
        a.crow_indices(), a.col_indices(), a.values().square(), a.shape, check_invariants=False
    )
    return (squared.t() @ g_squared).t()


def _linear_per_case(uses: Sequence[Use]) -> dict[str, Tensor]:
    """A linear layer on sequences, or used several times: the sum over positions and uses comes before the square."""
    a, g = (
        torch.cat([t.flatten(1, -2) if t.ndim > 2 else t[:, None] for t in ts], 1) for ts in zip(*uses, strict=True)
    )
    return {"weight": g.transpose(1, 2) @ a, "bias": g.sum(1)}


def _embedding(uses: Sequence[Use], weight: Tensor, padding: int | None) -> dict[str, Squares]:
    """An embedding: the gradients of a case are summed for each of its words, over positions and uses, then squared; what
    a case does not look up is never made. Words at `padding` have no gradient."""
    if not uses:
        return {}
    words = torch.cat([use.a[:, None].flatten(1) for use in uses], 1)
    g = torch.cat([use.g[:, None].flatten(1, -2) for use in uses], 1)
    if padding is not None:
        g = g.masked_fill((words == padding % len(weight)).unsqueeze(-1), 0.0)
    case = torch.arange(len(words), device=words.device).unsqueeze(1)
    pairs, place = (case * len(weight) + words).reshape(-1).unique(return_inverse=True)
    per_case = g.new_zeros(len(pairs), g.shape[-1]).index_add_(0, place, g.reshape(-1, g.shape[-1]))

    def summed(of_pairs: Tensor) -> Tensor:
        return torch.zeros_like(weight).index_add_(0, pairs % len(weight), of_pairs)

    return {"weight": Squares(summed(per_case.square()), _equals(summed(per_case), summed(per_case.abs())))}


def _pullback_per_case(module: nn.Module, values: dict[str, Tensor], uses: Sequence[Use]) -> dict[str, Tensor]:
    """Any layer that treats cases apart: its own pullback, mapped over cases.

    For convolutions this is one grouped convolution, and was measured to be faster than products of unfolded inputs.
    """

    def one_case(a: Tensor, g: Tensor) -> dict[str, Tensor]:
        def layer(parameters: dict[str, Tensor]) -> Tensor:
            with plain_gradients(module):
                return _apart(module, parameters, a[None])

        return vjp(layer, values)[1](g[None])[0]  # type: ignore[no-any-return]

    per_use = [vmap(one_case)(use.a, use.g) for use in uses]
    return {name: sum((found[name] for found in per_use[1:]), per_use[0][name]) for name in values}


class _WithoutHooks(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module.forward(inputs)  # type: ignore[no-any-return]


def _apart(module: nn.Module, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """The layer's output with these parameters. Its hooks do not hear of it, and its buffers stay as they are."""
    values = {name: buffer.clone() for name, buffer in module.named_buffers()} | parameters
    named = {f"module.{name}": value for name, value in values.items()}
    return functional_call(_WithoutHooks(module), named, (inputs,))  # type: ignore[no-any-return]


def _summed(
    values: dict[str, Tensor], uses: list[Use], per_case: Callable[[Sequence[Use]], dict[str, Tensor]]
) -> dict[str, Squares]:
    """Sums the squares of per-case gradients over chunks of cases; nothing where the layer cannot be mapped."""
    if not uses:
        return {}
    rows = len(uses[0].a)
    size = max(1, _CHUNK_NUMBERS // max(1, sum(v.numel() for v in values.values())))
    totals = {name: torch.zeros_like(v) for name, v in values.items()}
    sizes = {name: torch.zeros_like(v) for name, v in values.items()}
    squares = {name: torch.zeros_like(v) for name, v in values.items()}
    for begin in range(0, rows, size):
        chunk = [Use(u.a[begin : begin + size], u.g[begin : begin + size]) for u in uses]
        try:
            found = per_case(chunk)
        except RuntimeError:  # no batching rule for an operation of this layer, or it does not accept a single case
            return {}
        known = values.keys() & found.keys()  # a layer may have parameters beside those that the formula is for
        for name in known:
            totals[name] += found[name].sum(0)
            sizes[name] += found[name].abs().sum(0)
            squares[name] += found[name].square().sum(0)
    return {name: Squares(squares[name], _equals(totals[name], sizes[name])) for name in known}


def _case_by_case(
    jacobian: Jacobian, cotangents: Sequence[Tensor], wanted: list[int], *, separable: bool
) -> dict[int, Tensor]:
    """The exact fallback: backward passes of several cases' cotangents at once, through the graph of these cases, or
    of the whole batch where cases influence each other, if only by the length that outputs are padded to."""
    parameters = [jacobian.network.parameters[i] for i in wanted]
    size = max(1, min(_CASES_AT_ONCE, _CHUNK_NUMBERS // max(1, sum(p.numel() for p in parameters))))
    found = _through_own_graphs(jacobian, cotangents, wanted, size) if separable else None
    return _through_whole_graphs(jacobian, cotangents, wanted, size) if found is None else found


def _through_own_graphs(
    jacobian: Jacobian, cotangents: Sequence[Tensor], wanted: list[int], size: int
) -> dict[int, Tensor] | None:
    """Σ_j (J_j'u_j)² from graphs of at most `size` cases; None where outputs have another shape there than in the batch."""
    squares = _zeros(jacobian, wanted)
    for rows in even_chunks(jacobian.rows, size):
        local, part = jacobian.restricted(rows), jacobian.cotangents_of(cotangents, rows)
        for chunk, graph, u in local.graphs_with(part):
            if any(z.shape != v.shape for z, v in zip(graph.outputs, u, strict=True)):
                return None
            _add_squares_(squares, _pull_cases(local, graph, u, torch.arange(len(chunk)), len(chunk), wanted))
    return squares


def _through_whole_graphs(
    jacobian: Jacobian, cotangents: Sequence[Tensor], wanted: list[int], size: int
) -> dict[int, Tensor]:
    """Σ_j (J_j'u_j)² from the graphs that J itself has."""
    squares = _zeros(jacobian, wanted)
    for chunk, graph, u in jacobian.graphs_with(cotangents):
        for rows in even_chunks(len(chunk), size):
            _add_squares_(squares, _pull_cases(jacobian, graph, u, rows, len(chunk), wanted))
    return squares


def _zeros(jacobian: Jacobian, wanted: list[int]) -> dict[int, Tensor]:
    return {i: torch.zeros_like(jacobian.network.parameters[i]) for i in wanted}


def _add_squares_(squares: dict[int, Tensor], gradients: Sequence[Tensor | None]) -> None:
    for square, g in zip(squares.values(), gradients, strict=True):
        if g is not None:
            square += g.square().sum(0)


def _pull_cases(
    jacobian: Jacobian, graph: Graph, cotangents: Sequence[Tensor], rows: Tensor, count: int, wanted: list[int]
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
    if u.ndim <= axis.axis or u.shape[axis.axis] != count * axis.fold:
        raise ValueError(
            f"per-case gradients: an output of shape {tuple(u.shape)} does not say which entries belong to which of {count} "
            "cases; return outputs with the rows along axis 0 (pad sequences), or use preconditioner=None"
        )
    keep = one_hot(rows, count).to(u)
    return torch.stack([axis.factor(row, u.ndim) * u for row in keep])


def _probe(size: int, like: Tensor) -> Tensor:
    """A fixed vector without structure, for comparing two matrices through one projection of each."""
    angles = torch.arange(1, size + 1, dtype=torch.float64) * (math.sqrt(5) - 1) * math.pi
    return angles.cos().to(like)


def projections_agree(use: Use, gradient: Tensor) -> bool:
    """Whether Σ_j g_j a_j' is a given (outputs, inputs) matrix, seen through one projection."""
    left, right = _probe(use.g.shape[1], use.g), _probe(use.a.shape[1], use.g)
    return bool(_projects_to((use.g @ left) * (use.a @ right), lambda G: left @ (G @ right))(gradient))


def _projects_to(terms: Tensor, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Whether a gradient's projection is the sum of the cases' projections, `terms`."""

    def explains(gradient: Tensor) -> Tensor:
        expected = project(gradient)
        tolerance = math.sqrt(torch.finfo(terms.dtype).eps) * (terms.abs().sum() + expected.abs())
        return (terms.sum() - expected).abs() <= tolerance

    return explains


def _equals(total: Tensor, size: Tensor) -> Callable[[Tensor], Tensor]:
    def explains(gradient: Tensor) -> Tensor:
        tolerance = math.sqrt(torch.finfo(total.dtype).eps) * (size.max() + gradient.abs().max())
        return ((total - gradient).abs() <= tolerance).all()

    return explains
