"""What an experiment is: what is learned, by which network, with which settings, and what the paper reports. The paper's
are in ``experiments.toml``.

This module does not import torch.
`shf.lab.problem` turns an `Experiment` into a model, a loss and data.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
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


def _registered() -> Iterator[Experiment]:
    content = tomllib.loads(resources.files("shf.lab").joinpath("experiments.toml").read_text(encoding="utf-8"))
    return (Experiment.from_json({"name": name, **fields}) for name, fields in content.items())


EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType({experiment.name: experiment for experiment in _registered()})
