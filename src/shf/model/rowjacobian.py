"""J = ∂z/∂θ as one dense matrix, a row for each number that the model returns for each case.

Where θ is used by linear maps only, a row of J is Σ g_i x_i' over their uses (`linearuses`), for all cases at once: one
backward pass for each number that a case has. Random combinations of all rows, J'u, are then compared with the backward
pass of the model as it is. Parameters that this does not hold for take the exact fallback: batched backward passes
through graphs of a few cases each.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from shf.data.draws import generator
from shf.data.rows import even_chunks
from shf.data.tree import leaves
from shf.model.jacobian import Graph, Jacobian
from shf.model.linearuses import LinearUses
from shf.model.network import REFUSALS
from shf.model.percase import cases_at_once, pull_cases, refuse_unclear_rows
from shf.runtime.memory import is_out_of_memory


def row_jacobian(jacobian: Jacobian, *, separable: bool, most: int, out: Tensor | None = None) -> Tensor:
    """J, (cases · numbers per case, n): the rows case by case, the columns in θ's flat order.

    A case's rows are the entries of its share of the first output, then of the next. Parameters without influence have
    zero columns.

    Args:
        jacobian: J on some rows of a batch; every floating-point output has these rows along an axis.
        separable: whether a case's output depends on that case alone.
        most: how many numbers J may have.
        out: where J is written to, of its shape; by default new memory.

    Raises:
        ValueError: if J has more numbers, before there is memory for them; or where an output is shared by all rows.
    """
    widths = _widths(jacobian, [z for z in leaves(jacobian.outputs) if z.is_floating_point()], jacobian.rows)
    each, n = sum(widths), jacobian.network.shapes.total
    if (needed := jacobian.rows * each * n) > most:
        raise ValueError(
            f"the dense Jacobian of {jacobian.rows} rows with {each} outputs each by {n} parameters has {needed:,} numbers, "
            f"and {most:,} are allowed: use fewer rows, or a method that needs only products with it"
        )
    J = jacobian.network.theta().new_empty(jacobian.rows * each, n) if out is None else out
    by_case = J.view(jacobian.rows, each, n)
    if left := _by_uses(jacobian, by_case, widths) if separable else list(range(len(jacobian.network.parameters))):
        _case_by_case(jacobian, by_case, widths, left, separable=separable)
    return J


def _widths(jacobian: Jacobian, outputs: Sequence[Tensor], rows: int) -> list[int]:
    """How many numbers each output has for each row."""
    for i, z in enumerate(outputs):
        refuse_unclear_rows(z, jacobian.axis(i), rows)
    return [z.numel() // rows for z in outputs]


def _units(jacobian: Jacobian, outputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cotangents, one after the other, of each of a row's numbers: 1 there for every row, and 0 elsewhere."""
    for i, z in enumerate(outputs):
        for place in product(*map(range, jacobian.axis(i).to_front(z).shape[1:])):
            cotangents = [torch.zeros_like(other) for other in outputs]
            jacobian.axis(i).to_front(cotangents[i]).movedim(0, -1)[place] = 1
            yield cotangents


def _blocks(jacobian: Jacobian, J: Tensor) -> list[Tensor]:
    """Views of J, (…, n), one for each parameter: (…, *shape)."""
    shapes = jacobian.network.shapes
    pieces = J.split(shapes.sizes, -1)
    return [piece.view(*piece.shape[:-1], *shape) for piece, shape in zip(pieces, shapes.shapes, strict=True)]


def _by_uses(jacobian: Jacobian, by_case: Tensor, widths: list[int]) -> list[int]:
    """Writes J by the formula of linear maps; returns the numbers of the parameters that it does not hold for."""
    everything = list(range(len(jacobian.network.parameters)))
    left: set[int] = set()
    try:
        for rows in jacobian.chunks:
            left |= _write_uses(jacobian, rows, by_case[rows[0] : rows[-1] + 1], widths)
            if len(left) == len(everything):
                return everything
    except (*REFUSALS, AttributeError) as error:  # a model that does other things to its graph than to differentiate it
        if is_out_of_memory(error):
            raise
        return everything
    return sorted(left | _wrong(jacobian, by_case))


