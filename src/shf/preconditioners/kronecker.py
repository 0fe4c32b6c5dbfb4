"""The Kronecker preconditioner from step to step: running averages of its factors, renewed and inverted on a schedule.

A renewal costs a backward pass, the sums over positions and the inversions. How often it is done follows from counting
multiplications, not from a clock: runs repeat exactly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import ClassVar

import torch
from torch import Tensor

from shf.component import number, option, whole
from shf.distributed.collective import Collective
from shf.errors import NonFiniteError
from shf.linear.cg import LinearMap
from shf.linear.decay import Decay
from shf.linear.flat import all_finite, read
from shf.model.network import Network
from shf.preconditioners.base import GradientPass, Preconditioner, Space, Work
from shf.preconditioners.factors import Block, Factors, Inverse, find_blocks, invert, invert_undamped
from shf.preconditioners.layerfactors import Sums, explained_gradient, layer_sums
from shf.runtime.context import warn
from shf.state import Memory

_SHARE = 0.2
"""Of a step's multiplications that renewals may take, on average."""
_INPUT, _OUTPUT, _DIAGONAL = "input_factor", "output_factor", "diagonal"
FACTORS = (_INPUT, _OUTPUT, _DIAGONAL)
"""Their names in the optimizer's state."""
_COUNT, _DUE, _DAMPING = "factor_renewals", "factors_due", "factor_damping"
_CACHE, _DECAYED = "kronecker", "kronecker_decayed"


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


@dataclass(frozen=True, kw_only=True)
class Kronecker(Preconditioner):
    """Two factors for each linear or convolution layer, running averages; a Jacobi diagonal for all else. `shf.SHF` only."""

    batches: ClassVar[bool] = False
    average: float = option(
        0.95,
        number(least=0.0, most=1.0),
        "Kronecker factors are running averages; the largest share of the old ones that a renewal keeps.",
        name="factor_average",
    )
    every: int | None = option(
        None,
        whole(least=1, optional=True),
        """steps from one renewal of the Kronecker factors to the next; None for as many as hold the average cost of renewals
        to a fifth of a step's.""",
        name="factor_every",
    )

    @property
    def tensors(self) -> tuple[str, ...]:
        return FACTORS

    @property
    def numbers(self) -> tuple[str, ...]:
        return _COUNT, _DUE, _DAMPING

    def begin(self, memory: Memory, work: Work) -> "Renewal":
        return Renewal(memory, Schedule(self.average, self.every, work.cg_iterations, work.curvature_share))


class Renewal:
    """The Kronecker preconditioner of one step: its factors renewed if that is due, else as they are.

    Args:
        memory: where the factors lie, and how many renewals there were, when the next is due, λ at the last. Their inverses
            are cached: they are a function of what is saved.
        schedule: when to renew.
    """

    diagonal = False

    def __init__(self, memory: Memory, schedule: Schedule) -> None:
        self._memory, self._network = memory, memory.network
        self._schedule = schedule
        self._entries = memory.entries(FACTORS)
        self._factors = _read(self._network, self._entries)
        due, known = memory.number(_DUE), memory.number(_DAMPING)
        iteration = memory.number("iteration", 0)
        self.due = self._factors is None or due is None or known is None or iteration >= due
        self.blocks = self._network.once(find_blocks) if self.due else []
        self._explained = [True] * len(self.blocks)
        self._pass: GradientPass | None = None

    @property
    def record(self) -> bool:
        return self.due

    def costs(self, evaluations: float) -> None:
        pass

    def pull(self, pass_: GradientPass) -> tuple[Tensor, Tensor | None]:
        if not self.due:
            return pass_.gradient(), None
        gradient, self._explained = explained_gradient(pass_.jacobian, pass_.expansion.gradient, self.blocks)
        self._pass = pass_
        return gradient, None

    def inverse(self, diagonal: Tensor | None, space: Space) -> LinearMap:
        if self.due:
            self._renew(space)
        damping = float(self._memory.number(_DAMPING) or 0.0)
        solve = self._inverted(_CACHE, damping, space.decay, invert).solver(self._network)
        return (lambda r: space.own(solve(space.whole(r)))) if space.collective.split else solve

    def decay_step(self, space: Space) -> Tensor:
        """Of this process's entries."""
        inverse = self._inverted(_DECAYED, 0.0, space.decay, lambda factors, _, decay: invert_undamped(factors, decay))
        theta = self._network.theta()
        pull = space.decay.add_product_(torch.zeros_like(theta), theta, 0.0)
        return space.own(inverse.solver(self._network)(pull)).neg()

    def _renew(self, space: Space) -> None:
        """New running averages and their inverses; each process makes its part of both."""
        ranks = space.collective
        unexplained = (
            ranks.add(lambda: [float(not e) for e in self._explained], len(self._explained)) if self.blocks else []
        )
        blocks = [b for b, n in zip(self.blocks, unexplained, strict=True) if n == 0]
        covered = {i for b in blocks for i in b.members}
        others = [i for i in range(len(self._network.parameters)) if i not in covered]
        fresh, positions = _summed(self._network, ranks, blocks, others, self._own_sums)
        self._pass = None
        count = int(self._memory.number(_COUNT) or 0) + 1
        if count == 1:
            _warn_of_uncovered(self._network, [b for b in self.blocks if b not in blocks])
        self._factors = self._averaged(fresh, min(1 - 1 / count, self._schedule.average))
        period = self._schedule.period(blocks, positions, others=bool(others))
        numbers = {_COUNT: count, _DUE: self._memory.number("iteration", 0) + period, _DAMPING: space.damping}
        self._inverted(_CACHE, space.damping, space.decay, partial(_shared_inverse, ranks=ranks))
        self._keep(self._factors)
        self._memory.keep(**numbers)

    def _own_sums(self, blocks: Sequence[Block], others: Sequence[int]) -> tuple[Sequence[Sums], dict[int, Tensor]]:
        """Sums of layers' inputs and root gradients over this process's rows, and diagonals of other parameters."""
        if self._pass is None:  # no rows here
            zeros = self._network.parameters[0].new_zeros
            empty = [Sums(zeros(b.inputs, b.inputs), zeros(b.outputs, b.outputs), 0) for b in blocks]
            return empty, {i: zeros(self._network.shapes.shapes[i]) for i in others}
        jacobian = self._pass.jacobian
        # E[uu'] = L'' of this share; the whole batch's L'' is the weighted sum of the shares'
        roots = [math.sqrt(self._pass.weight) * u for u in self._pass.expansion.hessian_root(self._pass.signs)]
        return layer_sums(jacobian, roots, self._pass.axes, blocks, others)

    def _inverted(
        self, name: str, damping: float, decay: Decay, make: Callable[[Factors, float, Decay], Inverse]
    ) -> Inverse:
        """Cached under this name until factors, λ or the decay are others."""
        assert self._factors is not None
        tensors, numbers = self._factors.tensors(), (damping, *decay.weights)
        known = self._memory.cache.get(name, ((), (), None))
        if known[1] != numbers or len(known[0]) != len(tensors) or not all(map(is_, known[0], tensors)):
            known = self._memory.cache[name] = (tensors, numbers, make(self._factors, damping, decay))
        return known[2]  # type: ignore[no-any-return]

    def _keep(self, factors: Factors) -> None:
        """The averages are to be remembered."""
        found: dict[int, dict[str, Tensor]] = {i: {_DIAGONAL: d} for i, d in factors.diagonals.items()}
        for block, (a, g) in zip(factors.blocks, factors.pairs, strict=True):
            found[block.weight] = {_INPUT: a, _OUTPUT: g}
        for name in FACTORS:
            self._memory.keep_pieces(name, [found.get(i, {}).get(name) for i in range(len(self._network.parameters))])

    def _averaged(self, fresh: Factors, keep: float) -> Factors:
        """keep · old + (1 - keep) · new, where there is an old one."""

        def mean(new: Tensor, old: Tensor | None) -> Tensor:
            return new if old is None or old.shape != new.shape else torch.lerp(new, old, keep)

        pairs = [
            (mean(a, self._entries[b.weight].get(_INPUT)), mean(g, self._entries[b.weight].get(_OUTPUT)))
            for b, (a, g) in zip(fresh.blocks, fresh.pairs, strict=True)
        ]
        diagonals = {i: mean(d, self._entries[i].get(_DIAGONAL)) for i, d in fresh.diagonals.items()}
        return Factors(fresh.blocks, pairs, diagonals)


