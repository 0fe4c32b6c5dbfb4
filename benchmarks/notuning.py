"""One unchanged preset over many problems, against methods that are tuned and methods that claim to need no tuning.

    python benchmarks/notuning.py --seconds 60 --tune 5 --points 20 --seed 0     the runs, below results/fast
    python benchmarks/notuning.py page                                           their table, in docs/fast.md

`--problems` chooses some of them, by the beginnings of their names.

Judged is the objective on the training set. Contestants: `shf.presets.fast` on batches of 500 rows, or of a third of the
data where that is less; Adam at its default rate, Adam at the best of seven rates, Prodigy and Schedule-Free AdamW as their
packages set them, these on batches of 200 rows. Data: the paper's, generated curves and what scikit-learn brings along
(`pip install '.[lab,opponents]'`).
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # a convolutional and a recurrent network are examples already

import cnn  # noqa: E402
import longterm  # noqa: E402
import shf  # noqa: E402
from shf.data.batches import count_rows, select_rows  # noqa: E402
from shf.lab.baselines.registry import find  # noqa: E402
from shf.lab.contest import Method, Row, Step, Task, contest, in_epochs, parser, read_contest  # noqa: E402
from shf.lab.data import load  # noqa: E402
from shf.lab.experiments import find as find_experiment  # noqa: E402
from shf.lab.pages import fill, spread, table  # noqa: E402
from shf.lab.problem import build_loss, build_model, load_data  # noqa: E402
from shf.lab.records import RunRecord  # noqa: E402
from shf.model.network import call_model  # noqa: E402

RECORDS, PAGE = ROOT / "results" / "fast", ROOT / "docs" / "fast.md"
MEASURED = 3000
"""Training cases that are measured, the first."""
REFERENCE = "adam-tuned"
CLOCK = "processor_seconds"
ROWS = 500
"""In a batch of `fast`; of few cases, at most a third of them."""


@dataclass(frozen=True)
class Problem:
    """A network, its data and its loss.

    Attributes:
        name: of the directory of its records, behind "notuning-".
        model: a fresh network.
        loss: mean over rows.
        inputs: of the training set; any rows that `select_rows` can take.
        targets: of the training set.
        weight_decay: of every method.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Any
    inputs: Any
    targets: Any
    weight_decay: float = 0.0

    @property
    def cases(self) -> int:
        return count_rows(self.inputs)

    def task(self) -> Task:
        def batches(size: int, source: torch.Generator) -> Iterator[tuple[Any, Any]]:
            while True:
                for rows in torch.randperm(self.cases, generator=source).split(size):
                    yield select_rows(self.inputs, rows), select_rows(self.targets, rows)

        rows = torch.arange(min(self.cases, MEASURED))
        seen = select_rows(self.inputs, rows), select_rows(self.targets, rows)

        def evaluate(model: nn.Module) -> Row:
            loss = self.loss(call_model(model, seen[0]), seen[1]).item()
            penalty = 0.5 * self.weight_decay * sum(p.square().sum().item() for p in model.parameters() if p.ndim >= 2)
            return {"objective": loss + penalty, "loss": loss}

        return Task(f"notuning-{self.name}", self.model, batches, evaluate, "objective")


def methods(problem: Problem) -> list[Method]:
    def made(name: str, settings: dict[str, Any], rows: int, model: nn.Module, rate: float) -> Step:
        chosen = settings | ({} if math.isnan(rate) else {"learning_rate": rate})
        optimizer = find(name).build(model, problem.loss, {"weight_decay": problem.weight_decay, **chosen})
        return in_epochs(
            optimizer, math.ceil(problem.cases / rows), getattr(optimizer, "averaged", contextlib.nullcontext)
        )

    def method(label: str, name: str, rows: int, rates: Sequence[float] = (), **settings: Any) -> Method:
        recorded = {**(shf.presets.fast if name == "fast" else {}), "weight_decay": problem.weight_decay, **settings}
        return Method(label, rows, partial(made, name, settings, rows), rates, recorded)

    return [
        method("fast", "fast", min(ROWS, math.ceil(problem.cases / 3)), growing=False),
        method("adam", "adam", 200),
        method(REFERENCE, "adam", 200, find("adam").grid["learning_rate"]),
        method("prodigy", "prodigy", 200),
        method("schedule-free", "schedule-free", 200),
    ]


def of_experiment(name: str) -> Problem:
    """One of the laboratory's experiments, its initial weights drawn from the run's seed."""
    experiment = find_experiment(name)
    data = load_data(experiment)
    decay = float(experiment.shared_settings.get("weight_decay", 0.0))

    def model() -> nn.Module:
        return build_model(experiment, seed=torch.initial_seed())

    return Problem(name, model, build_loss(experiment), data.train_inputs, data.train_targets, decay)


