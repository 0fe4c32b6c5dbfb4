"""The Kronecker preconditioner from step to step: running averages of its factors, renewed and inverted on a schedule.

A renewal costs a backward pass, the sums over positions and the inversions. How often it is done follows from counting
multiplications, not from a clock: runs repeat exactly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shf.distributed.collective import Collective
from shf.errors import NonFiniteError
from shf.linear.cg import LinearMap
from shf.linear.flat import all_finite
from shf.model.network import Network
from shf.preconditioners.factors import Block, Factors, Inverse, find_blocks, invert
from shf.preconditioners.layerfactors import Sums
from shf.problems.decay import Decay
from shf.state import OptimizerState, forget_others, recall, remember

_SHARE = 0.2
"""Of a step's multiplications that renewals may take, on average."""
_INPUT, _OUTPUT, _DIAGONAL = "input_factor", "output_factor", "diagonal"
FACTORS = (_INPUT, _OUTPUT, _DIAGONAL)
"""Their names in the optimizer's state."""
_COUNT, _DUE, _DAMPING = "factor_renewals", "factors_due", "factor_damping"
FACTOR_NUMBERS = (_COUNT, _DUE, _DAMPING)
"""The names of what goes with them among the optimizer's numbers."""


@dataclass(frozen=True)
class Schedule:
    """How factors are renewed.

    Attributes:
        average: the most of the old factors that a renewal keeps; the n-th keeps 1 - 1/n of them if that is less.
        every: steps from one renewal to the next; None for as many as keep renewals to a fifth of the work.
        cg_iterations: ζ, and
        curvature_share: the part of the rows that products are over: what a step costs.
    """

    average: float
    every: int | None
    cg_iterations: int
    curvature_share: float = 1.0

    def period(self, blocks: Sequence[Block], positions: Sequence[float], *, others: bool) -> int:
        """Steps from a renewal to the next, by multiplications; `others` if there are parameters outside of blocks."""
        if self.every is not None:
            return self.every
        step = renewal = 1.0
        applications = self.cg_iterations + 1
        for block, n in zip(blocks, positions, strict=True):
            d, e = block.inputs, block.outputs
            # a gradient is three products of n × d × e, an evaluation one, a product with B four
            step += n * d * e * (3 + applications * (1 + 4 * self.curvature_share)) + applications * d * e * (d + e)
            # inversions run slower than products, by about three times
            renewal += n * (d * d + e * e) + n * d * e * (4 if others else 2) + 3 * (d**3 + e**3)
        return max(1, math.ceil(renewal / (_SHARE * step)))


class FactorMemory:
    """The factors between steps. They lie in the optimizer's state, parameter by parameter, as torch saves and loads it;
    their inverses lie here and are made again where they are missing: they are a function of what is saved."""

    def __init__(self) -> None:
        self._known: tuple[list[Tensor], tuple[float, ...], Inverse] | None = None

    def read(self, network: Network, state: OptimizerState) -> Factors | None:
        """The running averages; None before the first renewal, or where a parameter has joined since."""
        entries = _entries(network, state)
        blocks = [b for b in find_blocks(network) if _shape(entries[b.weight]) == (b.inputs, b.outputs)]
        covered = {i for b in blocks for i in b.members}
        others = [i for i in range(len(entries)) if i not in covered]
        if any(_DIAGONAL not in entries[i] for i in others):
            return None
        pairs = [(entries[b.weight][_INPUT], entries[b.weight][_OUTPUT]) for b in blocks]
        return Factors(blocks, pairs, {i: entries[i][_DIAGONAL] for i in others})

    def inverse(self, factors: Factors, damping: float, decay: Decay) -> Inverse:
        tensors, numbers = factors.tensors(), (damping, *decay.weights)
        if self._known is not None:
            same = len(self._known[0]) == len(tensors) and all(map(is_, self._known[0], tensors))
            if same and self._known[1] == numbers:
                return self._known[2]
        inverse = invert(factors, damping, decay)
        self.know(factors, damping, decay, inverse)
        return inverse

    def know(self, factors: Factors, damping: float, decay: Decay, inverse: Inverse) -> None:
        self._known = (factors.tensors(), (damping, *decay.weights), inverse)