def _read(network: Network, entries: Sequence[dict[str, Tensor]]) -> Factors | None:
    """The running averages; None before the first renewal, or where a parameter has joined since."""
    blocks = [b for b in network.once(find_blocks) if _shape(entries[b.weight]) == (b.inputs, b.outputs)]
    covered = {i for b in blocks for i in b.members}
    others = [i for i in range(len(entries)) if i not in covered]
    if any(_DIAGONAL not in entries[i] for i in others):
        return None
    pairs = [(entries[b.weight][_INPUT], entries[b.weight][_OUTPUT]) for b in blocks]
    return Factors(blocks, pairs, {i: entries[i][_DIAGONAL] for i in others})


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
            t for s in sums for t in (s.inputs.reshape(-1), s.outputs.reshape(-1), like.new_full((1,), s.positions))
        ]
        return torch.cat([*pieces, *(diagonals[i].reshape(-1) for i in others)])

    total = ranks.whole(ranks.sum(part, like.new_empty(sum(sizes))), sum(sizes))
    if not all_finite(total):
        raise NonFiniteError("the factors of the Kronecker preconditioner are not finite at the present parameters")
    pieces = list(total.split(sizes))
    pairs, counts = [], pieces[2 : 3 * len(blocks) : 3]
    for k, (block, n) in enumerate(zip(blocks, counts, strict=True)):
        a, g = pieces[3 * k : 3 * k + 2]
        pairs.append((a.view(block.inputs, -1) / n.clamp_min(1), g.view(block.outputs, -1).clone()))
    rest = pieces[3 * len(blocks) :]
    diagonals = {i: d.view(network.shapes.shapes[i]).clone() for i, d in zip(others, rest, strict=True)}
    return Factors(blocks, pairs, diagonals), read(*[n[0] for n in counts])


def _warn_of_uncovered(network: Network, uncovered: Sequence[Block]) -> None:
    """Where a model that differentiates by its inputs leaves layers that might have factors with a diagonal."""
    if not uncovered or network.evaluation.level == 0:
        return
    sizes = network.shapes.sizes
    found = sum(sizes[i] for b in uncovered for i in b.members)
    warn(
        f"preconditioner='kronecker': {found:,} of {sum(sizes):,} parameters have a diagonal in place of factors "
        f"({network.names[uncovered[0].weight]}, ...): the model differentiates by its inputs, and its call is but one "
        "of its uses. Where all rows are in each step use **shf.presets.residual, else preconditioner='empirical-fisher'"
    )


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


def _shape(entry: dict[str, Tensor]) -> tuple[int, int] | None:
    return (len(entry[_INPUT]), len(entry[_OUTPUT])) if _INPUT in entry and _OUTPUT in entry else None
