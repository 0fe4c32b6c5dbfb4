"""Inputs and output gradients of layers, as the factors of the Kronecker preconditioner: passes over a recorded graph."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shf.model.jacobian import Graph, Jacobian
from shf.model.layersquares import Use, projections_agree
from shf.model.percase import CallAxes, layer_squares, sole_owners
from shf.preconditioners.factors import Block


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
    explained = [True] * len(blocks)
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
                use = None if g is None else _positions(block, known[i][0], g)
                matrix = gradient.reshape(block.outputs, -1)
                explained[i] = use is not None and projections_agree(use, matrix)
    assert total is not None
    return total, explained


def layer_sums(jacobian: Jacobian, roots: Sequence[Tensor], blocks: Sequence[Block]) -> list[Sums]:
    """Σ aa' and Σ gg' of layers that `explained_gradient` has found fit, g being the gradient of u'z for a root sample u."""
    totals: list[Sums] = []
    for _, graph, part in jacobian.graphs_with(roots):
        known = _single_calls(jacobian, graph, blocks)
        pulled = jacobian.pull(graph, part, [known[i][1] for i in range(len(blocks))])
        found = [_sums(block, known[i][0], g, part[0]) for i, (block, g) in enumerate(zip(blocks, pulled, strict=True))]
        totals = found if not totals else [_add(a, b) for a, b in zip(totals, found, strict=True)]
    return totals


def sampled_diagonal(
    jacobian: Jacobian, roots: Sequence[Tensor], axes: CallAxes | None, only: Collection[int]
) -> dict[int, Tensor]:
    """An unbiased estimate of some parameters' diagonal of J'L''J: Σ_j (J_j'u_j)² where a layer has a formula for it,
    and (Σ_j J_j'u_j)² where none has (cases are independent in ξ, so their products vanish in expectation)."""
    gradient, squares = layer_squares(jacobian, roots, axes=axes, only=only)
    found: dict[int, Tensor] = {}
    for i in sorted(only):
        square, g = squares[i], gradient[i]
        if square is None:
            assert g is not None
            square = g.square()
        found[i] = square
    return found


def _single_calls(jacobian: Jacobian, graph: Graph, blocks: Sequence[Block]) -> dict[int, tuple[Tensor, Tensor]]:
    """For each layer that was called once, on a dense tensor, the input and output of that call."""
    calls = sole_owners(jacobian.network.model, graph)
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


def _positions(block: Block, a: Tensor, g: Tensor) -> Use:
    """Input and output gradient of every position, (positions, …); the 1 of the bias is not there yet."""
    a, module = a.detach(), block.module
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        g = g.movedim(1, -1)
        a = _patches(module, a)
    return Use(a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1]))


def _patches(module: nn.Conv1d | nn.Conv2d, a: Tensor) -> Tensor:
    """What each position of a convolution sees, (rows, positions, channels · kernel): a sequence is an image of height 1."""

    def pair(values: Sequence[int], one: int) -> tuple[int, int]:
        return (one, values[0]) if len(values) == 1 else (values[0], values[1])

    a, padding = _padded(module, a)
    unfolded = F.unfold(
        a.unsqueeze(2) if isinstance(module, nn.Conv1d) else a,
        pair(module.kernel_size, 1),
        dilation=pair(module.dilation, 1),
        padding=pair(padding, 0),
        stride=pair(module.stride, 1),
    )
    return unfolded.transpose(1, 2)


def _padded(module: nn.Conv1d | nn.Conv2d, a: Tensor) -> tuple[Tensor, Sequence[int]]:
    """A convolution's input, and how many zeros still go on both ends of each axis; padding of another kind, or of two ends
    that differ, is added here as the layer itself does it."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return a, module.padding
    ends = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, ends, mode=mode), (0,) * len(module.kernel_size)


def _sums(block: Block, a: Tensor, g: Tensor | None, like: Tensor) -> Sums:
    if g is None:  # the layer's output does not reach the loss
        return Sums(like.new_zeros(block.inputs, block.inputs), like.new_zeros(block.outputs, block.outputs), 0)
    inputs, gradients = _positions(block, a, g)
    if block.bias is None:
        return Sums(inputs.t() @ inputs, gradients.t() @ gradients, len(inputs))
    outer = inputs.new_empty(block.inputs, block.inputs)
    torch.mm(inputs.t(), inputs, out=outer[:-1, :-1])
    outer[-1, :-1] = outer[:-1, -1] = inputs.sum(0)
    outer[-1, -1] = len(inputs)
    return Sums(outer, gradients.t() @ gradients, len(inputs))


def _add(a: Sums, b: Sums) -> Sums:
    return Sums(a.inputs + b.inputs, a.outputs + b.outputs, a.positions + b.positions)
