"""From an experiment to what `shf.lab.tuning` trains: the bridge behind ``shf tune``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from shf.lab.baselines.protocol import MethodSpec
from shf.lab.choices import Choice
from shf.lab.configure import fixed_settings
from shf.lab.evaluation import evaluate
from shf.lab.experiments import Experiment
from shf.lab.problem import build_loss, build_model, load_data
from shf.lab.tuning import Budget, Subject, Tell, tune

INPUT_DROPOUT = (0.0, 0.1, 0.2, 0.3, 0.5)


def tune_experiment(
    experiment: Experiment,
    spec: MethodSpec,
    *,
    budget: Budget,
    search_dropout: bool = False,
    seed: int = 0,
    split: int = 1,
    data_dir: Path | None = None,
    report: Tell | None = None,
    keep: int = 3,
) -> Choice:
    """Search the method's grid on an experiment; with `search_dropout` the amount of input dropout too.

    Trials are scored by the experiment's own error on training rows that were held out; the test set is not looked at.
    One in `keep` trials goes on to the next rung.
    """
    if search_dropout:
        experiment.with_options({"input_dropout": max(INPUT_DROPOUT)})  # where it can have none, this says so at once
    if spec.initialisation is not None:
        experiment = experiment.with_options({"initialisation": spec.initialisation})
    return tune(
        experiment.name,
        spec,
        _builder(experiment, spec, seed=seed, split=split, data_dir=data_dir),
        budget=budget,
        fixed=fixed_settings(experiment, spec),
        input_dropout=INPUT_DROPOUT if search_dropout else (),
        seed=seed,
        report=report,
        keep=keep,
    )


def _builder(
    experiment: Experiment, spec: MethodSpec, *, seed: int, split: int, data_dir: Path | None
) -> Callable[[float | None], Subject]:
    data = load_data(experiment, data_dir=data_dir, split=split)
    loss = build_loss(experiment)
    name = _score_name(experiment)

    def score(model: nn.Module, inputs: Any, targets: Any) -> float:
        return evaluate(model, loss, experiment.task, inputs, targets, unit=data.unit)[name]

    def build(input_dropout: float | None) -> Subject:
        chosen = experiment if input_dropout is None else experiment.with_options({"input_dropout": input_dropout})
        model = build_model(chosen, seed=seed, dropout_layers=spec.dropout or "last")
        return Subject(
            model=model,
            loss=loss,
            inputs=data.train_inputs,
            targets=data.train_targets,
            batch=experiment.gradient_batch,
            score=score,
            metric=f"held-out {name.replace('_', ' ')}",
        )

    return build


def _score_name(experiment: Experiment) -> str:
    """The judged error without its part of the data; a percentage, not a count, since the part differs."""
    name = experiment.metric.partition("_")[2]
    return "error_percent" if name == "errors" else name
