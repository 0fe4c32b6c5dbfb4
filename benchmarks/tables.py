"""`shf.sklearn` on small tables, against scikit-learn's own perceptron of the same architecture.

    python benchmarks/tables.py        the runs that are not yet in results/tables, on one thread
    python benchmarks/tables.py page   their tables, in docs/tables.md

Tables that scikit-learn carries, and Friedman's three functions. Every method trains one hidden layer of 50 tanh units on
standardised inputs and targets, on three quarters of the rows, split by a seed. `MLPRegressor` and `MLPClassifier` are as
they are set by default, but for 2000 iterations instead of 200. Each method is fitted twice: with its default weight decay,
alpha = 1e-4, and with that of four that does best on a quarter of the training rows, by the same search for all. Seconds are
those of the processor; the second fit's include its search.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from shf.lab.clock import CLOCKS
from shf.lab.files import write_atomically
from shf.lab.machine import description
from shf.lab.pages import fill, table
from shf.sklearn import SHFClassifier, SHFRegressor

ROOT = Path(__file__).resolve().parent.parent
RECORDS, PAGE = ROOT / "results" / "tables", ROOT / "docs" / "tables.md"
SEEDS, ALPHAS, HIDDEN = (0, 1, 2), (1e-4, 1e-2, 1.0, 10.0), (50,)
METHODS = {"shf": "shf", "lbfgs": "L-BFGS", "adam": "Adam"}
Fit = Callable[[Any, Any], Any]


def bundled(name: str) -> tuple[Any, Any]:
    return getattr(datasets, f"load_{name}")(return_X_y=True)  # type: ignore[no-any-return]


def friedman(number: int, noise: float) -> tuple[Any, Any]:
    """500 rows; noise as a share of the targets' deviation."""
    make = getattr(datasets, f"make_friedman{number}")
    deviation = make(500, noise=0.0, random_state=0)[1].std()
    return make(500, noise=noise * deviation, random_state=0)  # type: ignore[no-any-return]


REGRESSION: Mapping[str, tuple[str, Callable[[], tuple[Any, Any]]]] = {
    "diabetes": ("diabetes, 442 × 10", lambda: bundled("diabetes")),
    "linnerud": ("linnerud, 20 × 3, 3 targets", lambda: bundled("linnerud")),
    "friedman1": ("Friedman 1, 500 × 10, no noise", lambda: friedman(1, 0.0)),
    "friedman2": ("Friedman 2, 500 × 4, no noise", lambda: friedman(2, 0.0)),
    "friedman3": ("Friedman 3, 500 × 4, no noise", lambda: friedman(3, 0.0)),
    "friedman1-noisy": ("Friedman 1, noise 20 %", lambda: friedman(1, 0.2)),
    "friedman2-noisy": ("Friedman 2, noise 20 %", lambda: friedman(2, 0.2)),
    "friedman3-noisy": ("Friedman 3, noise 20 %", lambda: friedman(3, 0.2)),
}
CLASSES: Mapping[str, tuple[str, Callable[[], tuple[Any, Any]]]] = {
    "iris": ("iris, 150 × 4", lambda: bundled("iris")),
    "wine": ("wine, 178 × 13", lambda: bundled("wine")),
    "breast_cancer": ("breast cancer, 569 × 30", lambda: bundled("breast_cancer")),
}


def model(method: str, alpha: float, seed: int, *, classes: bool) -> Any:
    common = {"hidden_layer_sizes": HIDDEN, "activation": "tanh", "alpha": alpha, "random_state": seed}
    if method == "shf":
        return (SHFClassifier if classes else SHFRegressor)(**common)
    kind = MLPClassifier if classes else MLPRegressor
    pipeline = make_pipeline(StandardScaler(), kind(solver=method, max_iter=2000, **common))
    return pipeline if classes else TransformedTargetRegressor(pipeline, transformer=StandardScaler())


def errors(fitted: Any, X: Any, y: Any, *, classes: bool, deviation: Any) -> float:
    """Wrong answers in per cent, or the root mean squared error in deviations of the training targets."""
    found = fitted.predict(X)
    return 100 * float((found != y).mean()) if classes else float(np.sqrt((((found - y) / deviation) ** 2).mean()))


def fitted(method: str, alpha: float, seed: int, X: Any, y: Any, *, classes: bool) -> tuple[Any, float]:
    started = CLOCKS["processor"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model(method, alpha, seed, classes=classes).fit(X, y)
    return found, CLOCKS["processor"]() - started


def runs(X: Any, y: Any, *, classes: bool) -> Iterator[dict[str, Any]]:
    """Of every seed and method, one after the other."""
    for seed in SEEDS:

        def split(X: Any, y: Any, seed: int = seed) -> Any:
            return train_test_split(X, y, test_size=0.25, random_state=seed, stratify=y if classes else None)

        inside, outside, wanted, unseen = split(X, y)
        deviation = None if classes else wanted.std(0)
        for method in METHODS:
            told: dict[str, Any] = {"seed": seed, "method": method}
            seconds, scores = 0.0, {}
            x0, x1, y0, y1 = split(inside, wanted)
            for alpha in ALPHAS:
                tried, spent = fitted(method, alpha, seed, x0, y0, classes=classes)
                seconds += spent
                scores[alpha] = errors(tried, x1, y1, classes=classes, deviation=deviation)
            for name, alpha in (("default", ALPHAS[0]), ("chosen", min(ALPHAS, key=lambda a: (scores[a], -a)))):
                found, spent = fitted(method, alpha, seed, inside, wanted, classes=classes)
                told[name] = {
                    "alpha": alpha,
                    "training": errors(found, inside, wanted, classes=classes, deviation=deviation),
                    "held_out": errors(found, outside, unseen, classes=classes, deviation=deviation),
                    "seconds": spent + (seconds if name == "chosen" else 0.0),
                }
            yield told


def measure() -> None:
    torch.set_num_threads(1)
    RECORDS.mkdir(parents=True, exist_ok=True)
    for tables, classes in ((REGRESSION, False), (CLASSES, True)):
        for name, (_, load) in tables.items():
            file = RECORDS / f"{name}.json"
            if file.exists():
                continue
            found = list(runs(*load(), classes=classes))
            record = {"table": name, "hidden": HIDDEN, "alphas": ALPHAS, "machine": description(), "runs": found}
            write_atomically(file, (json.dumps(record, indent=1) + "\n").encode())
            print(name, "done", flush=True)


def lines(tables: Mapping[str, tuple[str, Any]], fit: str, digits: str) -> Iterator[list[str]]:
    """For each table, of every method the medians: error in training and held out, seconds."""
    for name, (words, _) in tables.items():
        file = RECORDS / f"{name}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))["runs"]
        cells = []
        for method in METHODS:
            own = [run[fit] for run in found if run["method"] == method]
            training, held_out, seconds = (
                statistics.median(run[what] for run in own) for what in ("training", "held_out", "seconds")
            )
            cells.append(f"{training:{digits}} / {held_out:{digits}} / {seconds:.2g} s")
        yield [words, *cells]


def page() -> None:
    heads = ["training / held out / processor time", *METHODS.values()]
    parts = {}
    for kind, tables, digits in (("regression", REGRESSION, ".2g"), ("classes", CLASSES, ".2f")):
        for fit in ("default", "chosen"):
            parts[f"{kind}-{fit}"] = table(heads, lines(tables, fit, digits), "---:")
    fill(PAGE, parts)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["page"]):
        raise SystemExit(__doc__)
    page() if sys.argv[1:] else measure()
