"""Martens' batch method (§3): objective and gradient over all of the data, curvature on a minibatch."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from shf.base import CurvatureOptimizer
from shf.composition import HFConfig
from shf.data.draws import mix
from shf.data.repeatable import pair, sizes_of
from shf.distributed.collective import Collective
from shf.distributed.contribution import Contribution
from shf.info import StepInfo
from shf.model.network import Network
from shf.problems.batch import BatchProblem
from shf.problems.batches import BatchesProblem
from shf.problems.shared import SharedProblem
from shf.runtime.memory import Demand, explained_exhaustion


class HF(CurvatureOptimizer):
    """Hessian-free optimization (Martens, 2010): the components of SHF with the settings of batch training.

    CG runs until its relative progress is small, iterates ⌈1.3^i⌉ take part in backtracking, λ moves by 2/3 and 3/2,
    and γ stays at 0.95. See `shf.HFConfig` for the options and `shf.SHF` for everything else.

    Example:
        `info = optimizer.step(batches, curvature=(inputs, targets))`, where `batches` is anything that can be iterated
        more than once, such as a list or an unshuffled DataLoader.
    """

    _config_type = HFConfig
    info: StepInfo | None = None

    def step(  # type: ignore[override]
        self, batches: Iterable[Any] = (), curvature: tuple[Any, Any] | None = None
    ) -> StepInfo:
        """One iteration over all of the data.

        Args:
            batches: (inputs, targets) pairs; iterated once per objective evaluation, each time in the same order. With
                several processes, each gives its own.
            curvature: the curvature batch, (inputs, targets); with several processes, each gives its share of it.
        """
        ranks, config = self._connection.ranks(), self.config
        with self._context(self._device), ranks.step(), explained_exhaustion(config.microbatch) as demand:
            own, agreement = ranks.agree(lambda: self._prepare_data(batches, curvature, ranks, demand))
            (batch, layout), seed = own.data, self._adopt(agreement.seed)
            demand.separable = layout.separable
            rows, numbers, curvature_share = agreement.shares
            on_curvature = BatchProblem(
                own.network,
                self._subject.loss,
                batch,
                layout,
                seed=mix(seed, 1),
                microbatch=config.microbatch,
                structural_damping=config.structural_damping,
                share=curvature_share,
                represents=rows.total,
            )
            parts = partial(self._parts, own.network, batches, numbers.first, seed)
            problem = SharedProblem(
                BatchesProblem(parts, on_curvature, rows),
                self._objective.decay(own.network, self.param_groups),
                ranks,
                agree=config.nonfinite == "skip",
                seed=seed,
            )
            self.info = self._iteration().run(problem, batch, "curvature batch")
        return self.info

    def _parts(self, network: Network, batches: Iterable[Any], first: int, seed: int) -> Iterator[BatchProblem]:
        """The problem of each batch; the same masks for the n-th batch (of all processes) in every pass."""
        for number, (inputs, targets) in enumerate(batches, start=first):
            batch, own_seed = self._subject.batch(inputs, targets), mix(seed, 0, number)
            layout = self._subject.layout_of_part(network, batch, own_seed)
            microbatch = self.config.microbatch
            yield BatchProblem(network, self._subject.loss, batch, layout, seed=own_seed, microbatch=microbatch)

    def _prepare_data(
        self, batches: Iterable[Any], curvature: tuple[Any, Any] | None, ranks: Collective, demand: Demand
    ) -> Contribution:
        sizes = sizes_of(batches, self._subject.count)
        network = self._network()
        if not sum(sizes) and not ranks.several:
            raise ValueError("batches is empty: expected at least one (inputs, targets) pair")
        batch = self._subject.batch(*pair(curvature, "curvature"), may_be_empty=ranks.several)
        demand.rows = max([batch.rows, *sizes])
        layout = self._subject.layout(network, batch, self._scalars["seed"])
        counts = [sum(sizes), len(sizes), batch.rows]
        return self._objective.contribution(
            network, counts, self.param_groups, self._settings, self.state, (batch, layout)
        )
