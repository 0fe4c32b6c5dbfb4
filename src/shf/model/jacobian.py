"""J = ∂z/∂θ of a network's outputs on the rows of one batch: products with J and its transpose.

The forward graph is built once. For Jv a second graph is kept: the backward pass from a cotangent u, u ↦ J'u. It is
linear in u, so differentiating v'(J'u) by u gives Jv: one backward pass through the second graph. With the graphs kept, a
product with J or J' costs what its matrix products cost, for any module. Any u makes it: where products are known to
follow, a gradient's own backward pass leaves the second graph behind.

With `microbatch` the rows are taken in chunks and graphs are rebuilt for each chunk of each product: memory is bounded by
one chunk's graph, and the results are the same, because outputs are joined before the loss sees them.

Tensors inside the model that are to be held steady (`shf.hold_steady`) are further ends of the same graphs: J_h = ∂h/∂θ
comes with J in the same passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shf.data.batches import Batch
from shf.data.draws import Draws, watched_draws
from shf.data.rows import RowAxis, even_chunks, join_outputs
from shf.data.tree import leaves, map_leaves
from shf.model.network import Network
from shf.model.recording import Calls
from shf.model.secondgraph import cotangent
from shf.model.steady import named_tensors


@dataclass
class Graph:
    """The forward graph of some rows, and the graph of its backward pass once Jv has been asked for.

    Attributes:
        size: entries of the inputs.
        outputs: z, the model's floating-point outputs.
        steady: h, the tensors to be held steady, where they were asked for.
        cotangents: u: where the second graph begins; for each output, then for each steady tensor.
        pullback: where it ends, J'u for each parameter; None for those without influence.
    """

    rows: Tensor | None
    size: int
    theta: list[Tensor]
    outputs: list[Tensor]
    steady: list[Tensor]
    calls: Calls
    cotangents: list[Tensor] = field(default_factory=list)
    pullback: list[GradientEdge | None] = field(default_factory=list)

    @property
    def ends(self) -> list[Tensor]:
        return [*self.outputs, *self.steady]


class Jacobian:
    """J at the network's present parameters, on the rows of a batch.

    Args:
        network: F.
        batch: the whole batch of the step.
        draws: this step's random numbers.
        rows: the rows of the batch that J is about; None means all.
        microbatch: the most rows in memory at once; None means no bound.
        axes: where rows lie in each floating-point output; along axis 0 where nothing is said.
        record: whether calls of modules are recorded on the way (for per-case gradients).
        steady: whether J_h of the tensors to be held steady is wanted too.
        products: whether Jv will be asked for: then the first J'u by all parameters keeps the second graph.
        squares: whether that pass serves per-case squares, which need much memory by themselves: it then keeps no second
            graph but one that is known to be small.

    Attributes:
        outputs: the model's outputs, detached, in the model's own structure.
        buffers: the module's buffers as the forward pass left them.
        chunks: the numbers of the rows (within this J) that are in memory at once.
    """

    def __init__(
        self,
        network: Network,
        batch: Batch,
        draws: Draws,
        *,
        rows: Tensor | None = None,
        microbatch: int | None = None,
        axes: Sequence[RowAxis | None] = (),
        record: bool = False,
        steady: bool = False,
        products: bool = False,
        squares: bool = False,
    ) -> None:
        self.network = network
        self.draws = draws
        self.buffers = network.buffers()
        self.rows = batch.rows if rows is None else len(rows)
        self._batch = batch
        self._some = rows
        self._axes = axes
        self._record = record
        self._steady = steady
        self._products, self._squares = products, squares
        self.chunks = even_chunks(self.rows, microbatch) if microbatch else [torch.arange(self.rows)]
        self._kept: Graph | None = None
        if len(self.chunks) == 1:
            self._kept, self.outputs = self._forward(self.chunks[0], self.buffers)
        else:
            # Buffers change once per step: by the pass over the first chunk.
            first, *others = self.chunks
            parts = [self._forward(first, self.buffers, graph=False)[1]]
            parts += [self._forward(chunk, graph=False)[1] for chunk in others]
            self.outputs = join_outputs(parts, self._axes)
        self._before = network.changed(self.buffers)

    def vjp(
        self, cotangents: Sequence[Tensor], steady: Sequence[Sequence[Tensor]] = (), out: Tensor | None = None
    ) -> Tensor:
        """J'u, flat; with cotangents of the steady tensors (as `push` gives tangents) J'u + J_h'w."""
        total: Tensor | None = None
        for number, (_, graph, part) in enumerate(self.graphs_with(cotangents)):
            pulled = self.pull(graph, [*part, *(steady[number] if steady else ())], graph.theta)
            flat = self.network.shapes.flatten(pulled, graph.theta[0], out=out if total is None else None)
            total = flat if total is None else total.add_(flat)
        assert total is not None
        return total

    def jvp(self, vector: Tensor) -> list[Tensor]:
        """Jv, a tensor per output."""
        return self.push(vector)[0]

    def push(self, vector: Tensor) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Jv, a tensor per output, and J_h v: for each chunk of rows a tensor per steady one."""
        tangents, steady = [], []
        for _, graph in self.graphs():
            if not graph.pullback and any(z.requires_grad for z in graph.ends):
                self.pull(graph, [], graph.theta)
            found = self._push(graph, vector)
            tangents.append(found[: len(graph.outputs)])
            steady.append(found[len(graph.outputs) :])
        if len(tangents) == 1:
            return tangents[0], steady
        return [self._join(index, parts) for index, parts in enumerate(zip(*tangents, strict=True))], steady

    def graphs_with(self, cotangents: Sequence[Tensor]) -> Iterator[tuple[Tensor, Graph, list[Tensor]]]:
        """Each chunk's rows (within this J), its graph and its share of the cotangents."""
        for chunk, graph in self.graphs():
            yield chunk, graph, self._part(cotangents, chunk)

    def cotangents_of(self, cotangents: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        """The given rows' share of the cotangents."""
        return [u if self.is_idle(i, u) else self.axis(i).take(u, rows) for i, u in enumerate(cotangents)]

    def restricted(self, rows: Tensor) -> "Jacobian":
        """J on some of these rows, with a graph of its own."""
        return Jacobian(self.network, self._batch, self.draws, rows=self._of_batch(rows), axes=self._axes)

    def _of_batch(self, rows: Tensor) -> Tensor:
        """Their numbers in the batch."""
        return rows if self._some is None else self._some[rows]

    def is_idle(self, index: int, cotangent: Tensor) -> bool:
        """Whether output number `index` is shared by all rows and the loss does not look at it: its cotangent is zero, for
        whichever of the rows."""
        return self._axis(index) is None and not bool(cotangent.any())

    def axis(self, index: int) -> RowAxis:
        """Where the rows lie in output number `index`."""
        found = self._axis(index)
        if found is None:
            raise ValueError(
                f"output number {index} of the model is shared by all rows, where one for each row is needed: return it "
                "once per row, leave it out (forward=lambda model, inputs: ...), or use preconditioner=None, "
                "microbatch=None, noise_every=None and cg_noise=None"
            )
        return found

    def _axis(self, index: int) -> RowAxis | None:
        return self._axes[index] if index < len(self._axes) else RowAxis(0)

    def _join(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """An output's tangents of all chunks; what is shared by all rows has the same in each."""
        axis = self._axis(index)
        return parts[0] if axis is None else axis.cat(parts)

    def _forward(
        self, chunk: Tensor, buffers: dict[str, Tensor] | None = None, *, graph: bool = True
    ) -> tuple[Graph, Any]:
        rows = self._some if len(chunk) == self.rows else self._of_batch(chunk)
        if self.network.draws_nothing and not self.draws.drawn:
            with watched_draws() as drew:
                made = self._run(rows, buffers, graph=graph)
            if not drew():
                return made
            if buffers is not None:
                buffers.update(self.network.buffers())
        with self.draws.over(rows):
            made = self._run(rows, buffers, graph=graph)
        self.network.draws_nothing = not self.draws.drawn and self.network.device.type == "cpu"
        return made

    def _run(self, rows: Tensor | None, buffers: dict[str, Tensor] | None, *, graph: bool) -> tuple[Graph, Any]:
        theta = self.network.leaves()
        inputs = self._batch.take_inputs(rows)
        recorded = Calls.recorded(self.network.holders if self._record and graph else ())
        named = named_tensors(enabled=self._steady and graph)
        with torch.set_grad_enabled(graph), recorded as calls, named as steady:
            outputs = self.network(theta, inputs, buffers)
        if self._steady and graph and not steady.tensors:
            raise ValueError(
                "structural_damping > 0, but the model named no tensor to hold steady: call shf.hold_steady(h) on hidden "
                "states in forward, or use structural_damping=0"
            )
        floating = [z for z in leaves(outputs) if z.is_floating_point()]
        size = sum(t.numel() for t in leaves(inputs))
        return Graph(rows, size, theta, floating, steady.intact(), calls), map_leaves(Tensor.detach, outputs)

    def graphs(self) -> Iterator[tuple[Tensor, Graph]]:
        """Each chunk's rows (within this J) and its graph."""
        if self._kept is not None:
            yield self.chunks[0], self._kept
            return
        for chunk in self.chunks:
            yield chunk, self._forward(chunk)[0]

    def pull(
        self,
        graph: Graph,
        cotangents: Sequence[Tensor],
        by: Sequence[Tensor | GradientEdge],
        *,
        batched: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """The gradient of u'z by any tensors of one graph; outputs that do not depend on θ are left out.

        Cotangents are those of the outputs, and those of the steady tensors if there are more; without any, zeros stand for
        them, and the second graph is what is wanted.

        If `batched`, cotangents carry an axis in front, and so do the gradients: several pullbacks at once.
        """
        keep = not batched and self._keeps(graph, cotangents, by)
        given = self._begun(graph, cotangents) if keep else cotangents
        pairs = [(z, u) for z, u in zip(graph.ends, given, strict=False) if z.requires_grad]
        if not pairs:
            raise ValueError(
                "the model's outputs do not depend on any of the parameters to train: nothing to optimise "
                "(are they detached, or made under no_grad?)"
            )
        ends, along = [z for z, _ in pairs], [u for _, u in pairs]
        zeros = self.network.zeros.left_out(graph.size, ends if cotangents else ()) if keep else nullcontext()
        with zeros, self._as_before(graph):
            found = torch.autograd.grad(
                ends,
                by,  # type: ignore[arg-type]
                along,
                retain_graph=True,
                create_graph=keep,
                allow_unused=True,
                is_grads_batched=batched,
            )
        return self._ended(graph, found) if keep else found

    def _keeps(self, graph: Graph, cotangents: Sequence[Tensor], by: Sequence[Tensor | GradientEdge]) -> bool:
        """Whether a pass leaves the second graph behind: once, and where it is by θ and what follows it."""
        if graph.pullback or not cotangents:
            return not graph.pullback
        wanted = self._products and graph is self._kept
        wanted = wanted and (not self._squares or self.network.zeros.are_few(graph.size))
        return wanted and len(by) >= len(graph.theta) and all(map(is_, graph.theta, by))

    def _begun(self, graph: Graph, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Where the second graph begins; cotangents that are not given are zero."""
        graph.cotangents = [cotangent(u, z) for u, z in zip(cotangents, graph.ends, strict=False)]
        graph.cotangents += [torch.zeros_like(z, requires_grad=True) for z in graph.ends[len(cotangents) :]]
        return graph.cotangents

    def _ended(self, graph: Graph, found: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """What a pass has found, apart from the second graph, of which it notes the end."""
        pulled = found[: len(graph.theta)]
        graph.pullback = [None if g is None or not g.requires_grad else get_gradient_edge(g) for g in pulled]
        return tuple([None if g is None else g.detach() for g in found])

    def _push(self, graph: Graph, vector: Tensor) -> list[Tensor]:
        pieces = self.network.shapes.split(vector)
        terms = [(edge, v) for edge, v in zip(graph.pullback, pieces, strict=False) if edge is not None]
        if not terms:
            return [torch.zeros_like(z) for z in graph.ends]
        edges, given = [edge for edge, _ in terms], [v for _, v in terms]
        with self._as_before(graph):
            found = torch.autograd.grad(edges, graph.cotangents, given, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(z) if t is None else t for t, z in zip(found, graph.ends, strict=True)]

    def _as_before(self, graph: Graph) -> AbstractContextManager[None]:
        """Around a backward pass: parts of the model that checkpoints run again see what they saw in the forward pass."""
        if not self.draws.drawn and not self._before and self.network.needs_nothing_around:
            return nullcontext()
        return self._repeating(graph)

    @contextmanager
    def _repeating(self, graph: Graph) -> Iterator[None]:
        with self.draws.resumed(graph.rows), self.network.around(graph.theta, self._before):
            yield

    def _part(self, cotangents: Sequence[Tensor], chunk: Tensor) -> list[Tensor]:
        if len(chunk) == self.rows:
            return list(cotangents)
        return self.cotangents_of(cotangents, chunk)
