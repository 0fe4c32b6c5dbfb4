"""What a run's loop does: one iteration, one epoch, and a state from which both continue exactly. No files here.

Everything that decides the numbers is in `Training.state`: parameters, the method's state (its generator included), torch's
global generator (dropout masks of methods that draw from it), and the position. The order of batches is not: it is a pure
function of seed and epoch.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from shf import NonFiniteError
from shf.data.batches import select_rows
from shf.lab.baselines.protocol import Method, gradient_equivalents
from shf.lab.batches import Batches, batch_rows
from shf.lab.checkpoint import CheckpointMismatchError
from shf.lab.clock import CLOCKS, Clock, wall
from shf.lab.experiments import ExperimentError
from shf.lab.loop import Loop, Spent, judged
from shf.lab.observer import Progress
from shf.lab.problem import Problem
from shf.lab.runconfig import RunConfig

# How an epoch's row sums up the iterations' fields; fields named in neither are averaged.
_LAST = frozenset({"damping", "cg_decay", "update_scale", "learning_rate", "momentum"})
_SUM = frozenset({"gradients", "evaluations", "products", "skipped"})


@dataclass
class Position(Spent):
    """How far training is. `index` counts the batches of the epoch in progress, `batch` are their rows where the method
    chooses them itself; `passes` is the cost so far."""

    epoch: int = 0
    index: int = 0
    passes: float = 0.0
    best: float | None = None
    best_epoch: float = 0
    last: dict[str, Any] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    batch: int = 0


class Training:
    """A problem and the method that solves it, with the position between them."""

    def __init__(
        self,
        config: RunConfig,
        problem: Problem,
        method: Method,
        *,
        whole_data: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.problem = problem
        self.method = method
        self.position = Position()
        self.evaluation_due = False
        self._whole_data = whole_data
        self._cases = problem.data.train_inputs.shape[0]
        self._epoch_rows: tuple[int, int, tuple[Tensor, ...]] | None = None
        self.loop = Loop(self._step, clock or CLOCKS[config.clock], self.position)

    @property
    def iterations_per_epoch(self) -> int:
        return 1 if self._whole_data else math.ceil(self._cases / self._batch_size)

    @property
    def _batch_size(self) -> int:
        return self.position.batch or self.config.batch or self._cases

    def train(self, *, limited: bool = True) -> Iterator[dict[str, Any]]:
        """Steps of the method until the run is exhausted, if it is to be `limited`, each one's row for the record; the
        objective of the last may not be finite."""
        every, before = self.config.evaluate_seconds, self.position.elapsed
        for report in self.loop.until(lambda _: limited and self.exhausted):
            at = self.position
            self.evaluation_due = every is not None and at.elapsed // every > before // every
            before = at.elapsed
            spent = {"passes": at.passes, "elapsed_seconds": at.elapsed}
            yield {"row": "iteration", "iteration": at.iteration, "epoch": at.epoch, **report, **spent}

    def iterate(self) -> dict[str, Any]:
        """One step, whatever the run's limit; its row."""
        return next(self.train(limited=False))

    def _step(self) -> Mapping[str, float]:
        """The method's step on the next batch."""
        rows, (inputs, targets) = self._next_batch()
        try:
            report = self.method.step(inputs, targets)
        except NonFiniteError:
            raise
        except ValueError as error:  # what can be told only with a batch at hand
            raise ExperimentError(f"{self.config.method}: {error}") from error
        self.position.passes += gradient_equivalents(report) * rows / self._cases
        self.position.index += 1
        self._accumulate(report)
        return report

    @property
    def epoch_ended(self) -> bool:
        return self.position.index >= self.iterations_per_epoch

    @property
    def exhausted(self) -> bool:
        """Whether the run has reached its epochs or its minutes of training, whichever comes first."""
        config, at = self.config, self.position
        if config.epochs is not None and at.epoch >= config.epochs:
            return True
        return config.minutes is not None and at.elapsed >= 60.0 * config.minutes

    def progress(self) -> Progress:
        """How much of the run's epochs or minutes is spent, and how long the rest will take."""
        config, at, done = self.config, self.position, [0.0]
        if config.epochs is not None:
            done.append(self._epochs / config.epochs)
        if config.minutes is not None:
            done.append(at.elapsed / (60.0 * config.minutes))
        spent = min(1.0, max(done))
        left = at.elapsed * (1.0 - spent) / spent if spent > 0 else None
        return Progress(spent, at.elapsed, left, at.epoch, config.epochs, at.iteration)

    @property
    def _epochs(self) -> float:
        """Made so far, the part of the one in progress included."""
        return self.position.epoch + self.position.index / self.iterations_per_epoch

    def end_epoch(self) -> dict[str, Any]:
        """Evaluate, tell the method that an epoch is over, and start the next; the epoch's row for the record."""
        self.position.epoch += 1
        self.position.index = 0
        row = self.evaluate()
        self.position.sums, self.position.counts = {}, {}
        self.method.next_epoch()
        self.position.batch = int(getattr(self.method, "batch_size", None) or 0)
        return row

    def evaluated(self) -> AbstractContextManager[None]:
        """Inside, the network is what the method would have judged: for one that averages its iterates, the average."""
        return judged(self.method)

    def evaluate(self) -> dict[str, Any]:
        """The row of an epoch as things stand, a fraction of an epoch included. The network is left as it is."""
        at = self.position
        started = wall()
        with self.evaluated():
            metrics = self.problem.evaluate()
        at.last = metrics
        return {
            "row": "epoch",
            "epoch": at.epoch if at.index == 0 else self._epochs,
            "iteration": at.iteration,
            **self._epoch_means(),
            **metrics,
            "passes": at.passes,
            "elapsed_seconds": at.elapsed,
            "evaluation_seconds": wall() - started,
        }

    def improves(self, row: Mapping[str, Any]) -> bool:
        """Whether this evaluation's judged error is the smallest so far; if so, it is remembered."""
        value = float(row[self.config.experiment.metric])
        if not self._is_best(value):
            return False
        self.position.best, self.position.best_epoch = value, row["epoch"]
        return True

    def _is_best(self, value: float) -> bool:
        return math.isfinite(value) and (self.position.best is None or value < self.position.best)

    def summary(self) -> dict[str, Any]:
        """Where training stands, for the record and the table: the latest evaluation, the best one, and the cost."""
        at, metric = self.position, self.config.experiment.metric
        best, best_epoch, value = at.best, at.best_epoch, at.last.get(metric)
        if at.index and value is not None and self._is_best(float(value)):  # at an end inside of an epoch
            best, best_epoch = float(value), self._epochs
        return {
            "epochs": at.epoch,
            "iterations": at.iteration,
            "metric": metric,
            "value": value,
            "best": best,
            "best_epoch": best_epoch,
            "last": at.last,
            "passes": at.passes,
            "elapsed_seconds": at.elapsed,
            "seconds_per_epoch": at.elapsed / self._epochs if self._epochs else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Plain data from which `load_state` continues bitwise."""
        return {
            "fingerprint": self.config.fingerprint(),
            "position": asdict(self.position),
            "model": self.problem.model.state_dict(),
            "method": self.method.state_dict(),
            "torch_generator": torch.get_rng_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up a state; refuses that of another experiment, method or network."""
        if state.get("fingerprint") != self.config.fingerprint():
            raise CheckpointMismatchError(
                "the checkpoint belongs to another configuration (experiment, method, settings or seed) than run.json "
                "describes; resume the directory it was written in"
            )
        try:
            self.problem.model.load_state_dict(state["model"])
            self.method.load_state_dict(state["method"])
            self.position = self.loop.spent = Position(**state["position"])
            torch.set_rng_state(state["torch_generator"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointMismatchError(f"the checkpoint does not fit the network or method: {error}") from error

    def _next_batch(self) -> tuple[int, tuple[Any, Any]]:
        """The batch's number of rows, and what the method's step takes."""
        data = self.problem.data
        if self._whole_data:
            return self._batch_size, (Batches(self._rows(), data.train_inputs, data.train_targets), None)
        rows = self._rows()[self.position.index]
        return len(rows), (select_rows(data.train_inputs, rows), select_rows(data.train_targets, rows))

    def _rows(self) -> tuple[Tensor, ...]:
        epoch, size, reshuffle = self.position.epoch, self._batch_size, self.config.experiment.reshuffle
        known = self._epoch_rows
        if known is None or known[1] != size or (reshuffle and known[0] != epoch):
            rows = batch_rows(self._cases, size, seed=self.config.seed, epoch=epoch, reshuffle=reshuffle)
            self._epoch_rows = (epoch, size, rows)
        assert self._epoch_rows is not None
        return self._epoch_rows[2]

    def _accumulate(self, report: Mapping[str, float]) -> None:
        sums, counts = self.position.sums, self.position.counts
        for name, value in report.items():
            if name in _LAST:
                sums[name], counts[name] = float(value), 1
            elif math.isfinite(value):
                sums[name] = sums.get(name, 0.0) + float(value)
                counts[name] = counts.get(name, 0) + 1

    def _epoch_means(self) -> dict[str, float]:
        at = self.position
        return {name: total if name in _SUM else total / at.counts[name] for name, total in at.sums.items()}
