"""The paper's experiments as data: what is learned, by which network, with which settings, and what the paper reports.

This module does not import torch.
`shf.lab.problem` turns an `Experiment` into a model, a loss and data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from shf.component import Check, flag, number, one_of, whole
from shf.lab.words import suggest


class ExperimentError(ValueError):
    """A wrong name, option or value in the description of an experiment."""


class Task(StrEnum):
    CLASSIFIER = "classifier"
    AUTOENCODER = "autoencoder"
    REGRESSION = "regression"


@dataclass(frozen=True)
class Experiment:
    """One experiment at the paper's setting.

    `sizes` are the layers of a classifier or a regression, or the encoder of an autoencoder (its decoder mirrors it).
    `metric` names the column of an epoch's record that the experiment is judged by, smaller being better; `paper` holds
    the paper's figure in that column, by method. `settings` are SHF's own; `shared_settings` (weight decay) go to every
    method that knows them. `minutes` is what the whole experiment takes SHF on two cores, roughly.
    """

    name: str
    summary: str
    task: Task
    data: str
    sizes: tuple[int, ...]
    epochs: int
    gradient_batch: int
    metric: str
    figure: str
    minutes: float
    paper: Mapping[str, float] = field(default_factory=dict)
    paper_note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    shared_settings: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    initialisation: str = "sparse"
    bias: float = 0.0
    initialisation_scale: float = 1.0
    reshuffle: bool = False
    evaluation_cases: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            expected = check(getattr(self, name))
            if "dropout" in name and self.task is not Task.CLASSIFIER and getattr(self, name):
                expected = "0: its autoencoder has no dropout"
            if expected is not None:
                raise ExperimentError(f"{self.name}: {name}={getattr(self, name)!r}: must be {expected}")
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise ExperimentError(f"{self.name}: sizes={self.sizes!r}: must be two or more layer sizes")

    def with_options(self, options: Mapping[str, Any]) -> Experiment:
        """The same experiment with some of `OPTIONS` replaced."""
        for name in options:
            if name not in OPTIONS:
                raise ExperimentError(f"experiment option {name!r} is unknown; {suggest(name, OPTIONS)}")
        return dataclasses.replace(self, **options)

    def to_json(self) -> dict[str, Any]:
        """Plain data from which `from_json` builds the same experiment."""
        return {**dataclasses.asdict(self), "task": self.task.value, "sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Experiment:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            raise ExperimentError(f"the recorded experiment has fields this version does not know: {unknown}")
        try:
            return cls(**{**record, "task": Task(record["task"]), "sizes": tuple(record["sizes"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ExperimentError(f"the recorded experiment cannot be read: {error}") from error


_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("epochs", "gradient_batch"), whole(least=1)),
    **dict.fromkeys(("input_dropout", "hidden_dropout"), number(least=0, below=1)),
    "initialisation": one_of("sparse", "normalised", "torch"),
    **dict.fromkeys(("bias", "initialisation_scale"), number()),
    "reshuffle": flag,
    "evaluation_cases": whole(least=1, optional=True),
}
OPTIONS = tuple(name for name in _CHECKS if name != "epochs")
"""What `--set` may change in an experiment; every other name is a setting of the method."""


def find(name: str) -> Experiment:
    """The registered experiment of that name; an unknown name is answered with the nearest known one."""
    try:
        return EXPERIMENTS[name]
    except KeyError:
        raise ExperimentError(f"experiment {name!r} is unknown; {suggest(name, EXPERIMENTS)}") from None


_DROPOUT = " with dropout on the inputs and the last hidden layer"
_ERRORS = "errors of 10,000 at epoch 500"
_MNIST: dict[str, Any] = {
    "data": "mnist",
    "sizes": (784, 1200, 1200, 10),
    "epochs": 500,
    "metric": "test_errors",
    "minutes": 180,
}
_USPS: dict[str, Any] = {
    "data": "usps",
    "sizes": (256, 500, 500, 10),
    "epochs": 1000,
    "metric": "test_error_percent",
    "minutes": 10,
}
_REUTERS: dict[str, Any] = {
    "data": "reuters",
    "sizes": (18933, 65),
    "epochs": 1000,
    "metric": "test_error_percent",
    "minutes": 6,
    "paper_note": "curves only, no figure in the text",
}
_CURVES: dict[str, Any] = {"data": "curves", "sizes": (784, 400, 200, 100, 50, 25, 6), "epochs": 250, "minutes": 140}
_PIXELS: dict[str, Any] = {
    "data": "mnist-autoencoder",
    "sizes": (784, 1000, 500, 250, 30),
    "epochs": 100,
    "minutes": 1000,
}


def _classifier(name: str, summary: str, *, dropped: float | None = None, **rest: Any) -> Experiment:
    """SHF on a rectifier classifier: gradient 1000, curvature 100, ζ 3; dropout, of the inputs by this much, lowers the
    decay and adds β."""
    settings: dict[str, Any] = {"damping": 1.0, "cg_iterations": 3, "curvature_batch": 100}
    decay = 5e-4
    if dropped is not None:
        settings["update_decay"], decay = 0.998, 2e-5
        rest |= {"input_dropout": dropped, "hidden_dropout": 0.5 if len(rest["sizes"]) > 2 else 0.0}
    return Experiment(
        name=name,
        summary=summary,
        task=Task.CLASSIFIER,
        gradient_batch=1000,
        figure="Figure 2",
        settings=settings,
        shared_settings={"weight_decay": decay},
        bias=0.1,
        **rest,
    )


def _autoencoder(name: str, summary: str, *, batch: int, damping: float, cg: int, **rest: Any) -> Experiment:
    """SHF on a logistic autoencoder: curvature batch = gradient batch, no decay, γ off when training diverges."""
    settings = {"damping": damping, "cg_iterations": cg, "curvature_batch": batch, "momentum_off_on_divergence": True}
    return Experiment(
        name=name,
        summary=f"{summary} and back, logistic units, linear code",
        task=Task.AUTOENCODER,
        gradient_batch=batch,
        settings=settings,
        metric="train_squared_error",
        figure="Table 1, Figure 3",
        paper_note="Table 1 does not give its unit: ½‖x-x̂‖² or ‖x-x̂‖² per training case",
        **rest,
    )


def _table_one(*errors: float) -> dict[str, float]:
    """One row of the paper's Table 1 under our names of the methods."""
    return dict(zip(("nag", "momentum-0.99", "momentum-0.9", "sgd", "sgd-vi", "hf", "shf"), errors, strict=True))


