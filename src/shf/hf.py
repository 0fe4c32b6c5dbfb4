"""Martens' batch method (§3): objective and gradient over all of the data, curvature on a minibatch."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import RandomSampler

from shf.algorithm import Curvature, Expansion, Solver, StepInfo
from shf.config import HFConfig
from shf.data.batches import Batch
from shf.data.draws import mix
from shf.data.tree import leaves, parts
from shf.distributed.agreement import checksum
from shf.distributed.collective import Collective, Share
from shf.distributed.contribution import Contribution
from shf.extras import Extras
from shf.linear.cg import geometric, relative_progress
from shf.losses import Reduction
from shf.model.network import Network
from shf.optimizer import SHF
from shf.probing.layout import Layout
from shf.probing.unsupported import refuse_unsupported
from shf.problems.objective import Objective
from shf.problems.points import Points
from shf.problems.terms import Terms, expand_terms, no_terms, sum_terms
from shf.runtime.memory import Demand, explained_exhaustion


class HF(SHF):
    """Hessian-free optimization (Martens, 2010): the components of SHF with the settings of batch training.

    CG runs until its relative progress is small, iterates ⌈1.3^i⌉ take part in backtracking, λ moves by 2/3 and 3/2,
    and γ stays at 0.95. See `shf.HFConfig` for the options and `shf.SHF` for everything else.

    Example:
        `info = optimizer.step(batches, curvature=(inputs, targets))`, where `batches` is anything that can be iterated
        more than once, such as a list or an unshuffled DataLoader.
    """

    _config_type = HFConfig
    _described = "curvature batch"
    config: HFConfig

    def step(self, batches: Iterable[Any], curvature: tuple[Any, Any]) -> StepInfo:  # type: ignore[override]
        """One iteration over all of the data.

        Args:
            batches: (inputs, targets) pairs; iterated once per objective evaluation, each time in the same order. With
                several processes, each gives its own.
            curvature: the curvature batch, (inputs, targets); with several processes, each gives its share of it.
        """
        ranks = self._connection.ranks()
        with self._context(self._device), ranks.step(), explained_exhaustion(self.config.microbatch) as demand:
            own, agreement = ranks.agree(lambda: self._prepare_data(batches, curvature, ranks, demand))
            (batch, layout), seed = own.data, self._adopt(agreement.seed)
            demand.separable = layout.separable
            problem = _BatchProblem(self, own.network, batches, batch, layout, agreement.shares, seed, ranks)
            solver = Solver(geometric(self.config.iterate_spacing), relative_progress(self.config.progress_tolerance))
            plain = Extras(own.network, self.state, self.damping, self._scalars["iteration"])
            return self._iterate(problem, own.network, ranks, batch, solver, plain)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As SHF's; of a state of SHF's own, λ must have been chosen."""
        first = (state_dict.get("param_groups") or [{}])[0]
        if math.isnan(first.get("shf", {}).get("damping", 0.0)):
            raise ValueError(
                "the state is of SHF(damping='auto') before its first step: its λ is not known, and HF does not choose it"
            )
        super().load_state_dict(state_dict)

    def _prepare_data(
        self, batches: Iterable[Any], curvature: tuple[Any, Any], ranks: Collective, demand: Demand
    ) -> Contribution:
        if iter(batches) is batches:
            raise TypeError(
                f"batches is a one-time iterator ({type(batches).__name__}): expected something that can be iterated "
                "again, such as a list or a DataLoader"
            )
        sizes: list[int] = []
        seen: list[int] = []
        for inputs, targets in map(_pair, batches):
            seen = seen or _checksums((inputs, targets))
            sizes.append(self._count(inputs))
        shuffles = isinstance(getattr(batches, "sampler", None), RandomSampler)
        if shuffles or seen != _checksums(next(iter(batches), None)):
            raise ValueError(
                f"batches is a {type(batches).__name__} that shuffles or draws: iterated twice, it begins with different "
                "batches, and every evaluation in a step must see the same; give a DataLoader without a random sampler and "
                "without random augmentation, or a list of batches"
            )
        network = self._network()
        refuse_unsupported(network, ranks)
        if not sum(sizes) and not ranks.several:
            raise ValueError("batches is empty: expected at least one (inputs, targets) pair")
        batch = Batch.of(*_pair(curvature), self._select, self._count, may_be_empty=ranks.several)
        demand.rows = max([batch.rows, *sizes])
        layout = self._find_layout(network, batch)
        return self._contribution(network, [sum(sizes), len(sizes), batch.rows], (batch, layout))


