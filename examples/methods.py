"""Tasks, methods, and a training run: what the examples compare.

Time is processor time of the updates alone (`time.process_time` on one thread), so that a busy machine does not decide
who wins; making batches and evaluating are not counted.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shf
from shf.network import call_model

Step = Callable[[Any, Any], object]
"""One update from a batch of inputs and targets."""
Row = dict[str, float]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: of the directory of its records.
        model: a fresh network, drawn from torch's generator.
        batches: endless batches of so many rows, drawn from a generator.
        evaluate: measures of the network as it is.
        tuned_on: the measure on held-out data by which a rate is chosen; less is better.
        solved: whether these measures say that the task is solved; a run of whichever method then ends.
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[int, torch.Generator], Iterator[tuple[Any, Any]]]
    evaluate: Callable[[nn.Module], Row]
    tuned_on: str
    solved: Callable[[Row], bool] = lambda row: False


@dataclass(frozen=True)
class Method:
    """A contestant: how many rows it wants, how it is made for a model and a rate, and the rates that are tried."""

    name: str
    rows: int
    build: Callable[[nn.Module, float], Step]
    rates: Sequence[float] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def stochastic(model: nn.Module, loss: Any, epoch: int, **options: Any) -> Step:
    """SHF with an epoch of so many updates."""
    optimizer, updates = shf.SHF(model, loss, **options), 0

    def step(inputs: Any, targets: Any) -> None:
        nonlocal updates
        optimizer.step(inputs, targets)
        updates += 1
        if updates % epoch == 0:
            optimizer.next_epoch()

    return step


def by_gradient(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, clip: float = math.inf) -> Step:
    """A torch optimizer, with the gradient's norm clipped where that is wanted."""

    def step(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        loss(call_model(model, inputs), targets).backward()
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


def train(task: Task, method: Method, rate: float, *, seed: int, seconds: float, evaluations: int) -> Iterator[Row]:
    """A row of measures at the start and at equal distances until the processor time is spent or the task solved."""
    torch.manual_seed(seed)
    model = task.model()
    step, spent, updates = method.build(model, rate), 0.0, 0
    batches = task.batches(method.rows, torch.Generator().manual_seed(seed))
    for k in range(evaluations + 1):
        while spent < seconds * k / evaluations:
            inputs, targets = next(batches)
            start = time.process_time()
            step(inputs, targets)
            spent += time.process_time() - start
            updates += 1
        row = {"processor_seconds": spent, "updates": updates, **measure(task, model)}
        yield row
        if task.solved(row) or not math.isfinite(row[task.tuned_on]):  # a run that diverged does not come back
            return


def measure(task: Task, model: nn.Module) -> Row:
    model.eval()
    with torch.no_grad():
        found = task.evaluate(model)
    model.train()
    return found


def choose_rate(task: Task, method: Method, *, seed: int, seconds: float) -> tuple[float, Row]:
    """The rate that is best on held-out data after so much time each, and what every one of them reached."""
    if len(method.rates) < 2:
        return next(iter(method.rates), math.nan), {}
    found = {}
    for rate in method.rates:
        *_, last = train(task, method, rate, seed=seed, seconds=seconds, evaluations=1)
        found[rate] = last[task.tuned_on] if math.isfinite(last[task.tuned_on]) else math.inf
        print(f"{task.name}, {method.name}, rate {rate:g}: {task.tuned_on} {found[rate]:.4g}", flush=True)
    return min(found, key=lambda rate: found[rate]), {f"{rate:g}": value for rate, value in found.items()}
