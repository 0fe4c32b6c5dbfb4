"""Martens' batch method (§3): objective and gradient over all of the data, curvature on a minibatch."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shf.batching import Batch
from shf.cg import LinearMap, geometric, relative_progress
from shf.config import HFConfig
from shf.losses import Reduction
from shf.network import Network
from shf.objective import Objective
from shf.optimizer import SHF
from shf.preconditioner import solve_diagonal
from shf.randomness import mix
from shf.step import Expansion, Solver, StepInfo


class HF(SHF):
    """Hessian-free optimization (Martens, 2010): the components of SHF with the settings of batch training.

    CG runs until its relative progress is small, iterates ⌈1.3^i⌉ take part in backtracking, λ moves by 2/3 and 3/2,
    and γ stays at 0.95. See `shf.HFConfig` for the options and `shf.SHF` for everything else.

    Example:
        `info = optimizer.step(batches, curvature=(inputs, targets))`, where `batches` is anything that can be iterated
        more than once, such as a list or an unshuffled DataLoader.
    """

    _config_type = HFConfig
    config: HFConfig

    def step(self, batches: Iterable[Any], curvature: tuple[Any, Any]) -> StepInfo:  # type: ignore[override]
        """One iteration over all of the data.

        Args:
            batches: (inputs, targets) pairs; iterated once per objective evaluation, each time in the same order.
            curvature: the curvature batch, (inputs, targets).
        """
        if iter(batches) is batches:
            raise TypeError(
                f"batches is a one-time iterator ({type(batches).__name__}): expected something that can be iterated "
                "again, such as a list or a DataLoader"
            )
        network = self._network()
        seed = mix(self._scalars["seed"], self._scalars["iteration"])
        with self._surroundings(network.device):
            problem = _BatchProblem(self, network, batches, curvature, seed)
            return self._iterate(problem, network, lambda: problem.buffers)

    @property
    def _solver(self) -> Solver:
        return Solver(geometric(self.config.iterate_spacing), relative_progress(self.config.progress_tolerance))


class _BatchProblem:
    """f, ∇f and P as row-weighted means (or sums) over batches; B from the curvature batch."""

    def __init__(
        self, optimizer: HF, network: Network, batches: Iterable[Any], curvature: tuple[Any, Any], seed: int
    ) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._optimizer = optimizer
        self._network = network
        self._batches = batches
        self._curvature = curvature
        self._seed = seed
        self._decay = optimizer._decay(network)
        self._rows = sum(objective.rows for objective in self._parts())
        if self._rows == 0:
            raise ValueError("batches is empty: expected at least one (inputs, targets) pair")

    def expand(self) -> Expansion:
        value, gradient, diagonal = 0.0, None, None
        for part in self._parts():
            weight = self._weight(part)
            f, g, d = part.data_terms()
            value += weight * f
            gradient = g.mul_(weight) if gradient is None else gradient.add_(g, alpha=weight)
            if d is not None:
                diagonal = d.mul_(weight) if diagonal is None else diagonal.add_(d, alpha=weight)
            self.buffers = part.buffers or {}
        assert gradient is not None
        if self._decay is not None:
            theta = self._network.theta()
            value += 0.5 * torch.dot(self._decay * theta, theta).item()
            gradient.addcmul_(self._decay, theta)
        exponent, decay = self._optimizer.config.preconditioner_exponent, self._decay
        return Expansion(value, gradient, lambda damping: solve_diagonal(diagonal, damping, decay, exponent))

    def curvature(self) -> LinearMap:
        part = self._objective(*self._curvature, mix(self._seed, 1), self._decay)
        part.represents = self._rows
        return part.curvature()

    def value(self, theta: Tensor) -> float:
        penalty = 0.0 if self._decay is None else 0.5 * torch.dot(self._decay * theta, theta).item()
        return sum(self._weight(part) * part.value(theta) for part in self._parts()) + penalty

    def _weight(self, part: Objective) -> float:
        return part.rows / self._rows if self._optimizer.loss.reduction is Reduction.MEAN else 1.0

    def _parts(self) -> Iterator[Objective]:
        """An objective per batch, without decay; the same masks for the n-th batch in every pass."""
        for number, (inputs, targets) in enumerate(self._batches):
            yield self._objective(inputs, targets, mix(self._seed, 0, number), None)

    def _objective(self, inputs: Any, targets: Any, seed: int, decay: Tensor | None) -> Objective:
        o = self._optimizer
        batch = Batch.of(inputs, targets, o._select, o._count)
        layout = o._find_layout(self._network, batch, seed)
        return Objective(self._network, o.loss, batch, layout, decay=decay, seed=seed, settings=o._settings)