def rectifiers(*sizes: int) -> nn.Sequential:
    layers = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def bundled(name: str, *hidden: int, regression: bool = False) -> Problem:
    """Data that come with scikit-learn: inputs, and targets of a regression, with mean 0 and variance 1."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = (x - x.mean(0)) / np.maximum(x.std(0), 1e-12)
    inputs = torch.from_numpy(x).float()
    if regression:
        targets, loss, outputs = torch.from_numpy((y - y.mean()) / y.std()).float()[:, None], nn.MSELoss(), 1
    else:
        targets, loss, outputs = torch.from_numpy(y).long(), nn.CrossEntropyLoss(), int(y.max()) + 1
    decay = 1e-3
    return Problem(
        name.replace("_", "-"), partial(rectifiers, x.shape[1], *hidden, outputs), loss, inputs, targets, decay
    )


def convolutional() -> Problem:
    data = load("mnist", standardise=False)
    inputs = data.train_inputs.unflatten(1, (28, 28))
    return Problem("cnn", cnn.network, cnn.LOSS, inputs, data.train_targets)


def recurrent() -> Problem:
    inputs, targets = longterm.order(20, 10_000, torch.Generator().manual_seed(0))
    return Problem("rnn", partial(longterm.Plain, 6, 4), nn.CrossEntropyLoss(), inputs, targets)


def digits_autoencoder() -> Problem:
    from sklearn import datasets

    pixels = torch.from_numpy(datasets.load_digits().data).float() / 16
    return Problem("digits-autoencoder", autoencoder, nn.MSELoss(), pixels, pixels)


def autoencoder() -> nn.Sequential:
    return nn.Sequential(*rectifiers(64, 100, 10), nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 64), nn.Sigmoid())


PROBLEMS: dict[str, tuple[str, Callable[[], Problem]]] = {
    "curves-demo": ("curves, autoencoder of 8 layers", partial(of_experiment, "curves-demo")),
    "usps-classifier-dropout": ("USPS, rectifiers, dropout", partial(of_experiment, "usps-classifier-dropout")),
    "reuters-classifier": ("Reuters, softmax on sparse inputs", partial(of_experiment, "reuters-classifier")),
    "mnist-classifier": ("MNIST, 784-1200-1200-10", partial(of_experiment, "mnist-classifier")),
    "mnist-autoencoder": ("MNIST, autoencoder of 8 layers", partial(of_experiment, "mnist-autoencoder")),
    "cnn": ("MNIST, LeNet with dropout", convolutional),
    "rnn": ("temporal order, T = 20, plain RNN", recurrent),
    "digits": ("digits, 64-100-100-10", partial(bundled, "digits", 100, 100)),
    "digits-autoencoder": ("digits, 64-100-10-100-64", digits_autoencoder),
    "breast-cancer": ("breast cancer, 30-50-2", partial(bundled, "breast_cancer", 50)),
    "wine": ("wine, 13-50-3", partial(bundled, "wine", 50)),
    "diabetes": ("diabetes, regression, 10-50-50-1", partial(bundled, "diabetes", 50, 50, regression=True)),
}
"""By name: what the page says, and what makes it."""


def rows(root: Path) -> Iterator[list[str]]:
    """For each problem tuned Adam's objective, and when the others have it; seeds are compared one by one."""
    for name, (words, _) in PROBLEMS.items():
        found = read_contest(root / f"notuning-{name}")
        if reference := found.get(REFERENCE):
            levels = {seed: _end(record) for seed, record in reference.items()}
            config = next(iter(reference.values())).config
            rate, seconds = config["settings"]["rate"], config["seconds"]
            rivals = [_reached(found.get(rival, {}), levels) for rival in ("fast", "adam", "prodigy", "schedule-free")]
            yield [words, f"{seconds:g} s", f"{spread(list(levels.values()), '.3g')}, rate {rate:g}", *rivals]


def _reached(rival: Mapping[int, RunRecord], levels: Mapping[int, float]) -> str:
    """When a method has tuned Adam's objective, of the seeds that both have; and where it ends."""
    common = {seed: record for seed, record in rival.items() if seed in levels}
    if not common:
        return ""
    times = [record.reached("objective", levels[seed], CLOCK) for seed, record in common.items()]
    made = [t for t in times if math.isfinite(t)]
    when = (
        f"{spread(made, '.2g')} s" if len(made) == len(times) else f"{len(made)} of {len(times)}" if made else "never"
    )
    return f"{when}; ends at {spread([_end(record) for record in common.values()], '.3g')}"


def _end(record: RunRecord) -> float:
    return float(record.column("objective")[-1])


def page() -> None:
    heads = ("problem", "time", "tuned Adam", "fast", "Adam 0.001", "Prodigy", "Schedule-Free")
    fill(PAGE, {"notuning": table(heads, rows(RECORDS))})


def main() -> None:
    if sys.argv[1:] == ["page"]:
        page()
        return
    options = parser(__doc__, seconds=20)
    options.set_defaults(out=RECORDS)
    options.add_argument("--problems", nargs="+", help="beginnings of names; by default all")
    chosen = options.parse_args()
    if unknown := [word for word in chosen.problems or () if not any(n.startswith(word) for n in PROBLEMS)]:
        raise SystemExit(f"--problems {' '.join(unknown)}: the problems are {', '.join(PROBLEMS)}")
    for name, (_, make) in PROBLEMS.items():
        if not chosen.problems or name.startswith(tuple(chosen.problems)):
            problem = make()
            contest([problem.task()], methods(problem), chosen)


if __name__ == "__main__":
    main()