def _write_uses(jacobian: Jacobian, rows: Tensor, by_case: Tensor, widths: list[int]) -> set[int]:
    """`_by_uses` for some rows, of which there is one graph."""
    left: set[int] = set()
    uses = LinearUses()
    with uses:  # in backward passes too: checkpointing runs parts of the model again
        local = jacobian.restricted(rows)
        ((_, graph),) = local.graphs()
        if _widths(local, graph.outputs, len(rows)) != widths:
            raise ValueError("outputs have another shape on some of the rows")
        for k, cotangents in enumerate(_units(local, graph.outputs)):
            with uses.recorded():
                elsewhere = local.pull(graph, cotangents, graph.theta)
            for i, block in enumerate(_blocks(jacobian, by_case[:, k])):
                if elsewhere[i] is not None or not uses.write_rows(graph.theta[i], block):
                    left.add(i)
            if len(left) == len(graph.theta):
                break
    return left


def _wrong(jacobian: Jacobian, by_case: Tensor) -> set[int]:
    """The parameters by which J'u, for random u, is not what the backward pass of the model as it is says."""
    outputs = [z for z in leaves(jacobian.outputs) if z.is_floating_point()]
    source = generator(by_case.device, jacobian.rows)
    u = [torch.randn(z.shape, generator=source, dtype=z.dtype, device=z.device) for z in outputs]
    by_row = torch.cat([jacobian.axis(i).to_front(v).reshape(jacobian.rows, -1) for i, v in enumerate(u)], 1)
    expected = jacobian.vjp(u)
    found = by_row.reshape(-1).to(by_case.dtype) @ by_case.flatten(0, 1)
    eps = torch.finfo(by_case.dtype).eps
    noise = 32 * eps * expected.norm()
    pairs = zip(jacobian.network.shapes.split(found), jacobian.network.shapes.split(expected), strict=True)
    holds = [(f - e).norm() <= math.sqrt(eps) * e.norm() + noise for f, e in pairs]
    return {i for i, held in enumerate(torch.stack(holds).tolist()) if not held}


def _case_by_case(
    jacobian: Jacobian, by_case: Tensor, widths: list[int], wanted: list[int], *, separable: bool
) -> None:
    """The exact fallback: writes J by the wanted parameters from graphs of a few cases each, or of the whole batch where
    cases influence each other, if only by the length that outputs are padded to."""
    size = cases_at_once(jacobian, wanted)
    if separable and _through_own_graphs(jacobian, by_case, widths, wanted, size):
        return
    for chunk, graph in jacobian.graphs():
        for rows in even_chunks(len(chunk), size):
            _write_cases(jacobian, graph, by_case[chunk[0] :], rows, len(chunk), wanted)


def _through_own_graphs(jacobian: Jacobian, by_case: Tensor, widths: list[int], wanted: list[int], size: int) -> bool:
    for rows in even_chunks(jacobian.rows, size):
        local = jacobian.restricted(rows)
        ((numbers, graph),) = local.graphs()
        if _widths(local, graph.outputs, len(rows)) != widths:
            return False
        _write_cases(local, graph, by_case[rows[0] :], numbers, len(rows), wanted)
    return True


def _write_cases(
    jacobian: Jacobian,
    graph: Graph,
    by_case: Tensor,
    rows: Tensor,
    count: int,
    wanted: list[int],
) -> None:
    """J on consecutive ones of a graph's `count` rows, of which `by_case` begins with the first."""
    for k, cotangents in enumerate(_units(jacobian, graph.outputs)):
        blocks = _blocks(jacobian, by_case[rows[0] : rows[-1] + 1, k])
        for i, g in zip(wanted, pull_cases(jacobian, graph, cotangents, rows, count, wanted), strict=True):
            if g is None:
                blocks[i].zero_()
            else:
                blocks[i].copy_(g)