def _checksums(batch: Any) -> list[int]:
    """What tells a batch from another, as far as it is made of tensors."""
    return [checksum(part) for t in leaves(batch) for part in parts(t)]


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        found = f"{len(batch)} of them" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
        raise TypeError(f"HF.step(batches, curvature): expected (inputs, targets) pairs in both, got {found}")
    return batch[0], batch[1]


class _BatchProblem:
    """f, ∇f and P as row-weighted means (or sums) over batches; B from the curvature batch.

    With several processes each has some of the batches and a share of the curvature batch.
    """

    def __init__(
        self,
        optimizer: HF,
        network: Network,
        batches: Iterable[Any],
        curvature: Batch,
        layout: Layout,
        shares: Sequence[Share],
        seed: int,
        ranks: Collective,
    ) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._optimizer = optimizer
        self._network = network
        self._batches = batches
        self._curvature = curvature
        self._layout = layout
        self._seed = seed
        self._ranks = ranks
        self._points = Points(network, ranks)
        self._decay = optimizer._decay(network)
        self._rows, self._numbers, self._curvature_share = shares
        self.represents = self._rows.total

    def expand(self, damping: float) -> Expansion:
        total = sum_terms(self._ranks, self._own_terms, agree=self._optimizer._settings.skip)
        self.buffers = total.buffers
        exponent = self._optimizer.config.preconditioner_exponent
        return expand_terms(total, self._network, self._decay, self._ranks, damping=damping, exponent=exponent)

    def curvature(self, damping: float) -> Curvature:
        part = Objective(
            self._network,
            self._optimizer.loss,
            self._curvature,
            self._layout,
            decay=self._decay,
            seed=mix(self._seed, 1),
            settings=self._optimizer._settings,
            ranks=self._ranks,
            share=self._curvature_share,
        )
        part.represents = self.represents
        return part.curvature(damping)

    def point(self, delta: Tensor, rate: float) -> Tensor:
        return self._points(delta, rate)

    def value(self, theta: Tensor) -> float:
        shapes = self._network.shapes
        theta = self._ranks.whole(theta, shapes.total)
        (total,) = self._ranks.add(lambda: [sum(self._weight(part) * part.value(theta) for part in self._parts())], 1)
        return total + self._decay.penalty(shapes.split(theta))

    def _own_terms(self) -> Terms:
        """The sum over this process's batches, weighted by their part of all rows."""
        total = no_terms(self._network, self._optimizer._settings.preconditioner)
        for part in self._parts():
            weight = self._weight(part)
            value, gradient, diagonal = part.data_terms()
            total.gradient.add_(gradient, alpha=weight)
            if total.diagonal is not None and diagonal is not None:
                total.diagonal.add_(diagonal, alpha=weight)
            total = replace(total, value=total.value + weight * value, buffers=part.buffers)
        return total

    def _weight(self, part: Objective) -> float:
        return part.rows / self._rows.total if self._optimizer.loss.reduction is Reduction.MEAN else 1.0

    def _parts(self) -> Iterator[Objective]:
        """An objective per batch, without decay; the same masks for the n-th batch (of all processes) in every pass."""
        o = self._optimizer
        for number, (inputs, targets) in enumerate(self._batches, start=self._numbers.first):
            batch, seed = Batch.of(inputs, targets, o._select, o._count), mix(self._seed, 0, number)
            layout = o._layouts.find(self._network, batch, seed)
            yield Objective(self._network, o.loss, batch, layout, seed=seed, settings=o._settings)
