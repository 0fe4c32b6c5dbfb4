"""From the records of runs to charts: learning curves, damping and reduction ratio. No torch here."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shf.lab.plots import Chart, Series, Values
from shf.lab.records import RunRecord

_FEW_EPOCHS = 40

METRIC_WORDS = {
    "errors": "errors",
    "error_percent": "error, %",
    "squared_error": "error ‖x-x̂‖² per case",
    "half_squared_error": "error ½‖x-x̂‖² per case",
    "rms_error": "error, m (root mean square)",
    "loss": "loss per case",
}
AXES = {
    "epoch": "epochs",
    "elapsed_seconds": "seconds of training",
    "passes": "gradient-equivalents (passes over the training data)",
}


@dataclass(frozen=True)
class NamedRun:
    """A record with the name and colour under which the report shows it; runs that differ in seed or split share both."""

    record: RunRecord
    label: str
    colour: int

    @property
    def metric(self) -> str:
        return str(self.record.config["experiment"]["metric"])


def counterpart(metric: str) -> str:
    """The same error on the other part of the data: 'test_loss' of 'train_loss'."""
    part, _, name = metric.partition("_")
    return f"{'test' if part == 'train' else 'train'}_{name}"


def metric_words(metric: str) -> str:
    """'train_squared_error' as 'training error ‖x-x̂‖² per case'."""
    part, _, name = metric.partition("_")
    words = {"train": "training", "test": "test"}.get(part, part)
    return f"{words} {METRIC_WORDS.get(name, name.replace('_', ' '))}"


def named(records: Sequence[RunRecord]) -> list[NamedRun]:
    """Labels and colours for the runs of one experiment, in the order of both; SHF comes first."""
    labels = _labels(records)
    order = sorted(set(labels), key=lambda label: (not label.startswith("shf"), labels.index(label)))
    runs = [NamedRun(record, label, order.index(label)) for record, label in zip(records, labels, strict=True)]
    return sorted(runs, key=lambda run: run.colour)


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """Names under which only runs that differ in nothing but seed and split come together."""
    for name in (_label, _longer_label, lambda record: f"{_longer_label(record)} in {record.directory.name}"):
        labels = [name(record) for record in records]
        kinds = {(label, _kind(record)) for label, record in zip(labels, records, strict=True)}
        if len(kinds) == len(set(labels)):
            return labels
    return [f"{_longer_label(record)} in {record.directory}" for record in records]


def _kind(record: RunRecord) -> str:
    """All of a configuration that is not chance: without seed, split, and what does not change the numbers."""
    left_out = ("seed", "split", "threads", "rows_every", "evaluate_seconds", "tuning")
    config = {key: value for key, value in record.config.items() if key not in left_out}
    config["settings"] = {key: value for key, value in (config.get("settings") or {}).items() if key != "seed"}
    return json.dumps(config, sort_keys=True, default=str)


def _longer_label(record: RunRecord) -> str:
    """With the budget, and where the settings come from if there is a rate to tune."""
    config = record.config
    limits = [f"{config[unit]:g} {unit}" for unit in ("epochs", "minutes") if config.get(unit) is not None]
    untuned = ["not tuned"] if "learning_rate" in (config.get("settings") or {}) else []
    origin = ["tuned"] if config.get("tuning") else untuned
    return ", ".join([_label(record), *limits, *([] if is_set(config, "learning_rate") else origin)])


def is_set(config: Mapping[str, Any], name: str) -> bool:
    """Whether a setting was given by ``--set``, over one that may have been tuned."""
    return any(str(option).startswith(f"{name}=") for option in config.get("options") or ())


def _label(record: RunRecord) -> str:
    """The method and what was set by hand, for instance 'shf damping=0.1'."""
    config = record.config
    pretraining = config.get("pretraining")
    words = [str(config["method"]), *map(str, config.get("options") or ())]
    if pretraining:
        words.append(f"{pretraining['method']} pretraining")
    return " ".join(words)


def charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """The charts of one experiment, those first that people look for first."""
    if not any(len(run.record.epochs) > 1 for run in runs):
        return []
    return [*(_learning_curves(runs, axis) for axis in AXES), *_method_charts(runs)]


def _learning_curves(runs: Sequence[NamedRun], axis: str) -> Chart:
    """The judged error as a line, its counterpart on the other part of the data dashed."""
    metric = runs[0].metric
    name = metric.partition("_")[2]
    series = [s for run, label in _labelled_once(runs) for s in _pair(run, label, axis, metric)]
    limits = _without_the_start(series)
    every = np.concatenate([s.y[np.isfinite(s.y) & (s.y > 0)] for s in series] or [np.ones(1)])
    span = limits or ((float(every.min()), float(every.max())) if every.size else (1.0, 1.0))
    experiment = str(runs[0].record.config["experiment"]["name"])
    return Chart(
        name=slug(f"{experiment} {name} {axis}"),
        title=metric_words(metric),
        x_label=_axis_words(axis, runs),
        series=tuple(series),
        log_y=span[1] > 4 * span[0],
        y_limits=limits,
    )


def _axis_words(axis: str, runs: Sequence[NamedRun]) -> str:
    """Seconds say what clock they are of where it is not the wall's."""
    clocks = {str(run.record.config.get("clock", "wall")) for run in runs} - {"wall"}
    return f"{AXES[axis]} ({' or '.join(sorted(clocks))} time)" if axis == "elapsed_seconds" and clocks else AXES[axis]