@dataclass
class Renewal:
    """The Kronecker preconditioner of one step.

    Args:
        memory: of the optimizer.
        network: with its present parameters.
        state: the optimizer's; it is read here and written by `write`.
        scalars: the optimizer's numbers: how many renewals there were, when the next is due, λ at the last.
        iteration: number of the step.
        schedule: when to renew.
    """

    memory: FactorMemory
    network: Network
    state: OptimizerState
    scalars: dict[str, Any]
    iteration: int
    schedule: Schedule

    def __post_init__(self) -> None:
        self._factors = self.memory.read(self.network, self.state)
        self._numbers = {name: self.scalars.get(name) for name in FACTOR_NUMBERS}
        due, known = self._numbers[_DUE], self._numbers[_DAMPING]
        self.due = self._factors is None or due is None or known is None or self.iteration >= due
        self.blocks = find_blocks(self.network) if self.due else []

    def renew(
        self,
        damping: float,
        decay: Decay,
        ranks: Collective,
        explained: Sequence[bool],
        own: Callable[[Sequence[Block], Sequence[int]], tuple[Sequence[Sums], dict[int, Tensor]]],
    ) -> None:
        """New running averages and their inverses; each process makes its part of both.

        Args:
            damping: λ.
            decay: w.
            ranks: the processes that hold rows.
            explained: for each of `blocks`, whether its factors would describe it on this process's rows.
            own: sums over this process's positions, of given blocks, and diagonals of given other parameters.
        """
        unexplained = ranks.add(lambda: [float(not e) for e in explained], len(explained)) if explained else []
        blocks = [b for b, n in zip(self.blocks, unexplained, strict=True) if n == 0]
        covered = {i for b in blocks for i in b.members}
        others = [i for i in range(len(self.network.parameters)) if i not in covered]
        fresh, positions = _summed(self.network, ranks, blocks, others, own)
        count = int(self._numbers[_COUNT] or 0) + 1
        self._factors = self._averaged(fresh, min(1 - 1 / count, self.schedule.average))
        period = self.schedule.period(blocks, positions, others=bool(others))
        self._numbers = {_COUNT: count, _DUE: self.iteration + period, _DAMPING: damping}
        self.memory.know(self._factors, damping, decay, _shared_inverse(self._factors, damping, decay, ranks))

    def solver(self, decay: Decay, ranks: Collective) -> LinearMap:
        """r ↦ P⁻¹r, the same throughout the step, on this process's part of vectors."""
        assert self._factors is not None
        solve = self.memory.inverse(self._factors, float(self._numbers[_DAMPING] or 0.0), decay).solver(self.network)
        if not ranks.split:
            return solve
        size = self.network.shapes.total
        return lambda r: ranks.own(solve(ranks.whole(r, size)))

    def write(self) -> dict[str, Any]:
        """Puts the averages into the optimizer's state; the numbers that go with them are the caller's to keep."""
        assert self._factors is not None
        found: dict[int, dict[str, Tensor]] = {i: {_DIAGONAL: d} for i, d in self._factors.diagonals.items()}
        for block, (a, g) in zip(self._factors.blocks, self._factors.pairs, strict=True):
            found[block.weight] = {_INPUT: a, _OUTPUT: g}
        for i, p in enumerate(self.network.parameters):
            remember(self.state, p, **dict.fromkeys(FACTORS) | found.get(i, {}))
        for name in FACTORS:
            forget_others(self.network, self.state, name)
        return self._numbers

    def _averaged(self, fresh: Factors, keep: float) -> Factors:
        """keep · old + (1 - keep) · new, where there is an old one."""
        entries = _entries(self.network, self.state)

        def mean(new: Tensor, old: Tensor | None) -> Tensor:
            return new if old is None or old.shape != new.shape else torch.lerp(new, old, keep)

        pairs = [
            (mean(a, entries[b.weight].get(_INPUT)), mean(g, entries[b.weight].get(_OUTPUT)))
            for b, (a, g) in zip(fresh.blocks, fresh.pairs, strict=True)
        ]
        diagonals = {i: mean(d, entries[i].get(_DIAGONAL)) for i, d in fresh.diagonals.items()}
        return Factors(fresh.blocks, pairs, diagonals)


def _summed(
    network: Network,
    ranks: Collective,
    blocks: Sequence[Block],
    others: Sequence[int],
    own: Callable[[Sequence[Block], Sequence[int]], tuple[Sequence[Sums], dict[int, Tensor]]],
) -> tuple[Factors, list[float]]:
    """Factors from everyone's sums, in one message, and the number of positions of each block."""
    like = network.parameters[0].detach()
    sizes = [n for b in blocks for n in (b.inputs**2, b.outputs**2, 1)] + [network.shapes.sizes[i] for i in others]

    def part() -> Tensor:
        sums, diagonals = own(blocks, others)
        pieces = [
            t for s in sums for t in (s.inputs.reshape(-1), s.outputs.reshape(-1), like.new_tensor([s.positions]))
        ]
        return torch.cat([*pieces, *(diagonals[i].reshape(-1) for i in others)])

    total = ranks.whole(ranks.sum(part, like.new_empty(sum(sizes))), sum(sizes))
    if not all_finite(total):
        raise NonFiniteError("the factors of the Kronecker preconditioner are not finite at the present parameters")
    pieces = list(total.split(sizes))
    pairs, positions = [], []
    for k, block in enumerate(blocks):
        a, g, n = pieces[3 * k : 3 * k + 3]
        positions.append(n.item())
        pairs.append((a.view(block.inputs, -1) / n.clamp_min(1), g.view(block.outputs, -1).clone()))
    rest = pieces[3 * len(blocks) :]
    diagonals = {i: d.view(network.shapes.shapes[i]).clone() for i, d in zip(others, rest, strict=True)}
    return Factors(blocks, pairs, diagonals), positions


def _shared_inverse(factors: Factors, damping: float, decay: Decay, ranks: Collective) -> Inverse:
    """The inverse, each process having made some blocks of it."""
    if not ranks.several or not factors.blocks:
        return invert(factors, damping, decay)
    like = factors.pairs[0][0]
    sizes = [n for b in factors.blocks for n in (b.inputs**2, b.outputs**2)]
    made: list[Inverse] = []

    def part() -> Tensor:
        made.append(invert(factors, damping, decay, ranks.mine))
        return torch.cat([t.reshape(-1) for pair in made[0].pairs for t in pair])

    pieces = ranks.whole(ranks.sum(part, like.new_empty(sum(sizes))), sum(sizes)).split(sizes)
    matrices = [piece.view(math.isqrt(len(piece)), -1) for piece in pieces]
    return Inverse(factors.blocks, list(zip(matrices[::2], matrices[1::2], strict=True)), made[0].diagonals)


def _entries(network: Network, state: OptimizerState) -> list[dict[str, Tensor]]:
    """What is remembered of each parameter's factors."""
    found = [{name: recall(state, p, name) for name in FACTORS} for p in network.parameters]
    return [{name: tensor for name, tensor in entry.items() if tensor is not None} for entry in found]


def _shape(entry: dict[str, Tensor]) -> tuple[int, int] | None:
    return (len(entry[_INPUT]), len(entry[_OUTPUT])) if _INPUT in entry and _OUTPUT in entry else None
