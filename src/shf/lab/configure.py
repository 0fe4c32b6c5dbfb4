"""From what a user types to a `RunConfig`: names looked up, options parsed and checked, settings put together.

Settings, each overriding the one before: the method's defaults, what the experiment asks of every method (weight decay),
the experiment's settings for SHF, the tuned choice, and what the user gives by ``--set``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shf.lab.baselines.protocol import MethodSpec
from shf.lab.baselines.registry import METHODS
from shf.lab.experiments import OPTIONS, Experiment, ExperimentError, find, suggest
from shf.lab.runconfig import Pretraining, RunConfig


@dataclass(frozen=True)
class Request:
    """The words of a ``shf run`` command."""

    experiment: str
    method: str = "shf"
    epochs: int | None = None
    minutes: float | None = None
    seed: int = 0
    split: int | None = None
    options: tuple[str, ...] = ()
    pretraining: Pretraining | None = None
    rows_every: int = 1
    threads: int | None = None
    untuned: bool = False


def configure(request: Request) -> RunConfig:
    """The complete configuration of a run; wrong or contradictory words raise `ExperimentError`."""
    experiment, spec = find(request.experiment), find_method(request.method)
    _refuse_contradictions(request, experiment, spec)
    chosen = parse_options(request.options)
    experiment = _with_method_definition(experiment, spec)
    experiment = experiment.with_options({k: v for k, v in chosen.items() if k in OPTIONS})
    own = {k: v for k, v in chosen.items() if k not in OPTIONS}
    epochs = experiment.epochs if request.epochs is None and request.minutes is None else request.epochs
    batch = experiment.gradient_batch if spec.batch == "experiment" or "gradient_batch" in chosen else int(spec.batch)
    settings, tuning = _settings(request, experiment, spec, own)
    return RunConfig(
        experiment=experiment,
        method=spec.name,
        settings=settings,
        batch=batch,
        seed=request.seed,
        split=request.split or 1,
        epochs=epochs,
        minutes=request.minutes,
        rows_every=request.rows_every,
        dropout_layers=spec.dropout or "last",
        pretraining=request.pretraining,
        options=request.options,
        tuning=tuning,
        threads=request.threads or torch.get_num_threads(),
    )


def find_method(name: str) -> MethodSpec:
    try:
        return METHODS[name]
    except KeyError:
        raise ExperimentError(f"optimizer {name!r} is unknown; {suggest(name, METHODS)}") from None


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """``name=value`` words; values are JSON where they can be (numbers, true, false, null), else strings."""
    parsed: dict[str, Any] = {}
    for option in options:
        name, equals, word = option.partition("=")
        if not equals or not name:
            raise ExperimentError(f"--set {option!r}: expected name=value, such as --set damping=0.3")
        if name in parsed:
            raise ExperimentError(f"--set {name} is given twice")
        parsed[name] = _value(word)
    return parsed


def _value(word: str) -> Any:
    if word in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[word]
    try:
        return json.loads(word)
    except ValueError:
        return word


def _refuse_contradictions(request: Request, experiment: Experiment, spec: MethodSpec) -> None:
    if request.split is not None and experiment.data != "usps":
        raise ExperimentError(f"--split {request.split}: only USPS has splits, {experiment.name} has not")
    if request.split is not None and not 1 <= request.split <= 5:
        raise ExperimentError(f"--split {request.split}: must be from 1 to 5")
    dropout = experiment.input_dropout or experiment.hidden_dropout
    if spec.dropout is not None and not dropout:
        raise ExperimentError(
            f"{spec.name} trains with dropout and {experiment.name} has none; use {experiment.name}-dropout"
        )
    if request.pretraining is not None and experiment.data == "reuters":
        raise ExperimentError(f"--pretrain: {experiment.name} has no hidden layer to pretrain")


def _with_method_definition(experiment: Experiment, spec: MethodSpec) -> Experiment:
    """Some methods are defined by where they start (SGD-VI)."""
    return (
        experiment if spec.initialisation is None else experiment.with_options({"initialisation": spec.initialisation})
    )


def _settings(
    request: Request, experiment: Experiment, spec: MethodSpec, own: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All settings of the method, and where the tuned ones among them come from."""
    unknown = [name for name in own if name not in spec.defaults]
    if unknown:
        known = (*spec.defaults, *OPTIONS)
        raise ExperimentError(f"--set {unknown[0]}: {spec.name} has no such setting; {suggest(unknown[0], known)}")
    given: dict[str, Any] = {"seed": request.seed} if "seed" in spec.defaults else {}
    if spec.dropout is None:  # the paper's dropout SGD has no weight decay
        given |= {k: v for k, v in experiment.shared_settings.items() if k in spec.defaults}
    if spec.name == "shf":
        given |= experiment.settings
    tuning = {} if request.untuned else _tuned(experiment, spec)
    settings = spec.complete({**given, **tuning.get("settings", {}), **own})
    return settings, tuning


def _tuned(experiment: Experiment, spec: MethodSpec) -> dict[str, Any]:
    return {}
