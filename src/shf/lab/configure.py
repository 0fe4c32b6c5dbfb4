"""From what a user types to a `RunConfig`: names looked up, options parsed and checked, settings put together.

Settings, each overriding the one before: the method's defaults, what the experiment asks of every method (weight decay),
the experiment's settings for SHF, the tuned choice, and what the user gives by ``--set``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shf.lab.baselines import registry
from shf.lab.baselines.protocol import MethodSpec
from shf.lab.choices import Choice, find_choice
from shf.lab.experiments import EXPERIMENTS, OPTIONS, Experiment, ExperimentError, find
from shf.lab.runconfig import Pretraining, RunConfig
from shf.lab.words import suggest

find_method = registry.find


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
    clock: str = "wall"
    evaluate_seconds: float | None = None


def configure(request: Request, experiment: Experiment | None = None, *, choices: Path | None = None) -> RunConfig:
    """The complete configuration of a run; wrong or contradictory words raise `ExperimentError`.

    Args:
        request: the words.
        experiment: one that is not in the registry, in place of the one that the request names.
        choices: the file of tuned settings; by default the user's own.
    """
    experiment, spec = experiment or find(request.experiment), find_method(request.method)
    chosen = parse_options(request.options)
    if "seed" in chosen:
        raise ExperimentError(
            f"--set seed={chosen['seed']}: give --seed, which seeds weights, batches and masks as one"
        )
    choice = None if request.untuned else find_choice(experiment.name, spec.name, choices)
    experiment = _as_defined(experiment, spec, choice)
    experiment = experiment.with_options({k: v for k, v in chosen.items() if k in OPTIONS})
    check_fit(experiment, spec, request.split)
    if request.pretraining is not None and experiment.data == "reuters":
        raise ExperimentError(f"--pretrain: {experiment.name} has no hidden layer to pretrain")
    own = {k: v for k, v in chosen.items() if k not in OPTIONS}
    epochs = experiment.epochs if request.epochs is None and request.minutes is None else request.epochs
    batch = experiment.gradient_batch if spec.batch == "experiment" or "gradient_batch" in chosen else int(spec.batch)
    as_asked = ("seed", "minutes", "rows_every", "pretraining", "options", "clock", "evaluate_seconds")
    return RunConfig(
        experiment=experiment,
        method=spec.name,
        settings=_settings(request, experiment, spec, choice, own),
        batch=batch,
        split=request.split or 1,
        epochs=epochs,
        dropout_layers=spec.dropout or "last",
        tuning={} if choice is None else provenance(choice),
        threads=request.threads or torch.get_num_threads(),
        **{name: getattr(request, name) for name in as_asked},
    )


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
        if isinstance(parsed[name], float) and not math.isfinite(parsed[name]):
            raise ExperimentError(f"--set {option}: must be a finite number")
    return parsed


def _value(word: str) -> Any:
    if word in (known := {"None": None, "none": None, "True": True, "False": False}):
        return known[word]
    try:
        return json.loads(word)
    except ValueError:
        return word


def pretraining(method: str | None, epochs: int | None) -> Pretraining | None:
    """What ``--pretrain`` and ``--pretrain-epochs`` ask for."""
    if method is None:
        if epochs is not None:
            raise ExperimentError(f"--pretrain-epochs {epochs} without --pretrain: say which, denoising or rbm")
        return None
    if method not in ("denoising", "rbm"):
        raise ExperimentError(f"--pretrain {method}: must be denoising or rbm")
    return Pretraining(method) if epochs is None else Pretraining(method, epochs)


def check_fit(experiment: Experiment, spec: MethodSpec, split: int | None) -> None:
    """Refuse a method that the experiment cannot be done with, or a split that its data do not have."""
    if split is not None and experiment.data != "usps":
        raise ExperimentError(f"--split {split}: only USPS has splits, {experiment.name} has not")
    if split is not None and not 1 <= split <= 5:
        raise ExperimentError(f"--split {split}: must be from 1 to 5")
    dropout = experiment.input_dropout or experiment.hidden_dropout
    if spec.dropout is not None and not dropout:
        twin = f"{experiment.name}-dropout"
        advice = f"; use {twin}" if twin in EXPERIMENTS else ""
        raise ExperimentError(f"{spec.name} trains with dropout and {experiment.name} has none{advice}")


def _as_defined(experiment: Experiment, spec: MethodSpec, choice: Choice | None) -> Experiment:
    """The experiment as the method needs it (SGD-VI is defined by where it starts) and with the tuned input dropout."""
    changes: dict[str, Any] = {}
    if spec.initialisation is not None:
        changes["initialisation"] = spec.initialisation
    if choice is not None and choice.input_dropout is not None:
        changes["input_dropout"] = choice.input_dropout
    return experiment.with_options(changes)


def _settings(
    request: Request, experiment: Experiment, spec: MethodSpec, choice: Choice | None, own: Mapping[str, Any]
) -> dict[str, Any]:
    """All settings of the method."""
    unknown = [name for name in own if name not in spec.defaults]
    if unknown:
        known = (*(name for name in spec.defaults if name != "seed"), *OPTIONS)
        raise ExperimentError(f"--set {unknown[0]}: {spec.name} has no such setting; {suggest(unknown[0], known)}")
    seed = {"seed": request.seed} if "seed" in spec.defaults else {}
    tuned = {} if choice is None else choice.settings
    return spec.complete({**seed, **fixed_settings(experiment, spec), **tuned, **own})


def fixed_settings(experiment: Experiment, spec: MethodSpec) -> dict[str, Any]:
    """What the experiment itself sets: weight decay for every method but dropout SGD (as in the paper), and all of SHF."""
    shared = experiment.shared_settings if spec.dropout is None else {}
    own = experiment.settings if spec.name == "shf" else {}
    return {name: value for name, value in {**shared, **own}.items() if name in spec.defaults}


def provenance(choice: Choice) -> dict[str, Any]:
    """A tuned choice for a run's record: what was chosen, by which search, and the same in a few words."""
    amount = {} if choice.input_dropout is None else {"input dropout": float(choice.input_dropout)}
    named = {**choice.settings, **amount}.items()
    chosen = ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in named)
    record = {key: value for key, value in choice.to_json().items() if key not in ("trials", "edge")}
    words = f"tuned: {chosen.replace('learning_rate ', '').replace('_', ' ')} (best of {len(choice.trials)})"
    return {**record, "edge": list(choice.edge), "tried": len(choice.trials), "words": words}