_ALL = (
    _classifier(
        "mnist-classifier",
        "MNIST digits, 784-1200-1200-10 rectifiers",
        paper={"shf": 159.0},
        paper_note=_ERRORS,
        **_MNIST,
    ),
    _classifier(
        "mnist-classifier-dropout",
        "MNIST digits" + _DROPOUT,
        dropped=0.5,
        paper={"shf": 107.0},
        paper_note=_ERRORS,
        **_MNIST,
    ),
    _classifier(
        "usps-classifier",
        "USPS digits, 256-500-500-10 rectifiers",
        paper_note="without dropout SHF overfits; no figure in the text",
        **_USPS,
    ),
    _classifier(
        "usps-classifier-dropout",
        "USPS digits" + _DROPOUT,
        dropped=0.5,
        paper={"shf": 0.95},
        paper_note="mean of five splits: 1, 1.1, 0.8, 0.9, 0.97 %",
        **_USPS,
    ),
    _classifier("reuters-classifier", "Reuters-21578, softmax regression 18933-65", **_REUTERS),
    _classifier(
        "reuters-classifier-dropout", "Reuters-21578, softmax regression with input dropout", dropped=0.2, **_REUTERS
    ),
    _autoencoder(
        "curves-autoencoder",
        "CURVES, 784-400-200-100-50-25-6",
        batch=2000,
        damping=10.0,
        cg=25,
        paper=_table_one(0.078, 0.110, 0.220, 0.250, 0.160, 0.110, 0.089),
        **_CURVES,
    ),
    _autoencoder(
        "mnist-autoencoder",
        "MNIST pixels, 784-1000-500-250-30",
        batch=3000,
        damping=1.0,
        cg=50,
        paper=_table_one(0.730, 0.770, 0.990, 1.100, 0.900, 0.780, 0.877),
        evaluation_cases=10_000,
        **_PIXELS,
    ),
    Experiment(  # not one of the paper's: on it λ = 10 would not move anything for many epochs
        name="curves-demo",
        summary="4000 generated curves, 784-200-100-50-6 and back: small, not one of the paper's",
        task=Task.AUTOENCODER,
        data="curves",
        data_options={"train": 4000, "test": 1000},
        sizes=(784, 200, 100, 50, 6),
        epochs=60,
        gradient_batch=800,
        metric="train_squared_error",
        figure="",
        minutes=2,
        settings={
            "damping": 0.3,
            "damping_factor": 0.95,
            "cg_iterations": 10,
            "curvature_batch": 100,
            "cg_decay": 0.95,
        },
        evaluation_cases=1000,
    ),
    Experiment(  # of `shf demo`: more places are unseen than seen, and the errors on both go down together
        name="terrain-demo",
        summary="Elevation at unseen places from 20,000 others, 2-64-64-64-1: for the demonstration, not one of the paper's",
        task=Task.REGRESSION,
        data="terrain",
        sizes=(2, 64, 64, 64, 1),
        epochs=60,
        gradient_batch=1000,
        metric="test_rms_error",
        figure="",
        minutes=1,
        settings={"damping": 1.0, "cg_iterations": 10, "curvature_batch": 500},
        initialisation="torch",
        reshuffle=True,
    ),
)

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType({experiment.name: experiment for experiment in _ALL})
