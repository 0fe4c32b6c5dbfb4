"""What decides a run, in one frozen record that goes into ``run.json`` and comes back from it. No torch here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shf.component import Check, number, one_of, whole
from shf.lab.clock import CLOCKS
from shf.lab.experiments import Experiment, ExperimentError

_BUDGET = ("epochs", "minutes")
_HOW = ("threads", "tuning", "clock", "evaluate_seconds")
_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("method", "dropout_layers"), lambda value: None if isinstance(value, str) else "a name"),
    **dict.fromkeys(("settings", "tuning"), lambda value: None if isinstance(value, Mapping) else "an object"),
    **dict.fromkeys(("seed", "split", "batch"), whole(least=0)),
    **dict.fromkeys(("rows_every", "threads"), whole(least=1)),
    **dict.fromkeys(("minutes", "evaluate_seconds"), number(above=0, words=(None,))),
    "epochs": whole(least=1, optional=True),
    "clock": one_of(*CLOCKS),
}


@dataclass(frozen=True)
class Pretraining:
    """Layerwise pretraining before the run: the method ("denoising" or "rbm") and its epochs per layer."""

    method: str
    epochs: int = 10


@dataclass(frozen=True)
class RunConfig:
    """An experiment, a method with all its settings, a seed and a budget.

    `batch` is the number of rows of a step (0: all). One of `epochs` and `minutes` limits the run, or both; minutes are
    minutes of training: evaluation and checkpoints are not counted, so that methods compare in equal time.
    `options` are the words given by ``--set``, kept for the command that repeats the run; `tuning` says where tuned
    settings come from. `clock` says what a second is: of the wall, or of the processor, for machines that others use too.
    `evaluate_seconds` asks for rows between those of epochs, where an epoch is long.
    """

    experiment: Experiment
    method: str
    settings: Mapping[str, Any]
    batch: int
    seed: int = 0
    split: int = 1
    epochs: int | None = None
    minutes: float | None = None
    rows_every: int = 1
    dropout_layers: str = "last"
    pretraining: Pretraining | None = None
    options: tuple[str, ...] = ()
    tuning: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    clock: str = "wall"
    evaluate_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():  # a record may hold anything
            if (expected := check(getattr(self, name))) is not None:
                raise ExperimentError(f"{name}={getattr(self, name)!r}: must be {expected}")
        if self.epochs is None and self.minutes is None:
            raise ExperimentError("a run needs a limit: epochs, minutes or both")

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "experiment": self.experiment.to_json(), "options": list(self.options)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunConfig:
        if not isinstance(record, Mapping):
            raise ExperimentError(f"the recorded configuration cannot be read: expected an object, got {record!r}")
        pretraining = record.get("pretraining")
        try:
            fields = {
                **record,
                "experiment": Experiment.from_json(record["experiment"]),
                "pretraining": None if pretraining is None else Pretraining(**pretraining),
                "options": tuple(record["options"]),
            }
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ExperimentError(f"the recorded configuration cannot be read: {error}") from error

    def fingerprint(self) -> str:
        """SHA-256 of everything but the budget: a checkpoint continues a run only if they agree in it."""
        decisive = {key: value for key, value in self.to_json().items() if key not in (*_BUDGET, *_HOW)}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def command(self) -> str:
        """The shell command that repeats the run, whatever settings are tuned where it is typed."""
        words = ["shf", "run", self.experiment.name, "--optimizer", self.method]
        if self.epochs is not None:
            words += ["--epochs", str(self.epochs)]
        if self.minutes is not None:
            words += ["--minutes", f"{self.minutes:.12g}"]
        words += ["--seed", str(self.seed)]
        if self.experiment.data == "usps":
            words += ["--split", str(self.split)]
        if self.clock != "wall":
            words += ["--clock", self.clock]
        if self.evaluate_seconds is not None:
            words += ["--evaluate-seconds", f"{self.evaluate_seconds:.12g}"]
        if self.pretraining is not None:
            words += ["--pretrain", self.pretraining.method, "--pretrain-epochs", str(self.pretraining.epochs)]
        words += ["--threads", str(self.threads), "--untuned"]
        if self.rows_every != 1:
            words += ["--rows-every", str(self.rows_every)]
        given = {option.partition("=")[0] for option in self.options}
        tuned = {**self.tuning.get("settings", {}), "input_dropout": self.tuning.get("input_dropout")}
        chosen = [
            f"{name}={json.dumps(value)}" for name, value in tuned.items() if value is not None and name not in given
        ]
        for option in (*self.options, *chosen):
            words += ["--set", option]
        return shlex.join(words)
