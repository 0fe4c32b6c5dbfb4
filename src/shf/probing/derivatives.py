"""Whether a model can be differentiated twice by its parameters, as products with J need it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from shf.data.batches import Batch
from shf.data.draws import Draws
from shf.model.convolution import is_own
from shf.model.jacobian import Jacobian
from shf.model.network import Network
from shf.model.secondgraph import graph_nodes

_NEAR = 1e-2
"""A relative difference that rounding makes, in the shortest formats too; a part that is missing makes a larger one."""


def refuse_single_derivatives_on(network: Network, batch: Batch, seed: int) -> None:
    """As `refuse_single_derivatives`, on a batch."""
    refuse_single_derivatives(Jacobian(network, batch, Draws(seed, batch.rows)))


def refuse_single_derivatives(jacobian: Jacobian) -> None:
    """Refuses a model of which J, by the second graph, is not the transpose of J': for g = J'u, u'Jg must be g'g.

    A function with a backward pass of its own that torch cannot look into (`once_differentiable`, numpy inside) is silently
    missing from the second graph. Models without functions of their own are not looked at any further.

    Raises:
        RuntimeError: it names a parameter whose part is missing.
    """
    ends = [z for _, graph in jacobian.graphs() for z in graph.outputs]
    if not any(map(_is_foreign, graph_nodes(ends))):
        return
    u = [torch.randn_like(z) for z in ends]
    g = jacobian.vjp(u)
    if _is_transposed(jacobian, u, g):
        return
    shapes, names = jacobian.network.shapes, jacobian.network.names
    for k, part in enumerate(shapes.split(g)):
        if not _is_transposed(jacobian, u, shapes.flatten([part if i == k else None for i in range(len(names))], g)):
            raise RuntimeError(
                f"the model's gradient by {names[k]} cannot be differentiated again, as curvature needs it: on the way from "
                "there to the outputs a torch.autograd.Function has a backward pass that torch does not see into "
                "(once_differentiable, numpy, a kernel of its own); write it with torch's operations"
            )


def _is_foreign(node: Node) -> bool:
    """Whether it is neither torch's own nor ours."""
    return (isinstance(node, BackwardCFunction) and not is_own(node)) or "CppNode" in node.name()


def _is_transposed(jacobian: Jacobian, u: Sequence[Tensor], g: Tensor) -> bool:
    """Whether u'Jg = g'g, for a g that is a part of J'u."""
    tangents, square = jacobian.jvp(g), torch.dot(g, g).item()
    along = sum(torch.sum(v * t).item() for v, t in zip(u, tangents, strict=True))
    size = math.sqrt(sum(torch.sum(v * v).item() for v in u) * sum(torch.sum(t * t).item() for t in tangents))
    return not abs(along - square) > _NEAR * max(size, square)
