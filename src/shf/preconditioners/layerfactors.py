"""Inputs and output gradients of layers, as the factors of the Kronecker preconditioner: passes over a recorded graph."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shf.model.jacobian import Graph, Jacobian
from shf.model.layersquares import Comparison, agree, probe, projects_to
from shf.model.percase import CallAxes, Found, sole_owners, squares_by_layers
from shf.preconditioners.factors import Block
from shf.preconditioners.patches import project_patches, sum_patches

_BLOCKS, _LEAST = 4, 64
"""Into how many blocks of columns a matrix x'x is divided, and the least columns that are worth one."""


class Sums(NamedTuple):
    """Over the positions of one layer (rows, and places within them): Σ aa', Σ gg', and their number."""

    inputs: Tensor
    outputs: Tensor
    positions: int


def explained_gradient(
    jacobian: Jacobian, cotangents: Sequence[Tensor], blocks: Sequence[Block]
) -> tuple[Tensor, list[bool]]:
    """J'u, and for each layer whether Σ_j g_j a_j' is all of its weight's gradient.

    It is not where the layer was used several times, its weight also elsewhere, or its output was overwritten: then factors
    of this one use would not describe it.
    """
    shapes, theta = jacobian.network.shapes, len(jacobian.network.parameters)
    total: Tensor | None = None
    explained, compared = [True] * len(blocks), []
    for _, graph, part in jacobian.graphs_with(cotangents):
        known = _single_calls(jacobian, graph, blocks)
        pulled = jacobian.pull(graph, part, [*graph.theta, *(call for _, call in known.values())])
        flat = shapes.flatten(pulled[:theta], graph.theta[0])
        total = flat if total is None else total.add_(flat)
        gradients = dict(zip(known, pulled[theta:], strict=True))
        for i, block in enumerate(blocks):
            g, gradient = gradients.get(i), pulled[block.weight]
            explained[i] = explained[i] and i in known
            if explained[i] and gradient is not None:
                explained[i] = g is not None
                compared += [] if g is None else [(i, _comparison(block, known[i][0], g, gradient))]
    for (i, _), held in zip(compared, agree([numbers for _, numbers in compared]), strict=True):
        explained[i] = explained[i] and held
    assert total is not None
    return total, explained


def layer_sums(
    jacobian: Jacobian, roots: Sequence[Tensor], axes: CallAxes | None, blocks: Sequence[Block], others: Collection[int]
) -> tuple[list[Sums], dict[int, Tensor]]:
    """For a root sample u, from one backward pass: Σ aa' and Σ gg' of layers that `explained_gradient` has found fit, g
    being the gradient of u'z; and an unbiased estimate of the diagonal of J'L''J for other parameters.

    That is Σ_j (J_j'u_j)² where a layer has a formula for it, and (Σ_j J_j'u_j)² where none has: cases are independent in ξ,
    so their products vanish in expectation.
    """
    totals: list[Sums] = []
    found: Found | None = None
    for rows, graph, part in jacobian.graphs_with(roots):
        known = _single_calls(jacobian, graph, blocks)
        calls = [known[i] for i in range(len(blocks))]
        here, pulled = squares_by_layers(jacobian, graph, part, axes or {}, len(rows), others, [z for _, z in calls])
        sums = [_sums(block, a, g, part[0]) for block, (a, _), g in zip(blocks, calls, pulled, strict=True)]
        totals = [_add(*pair) for pair in zip(totals, sums, strict=True)] if totals else sums
        found = here if found is None else found.plus(here)
        graph.calls.of.clear()
    assert found is not None
    return totals, {i: _diagonal(found.gradient[i], found.squares[i]) for i in sorted(others)}


def _diagonal(gradient: Tensor | None, squares: Tensor | None) -> Tensor:
    if squares is not None:
        return squares
    assert gradient is not None
    return gradient.square()


def _single_calls(jacobian: Jacobian, graph: Graph, blocks: Sequence[Block]) -> dict[int, tuple[Tensor, Tensor]]:
    """For each layer that was called once, on a dense tensor, the input and output of that call."""
    calls = sole_owners(jacobian.network, graph)
    known = {}
    for i, block in enumerate(blocks):
        uses = calls.get(block.module, [])
        if len(uses) != 1:
            continue
        a, z = uses[0].input, uses[0].output
        if a is not None and z is not None and a.layout == torch.strided and z.requires_grad and _batched(block, a):
            known[i] = (a, z)
    return known


def _batched(block: Block, a: Tensor) -> bool:
    """Whether a convolution's input has a batch axis, (rows, channels, …) as its weight is (outputs, channels, …); a linear
    layer takes any."""
    return not isinstance(block.module, nn.Conv1d | nn.Conv2d) or a.ndim == block.module.weight.ndim


def _comparison(block: Block, a: Tensor, g: Tensor, gradient: Tensor) -> Comparison:
    """Of Σ_j g_j a_j' over one call with the weight's gradient, seen through one projection."""
    matrix = gradient.reshape(block.outputs, -1)
    left, right = probe(block.outputs, g), probe(matrix.shape[1], g)
    if isinstance(block.module, nn.Conv1d | nn.Conv2d):
        terms = project_patches(block.module, a.detach(), right) * (left @ g.flatten(2))
    else:
        terms = (a.detach() @ right) * (g @ left)
    return projects_to(terms, lambda G: left @ (G @ right))(matrix)


def _sums(block: Block, a: Tensor, g: Tensor | None, like: Tensor) -> Sums:
    if g is None:  # the layer's output does not reach the loss
        return Sums(like.new_zeros(block.inputs, block.inputs), like.new_zeros(block.outputs, block.outputs), 0)
    if isinstance(block.module, nn.Conv1d | nn.Conv2d):
        outer, total, positions = sum_patches(block.module, a.detach())
        g = g.transpose(0, 1).reshape(block.outputs, -1).t()
    else:
        inputs = a.detach().reshape(-1, a.shape[-1])
        outer, total, positions, g = _outer(inputs), inputs.sum(0), len(inputs), g.reshape(-1, block.outputs)
    if block.bias is not None:
        column = torch.cat([total, total.new_full((1,), positions)])
        outer = torch.cat([torch.cat([outer, total[None]]), column[:, None]], 1)
    return Sums(outer, _outer(g), positions)


def _outer(x: Tensor) -> Tensor:
    """x'x, of which one triangle is multiplied out, in blocks."""
    size = max(_LEAST, -(-x.shape[1] // _BLOCKS))
    found = x.new_empty(x.shape[1], x.shape[1])
    for i in range(0, x.shape[1], size):
        block = found[i : i + size, i:]
        torch.mm(x[:, i : i + size].t(), x[:, i:], out=block)
        found[i + size :, i : i + size] = block[:, size:].t()
    return found


def _add(a: Sums, b: Sums) -> Sums:
    return Sums(a.inputs + b.inputs, a.outputs + b.outputs, a.positions + b.positions)