def _without_the_start(series: Sequence[Series]) -> tuple[float, float] | None:
    """Limits that leave out the untrained network where it would press all that follows into a corner."""
    later = np.concatenate([s.y[1:] for s in series] or [np.zeros(0)])
    later = later[np.isfinite(later) & (later > 0)]
    starts = [float(s.y[0]) for s in series if s.y.size and np.isfinite(s.y[0])]
    if not later.size or not starts or max(starts) < 2 * float(later.max()):
        return None
    return 0.93 * float(later.min()), 1.08 * float(later.max())


def _pair(run: NamedRun, label: str, axis: str, metric: str) -> Iterator[Series]:
    x = run.record.column(axis)
    yield Series("", x, run.record.column(counterpart(metric)), run.colour, dashed=True)
    yield Series(label, x, run.record.column(metric), run.colour)


def _labelled_once(runs: Sequence[NamedRun]) -> Iterator[tuple[NamedRun, str]]:
    """Every run with its label at its first appearance, and with none later."""
    seen: set[str] = set()
    for run in runs:
        yield run, "" if run.label in seen else run.label
        seen.add(run.label)


def _method_charts(runs: Sequence[NamedRun]) -> Iterator[Chart]:
    """Damping and reduction ratio, of the runs that have them."""
    having = [run for run in runs if np.isfinite(run.record.column("damping")).any()]
    if not having:
        return
    damping, ratio = ([_over_epochs(run, name) for run in having] for name in ("damping", "reduction_ratio"))
    experiment = str(runs[0].record.config["experiment"]["name"])
    named = list(_labelled_once(having))
    lines = tuple(Series(label, *at, run.colour) for (run, label), at in zip(named, damping, strict=True))
    yield Chart(slug(f"{experiment} damping"), "damping λ", "epochs", lines, log_y=True)
    clipped = ((x, np.clip(y, -0.5, 1.75)) for x, y in ratio)
    lines = tuple(Series(label, *at, run.colour) for (run, label), at in zip(named, clipped, strict=True))
    title, name = "reduction ratio ρ", slug(f"{experiment} reduction-ratio")
    yield Chart(name, title, "epochs", lines, references=(0.25, 0.75), y_limits=(-0.55, 1.8))


def _over_epochs(run: NamedRun, field: str) -> tuple[Values, Values]:
    """A field against epochs: every iteration of a short run, every epoch of a long one."""
    record = run.record
    if len(record.epochs) > _FEW_EPOCHS or not record.iterations:
        return record.column("epoch"), record.column(field)
    epochs, iterations = record.column("epoch"), record.column("iteration")
    x = np.interp(record.column("iteration", "iteration"), iterations, epochs)
    return x, record.column(field, "iteration")


def slug(text: str) -> str:
    """A harmless file name: what a record says never leads out of a directory."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80] or "chart"
