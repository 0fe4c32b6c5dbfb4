"""What a model does with the rows of a batch, found by running it on two and on three of them.

Says where the rows lie in its outputs, in its random draws and in the inputs of its layers, and whether a row's output
depends on the other rows (batch statistics).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shf.data.batches import Batch
from shf.data.draws import Draws, mix
from shf.data.rows import RowAxis, infer_axis
from shf.data.tree import leaves
from shf.errors import AmbiguousRowsError
from shf.model.convolution import is_convolution
from shf.model.network import REFUSALS, Network
from shf.model.percase import CallAxes
from shf.model.recording import Calls
from shf.model.secondgraph import graph_nodes
from shf.probing.unzeroed import without_zeros
from shf.runtime.memory import is_out_of_memory

_TWO = torch.tensor([0, 1])
"""The first two of the three rows that a model is run on."""
_TWINS = (torch.tensor([0, 0]), torch.tensor([1, 1]))
"""Each of them beside itself."""


@dataclass(frozen=True)
class Layout:
    """How a model treats rows.

    Attributes:
        outputs: where the rows lie in each floating-point output.
        draws: where the rows lie in each random draw.
        calls: where the rows lie in the input of each call of a module with parameters.
        separable: each row's output depends on that row alone.
        obstacle: why the model cannot be run on some of the rows only; None if it can.
        conclusive: whether it says something about the model: of outputs that are not finite nothing can be told.
        ragged: whether rows may differ in size within the model, as packed sequences do.
    """

    outputs: Sequence[RowAxis | None]
    draws: Sequence[RowAxis | None]
    calls: CallAxes
    separable: bool
    obstacle: str | None = None
    conclusive: bool = True
    ragged: bool = False

    @property
    def cases(self) -> CallAxes | None:
        """Where formulas of layers find the cases of a batch; None where cases influence each other."""
        return self.calls if self.separable or (self.obstacle is not None and self.calls) else None


NO_ROWS = Layout([], [], {}, separable=True)
"""Of a process that holds no rows."""


def signature(network: Network, batch: Batch) -> object | None:
    """What a layout depends on. None if that cannot be told from the inputs, as with data that holds no tensors."""
    shapes = tuple((z.shape[1:] if z.shape[:1] == (batch.rows,) else z.shape, z.dtype) for z in leaves(batch.inputs))
    return (shapes, _kind(network)) if shapes else None


def _kind(network: Network) -> object:
    return network.attributes, tuple(network.names)


def few_rows(batch: Batch, layout: Layout) -> Batch:
    """Rows to look at a loss or at derivatives on: two, or all where the model cannot be run on some."""
    return batch if layout.obstacle is not None else batch.take(torch.arange(min(batch.rows, 2)))


@torch.no_grad()
def find_layout(network: Network, batch: Batch, seed: int, *, known: bool = False) -> Layout:
    """Runs the model on rows (i, j, i), (i, j), (i, i) and (j, j), with the same frozen draws, and compares; on the whole
    batch where it cannot be run on a few, unless that is `known` to be fine. Zeros among its parameters, which would hide
    what it does later, are replaced for that.

    Raises:
        RuntimeError: if the model gives different outputs for the same inputs, parameters and draws, hides its parameters
            from autograd, or runs under autocast.
    """
    try:
        one, other = _two_different_rows(batch)
        three, two = batch.take(torch.tensor([one, other, one])), batch.take(torch.tensor([one, other]))
        awake = without_zeros(network, three, seed)
        first = _attempt(awake, three, two, seed, minor=False)
    except AmbiguousRowsError as error:
        first = _refusal(f"{error}")
    except REFUSALS as error:
        if is_out_of_memory(error):
            raise
        first = _refusal(f"it fails on two of its rows ({type(error).__name__}: {error})")
    if first.obstacle is not None:
        if not known:
            _look_at_runs(without_zeros(network, batch, seed), batch, seed)
        return first
    _look_at_runs(awake, three, seed)
    if first.separable or not any(axis is not None and axis.fold > 1 for axis in first.draws):
        return first
    second = _attempt(awake, three, two, seed, minor=True)
    if second.separable:
        return second
    return _refusal("a random draw of the model folds rows and other things into one axis, in unknown order")


@torch.no_grad()
def draw_axes(network: Network, batch: Batch, layout: Layout, seed: int) -> Sequence[RowAxis | None]:
    """Where the rows lie in the random draws of passes with this seed, which may be others than those of the layout's.

    A number that is drawn for all rows at once may decide what is drawn after it: LayerDrop passes over layers with dropout.
    """
    if not any(axis is None for axis in layout.draws):
        return layout.draws
    one, other = _two_different_rows(batch)
    draws, values = Draws(seed, 3, minor=has_minor_draws(layout)), network.leaves()
    with draws.over():
        network(values, batch.take_inputs(torch.tensor([one, other, one])))
    with draws.over(_TWO):
        network(values, batch.take_inputs(torch.tensor([one, other])))
    return [draws.found.get(k) for k in range(len(draws.drawn))]


def has_minor_draws(layout: Layout) -> bool:
    """Whether folded axes of its draws have the rows last."""
    return any(axis is not None and axis.minor for axis in layout.draws)


def calls_along_rows(network: Network, batch: Batch, seed: int) -> CallAxes:
    """For a model that cannot be run on some rows: the calls of layers whose input has as many entries along axis 0 as the
    batch has rows, taken for these. What layers then make of single cases is right unless cases influence each other."""
    with torch.no_grad():
        _, calls = _recorded(network, batch, Draws(seed, batch.rows))
    return {
        module: [
            RowAxis(0) if c.input is not None and c.input.shape[:1] == (batch.rows,) else None for c in calls.of[module]
        ]
        for module in calls.of
    }


class LayoutMemory:
    """The last layout that was found; the model is looked at again only when its mode, another plain attribute or the shape
    of its inputs changes.

    An obstacle is not remembered: what made the model fail on some rows may have been of that moment (out of memory).
    Nor is what a single row shows, or outputs that are not finite: they do not say whether rows influence each other.
    """

    def __init__(self) -> None:
        self._known: tuple[object, Layout] | None = None
        self._fine: object | None = None  # mode and names of a network that was looked at as a whole

    def find(self, network: Network, batch: Batch, seed: int) -> Layout:
        key = signature(network, batch)
        if self._known is not None and key is not None and self._known[0] == key:
            return self._known[1]
        kind = _kind(network)
        layout = find_layout(network, batch, mix(seed, 2), known=kind == self._fine)
        self._fine = kind
        self._known = (key, layout) if layout.obstacle is None and layout.conclusive and batch.rows > 1 else None
        return layout


def batch_statistics(model: nn.Module) -> list[str]:
    """The names of modules that normalise by statistics of the batch in their present mode."""
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and (m.training or m.running_mean is None)
    ]


def _may_be_uneven(inputs: Any) -> bool:
    """Whether rows may have different sizes: packed sequences, or anything that is no tensor (trees, graphs, texts).

    Layers may then see parts of rows, and two rows of equal size would suggest an order that the others do not keep.
    """
    if isinstance(inputs, PackedSequence):
        return True
    if isinstance(inputs, Mapping):
        return any(map(_may_be_uneven, inputs.values()))
    if isinstance(inputs, tuple | list):
        return any(map(_may_be_uneven, inputs))
    return not isinstance(inputs, Tensor | int | float | None)


def _two_different_rows(batch: Batch) -> tuple[int, int]:
    """Row 0 and the first row whose inputs differ from it: equal rows would hide that they influence each other."""
    different = [
        (z != z[:1]).reshape(batch.rows, -1).any(1).cpu()  # inputs may lie on several devices
        for z in leaves(batch.inputs)
        if z.layout == torch.strided and z.ndim and len(z) == batch.rows and z.numel()
    ]
    if not different:
        return 0, min(1, batch.rows - 1)
    return 0, int(torch.stack(different).any(0).int().argmax()) or min(1, batch.rows - 1)


def _refusal(obstacle: str) -> Layout:
    return Layout([], [], {}, separable=False, obstacle=obstacle)


def _attempt(network: Network, three: Batch, two: Batch, seed: int, *, minor: bool) -> Layout:
    draws = Draws(seed, 3, minor=minor)
    whole, many = _recorded(network, three, draws)
    part, few = _recorded(network, two, draws, _TWO)
    uneven = _may_be_uneven(three.inputs)
    outputs = [_output_axis(z3, z2) for z3, z2 in zip(whole, part, strict=True)]
    separable = not batch_statistics(network.model) and all(
        _same(z2, z3 if axis is None else axis.take(z3, _TWO))
        for z3, z2, axis in zip(whole, part, outputs, strict=True)
    )
    conclusive = all(bool(z.isfinite().all()) for z in whole)
    if separable and conclusive:
        separable = all(_alone(network, three, draws, rows, whole, outputs) for rows in _TWINS)
    draw_axes = [draws.found.get(k) for k in range(len(draws.drawn))]
    if uneven and any(axis is not None and axis.fold > 1 for axis in draw_axes):
        raise AmbiguousRowsError("it draws numbers for parts of rows that differ in size: whose are whose is unknown")
    if uneven and any(axis is not None and axis.fold > 1 for axis in outputs):
        raise AmbiguousRowsError("its outputs are parts of rows that differ in size; pad them to (rows, …)")
    calls = {} if uneven else _call_axes(many, few)
    ragged = uneven or any(call.packed for found in many.of.values() for call in found)
    return Layout(outputs, draw_axes, calls, separable, conclusive=conclusive, ragged=ragged)


def _recorded(network: Network, batch: Batch, draws: Draws, rows: Tensor | None = None) -> tuple[list[Tensor], Calls]:
    """Outputs, and the calls of modules; once more where the model had to begin anew, with calls of both attempts."""
    while True:
        level = network.evaluation.level
        with Calls.recorded(network.holders) as calls, draws.over(rows):
            outputs = _run(network, batch.inputs)
        if network.evaluation.level == level:
            return outputs, calls


def _alone(
    network: Network, three: Batch, draws: Draws, rows: Tensor, whole: Sequence[Tensor], axes: Sequence[RowAxis | None]
) -> bool:
    """Whether a row beside itself has the outputs that it has beside the other: what the two have in common in both (their
    maximum, say, or the longer one's padding) hides between (i, j, i) and (i, j). Other shapes say nothing here."""
    with draws.over(rows):
        twins = _run(network, three.take_inputs(rows))
    expected = [z if axis is None else axis.take(z, rows) for z, axis in zip(whole, axes, strict=True)]
    return all(z.shape != e.shape or _same(z, e) for z, e in zip(twins, expected, strict=True))


def _output_axis(three: Tensor, two: Tensor) -> RowAxis | None:
    axis = infer_axis(three.shape, 3, two.shape, 2)
    if axis is not None and axis.fold > 1 and not _same(two, axis.take(three, _TWO)):
        return RowAxis(axis.axis, axis.fold, minor=True)
    return axis


def _call_axes(many: Calls, few: Calls) -> CallAxes:
    axes: CallAxes = {}
    for module, calls in many.of.items():
        others = few.of.get(module, [])
        if len(others) == len(calls):
            axes[module] = [_call_axis(a.input, b.input) for a, b in zip(calls, others, strict=True)]
    return axes


def _call_axis(three: Tensor | None, two: Tensor | None) -> RowAxis | None:
    """None also where it cannot be told: such a layer takes the exact fallback."""
    if three is None or two is None:
        return None
    try:
        axis = infer_axis(three.shape, 3, two.shape, 2)
    except AmbiguousRowsError:
        return None
    if axis is not None and axis.fold > 1:
        if three.layout != torch.strided or not _same(two, axis.take(three, _TWO)):
            axis = RowAxis(axis.axis, axis.fold, minor=True)
        if three.layout != torch.strided or not _same(two, axis.take(three, _TWO)):
            return None
    return axis


def _look_at_runs(network: Network, batch: Batch, seed: int) -> None:
    """Refuses blind spots and randomness from elsewhere, and finds out how evaluations are to be run: two runs that agree,
    with gradients and without, leave nothing to ask."""
    expected = refuse_blind_spots(network, batch, seed)
    if not _agree(_drawn_run(network, batch, seed), expected):
        _refuse_other_randomness(network, batch, seed)
        _evaluate_alike(network, batch, seed, expected)


def _refuse_other_randomness(network: Network, batch: Batch, seed: int) -> None:
    """Two runs with the same draws must agree; if they do not, the first module whose output differs is named."""
    if _agree(_drawn_run(network, batch, seed), _drawn_run(network, batch, seed)):
        return
    names = {m: f"{name or 'the model'} ({type(m).__name__})" for name, m in network.model.named_modules()}
    outputs: list[list[tuple[str, list[Tensor]]]] = []
    for _ in range(2):
        seen: list[tuple[str, list[Tensor]]] = []

        def hook(module: nn.Module, args: Any, output: Any, seen: list[tuple[str, list[Tensor]]] = seen) -> None:
            seen.append((names.get(module, type(module).__name__), [z.clone() for z in _floating(output)]))

        with ExitStack() as hooks, Draws(seed, batch.rows).over():
            for m in network.model.modules():
                hooks.enter_context(m.register_forward_hook(hook))
            _run(network, batch.inputs)
        outputs.append(seen)
    differ = (
        name
        for (name, first), (_, second) in zip(*outputs, strict=False)
        if any(not _same(a, b) for a, b in zip(first, second, strict=False))
    )
    raise RuntimeError(
        f"{next(differ, 'the model')} gives different outputs for the same inputs, parameters and torch draws: randomness "
        "from outside of torch (random, numpy) or a hidden state. Every evaluation in a step must see the same network; "
        "draw through torch, or put the module in eval mode"
    )


def _evaluate_alike(network: Network, batch: Batch, seed: int, expected: Sequence[Tensor]) -> None:
    """Makes sure that the model without gradients is the model with them, for the evaluations of a step to see what its
    gradient saw: one that asks torch whether there are gradients is run with them."""
    while network.evaluation.level < network.evaluation.MOST:
        if _agree(_drawn_run(network, batch, seed), expected):
            return
        network.evaluation.level += 1


def refuse_blind_spots(network: Network, batch: Batch, seed: int) -> list[Tensor]:
    """Refuses what a step would not see: parameters inside of reentrant checkpoints, or used by another reference than the
    module's own, would silently count as having no influence; autocast inside of `forward` would make curvature noise.
    Returns the model's outputs."""

    def look(module: nn.Module, args: Any) -> None:
        if torch.is_autocast_enabled(network.device.type):
            raise RuntimeError(
                f"{type(module).__name__} runs under autocast, which is switched on inside the model's forward: SHF needs "
                "full precision, where curvature is not noise; leave it out (with Accelerate: mixed_precision='no')"
            )

    with ExitStack() as hooks, torch.enable_grad(), Draws(seed, batch.rows).over():
        for m in network.model.modules():
            hooks.enter_context(m.register_forward_pre_hook(look))
        outputs = network(network.leaves(), batch.inputs)
    own = {id(p): name for p, name in zip(network.parameters, network.names, strict=True)}
    for node in graph_nodes(_floating(outputs)):
        network.evaluation.convolves |= is_convolution(node)
        if node.name() == "CheckpointFunctionBackward":
            raise RuntimeError(
                "the model uses reentrant gradient checkpointing, which cannot be differentiated by autograd.grad; "
                "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if (name := own.get(id(getattr(node, "variable", None)))) is not None:
            raise RuntimeError(
                f"the model uses parameter {name} by a reference of its own (in a list, a closure or a plain attribute), "
                "where a step cannot put trial values; use it through the module that holds it"
            )
    return [z.detach() for z in _floating(outputs)]


def _drawn_run(network: Network, batch: Batch, seed: int) -> list[Tensor]:
    """As `_run`, with the draws of this seed."""
    with Draws(seed, batch.rows).over():
        return _run(network, batch.inputs)


def _run(network: Network, inputs: Any) -> list[Tensor]:
    """The model's floating-point outputs at its present parameters."""
    return _floating(network(network.leaves(), inputs))


def _floating(outputs: Any) -> list[Tensor]:
    return [z for z in leaves(outputs) if z.is_floating_point() and z.layout == torch.strided]


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_same, found, expected))


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding (a batch of another size may be summed in another order)."""
    if a.shape != b.shape:
        return False
    finite = torch.cat([a[a.isfinite()], b[b.isfinite()]])
    size = finite.abs().max().item() if finite.numel() else 0.0
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)
