"""One self-contained HTML page about runs, from their records alone. No torch here, no network, no script.

Everything that comes from a record (names, options, commands, notes) passes through the template's escaping or
matplotlib's; the page forbids scripts to itself besides.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.image import imsave
from numpy.typing import NDArray

from shf.lab.figures import NamedRun, charts, counterpart, is_set, metric_words, named, slug
from shf.lab.files import write_atomically
from shf.lab.plots import SERIES_COLOURS, draw, palette_css
from shf.lab.records import RUN_FILE, RecordError, RunRecord, number, read_run
from shf.lab.words import duration


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The run directories among and below the given directories, in order of their names; a run may have others below it."""
    found: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            raise RecordError(f"{place} is no directory; expected a run, or a directory with runs in it")
        for directory in sorted(p.parent for p in place.rglob(RUN_FILE)):
            found.setdefault(directory.resolve(), directory)
    if not found:
        raise RecordError(f"{', '.join(map(str, places))} holds no run: there is no {RUN_FILE} in it or below")
    return list(found.values())


def read_verified(directories: Sequence[Path], *, unverified: bool = False) -> list[RunRecord]:
    """The records of the runs. One that was changed after it was written, or cannot be read, is refused unless
    `unverified`; what can be read is then shown."""
    records, problems = [], []
    for directory in directories:
        try:
            record = read_run(directory)
        except RecordError as error:
            problems.append(str(error))
            continue
        records.append(record)
        problems += [f"{directory}: {problem}" for problem in record.problems]
    if problems and not unverified:
        raise RecordError(
            "records that cannot be trusted:\n" + "\n".join(problems) + "\nShow them all the same with --unverified."
        )
    if not records:
        raise RecordError("\n".join(problems))
    return records


def is_of_experiment(record: RunRecord) -> bool:
    """Whether it is a run of an experiment; of other records (of a contest, say) this page has nothing to say."""
    experiment = record.config.get("experiment")
    named = isinstance(experiment, Mapping) and "name" in experiment and "metric" in experiment
    return named and "method" in record.config


def write_report(records: Sequence[RunRecord], path: Path) -> None:
    """Write the page. The same records give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(records).encode())


def write_figures(records: Sequence[RunRecord], directory: Path) -> list[Path]:
    """Every chart of the page as an SVG file of its own, for light and dark."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for group in _by_experiment(records).values():
        for chart in charts(named(group)):
            path = directory / f"{chart.name}.svg"
            write_atomically(path, draw(chart, standalone=True).encode())
            written.append(path)
    return written


def render(records: Sequence[RunRecord]) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("shf.lab", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [_section(name, group) for name, group in _by_experiment(records).items()]
    return environment.get_template("report.html").render(
        sections=sections,
        palette=Markup(palette_css()),
        runs=len(records),
        problems=[f"{record.directory.name}: {problem}" for record in records for problem in record.problems],
    )


def _by_experiment(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        if not is_of_experiment(record):
            raise RecordError(
                f"{record.directory / RUN_FILE}: its configuration names no experiment, metric and method"
            )
        groups.setdefault(str(record.config["experiment"]["name"]), []).append(record)
    return groups


def _section(name: str, records: Sequence[RunRecord]) -> dict[str, Any]:
    """What the page says about one experiment."""
    runs = named(records)
    experiment = records[0].config["experiment"]
    columns, drawn = _columns(runs), charts(runs)
    return {
        "name": name,
        "anchor": slug(name),
        **{key: str(experiment.get(key, "")) for key in ("summary", "figure", "paper_note")},
        "data_note": str((records[0].run.get("data") or {}).get("note", "")),
        "cases": _evaluated(records),
        "columns": [metric_words(column) for column in columns],
        "rows": list(_rows(runs, columns)),
        "damped": any(chart.references for chart in drawn),
        "figures": [Markup(draw(chart)) for chart in drawn],
        "pictures": [picture for run in runs if (picture := _picture(run))],
        "details": [_details(run) for run in runs],
    }


def _evaluated(records: Sequence[RunRecord]) -> str:
    """Which cases of each part of the data errors are measured on; nothing where all runs take all."""
    found = {record.config["experiment"].get("evaluation_cases") for record in records}
    first = [f"the first {cases}" for cases in sorted(cases for cases in found if isinstance(cases, int))]
    return " or ".join([*first, *(["all"] if None in found else [])]) if first else ""


def _columns(runs: Sequence[NamedRun]) -> list[str]:
    """The judged error first, then the same in the other unit and on the other part of the data."""
    metric = runs[0].metric
    halved = [metric.replace("squared", "half_squared")] if metric.partition("_")[2] == "squared_error" else []
    return [metric, *halved, counterpart(metric)]


def _rows(runs: Sequence[NamedRun], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row per run, and after runs that differ in seed or split alone their mean and standard deviation.

    Only finished runs are averaged: one that was stopped early or diverged has not reached what the others have. A run
    that was made twice counts once: a repetition tells nothing of chance.
    """
    for label in dict.fromkeys(run.label for run in runs):
        group = [run for run in runs if run.label == label]
        yield from (_row(run, columns) for run in group)
        draws = _by_chance(group)
        finished = _by_chance([run for run in group if run.record.status == "finished"])
        if len(finished) > 1:
            which = f"{len(finished)}" if len(finished) == len(draws) else f"the {len(finished)} that finished"
            yield _mean_row(list(finished.values()), columns, f"{label}: mean of {which}")


def _by_chance(runs: Sequence[NamedRun]) -> dict[tuple[Any, Any], NamedRun]:
    """The first run of each seed and split."""
    found: dict[tuple[Any, Any], NamedRun] = {}
    for run in runs:
        found.setdefault((run.record.config.get("seed"), run.record.config.get("split")), run)
    return found


def _mean_row(group: Sequence[NamedRun], columns: Sequence[str], label: str) -> dict[str, Any]:
    last = [run.record.epochs[-1] if run.record.epochs else {} for run in group]
    best = [_best(run) for run in group]
    return {
        **_row(group[0], columns),
        "label": label,
        "values": [_mean([number(row.get(column)) for row in last]) for column in columns],
        "best": _mean(best),
        **dict.fromkeys(("epochs", "time", "passes", "tuned", "status", "seed", "split"), ""),
        "trusted": all(not run.record.problems for run in group),
        "mean": True,
    }


def _mean(values: Sequence[float]) -> str:
    """Mean ± standard deviation (of the sample) of all of them, or none."""
    if not np.isfinite(values).all():
        return "–"
    return f"{np.mean(values):.4g} ± {np.std(values, ddof=1):.2g}"


def _row(run: NamedRun, columns: Sequence[str]) -> dict[str, Any]:
    record, config = run.record, run.record.config
    last = record.epochs[-1] if record.epochs else {}
    paper = (config["experiment"].get("paper") or {}).get(config["method"])
    return {
        "label": run.label,
        "colour": run.colour % SERIES_COLOURS,
        "seed": config.get("seed"),
        "split": config.get("split") if config["experiment"].get("data") == "usps" else None,
        "values": [_figure(last.get(column)) for column in columns],
        "best": _figure(_best(run)),
        "paper": "–" if paper is None else _figure(paper),
        "epochs": _figure(last.get("epoch")),
        "time": _time(last.get("elapsed_seconds"), str(config.get("clock", "wall"))),
        "passes": _figure(last.get("passes"), 3),
        "status": record.status,
        "trusted": not record.problems,
        "tuned": _tuning_words(config),
        "mean": False,
    }


def _best(run: NamedRun) -> float:
    """The lowest of the judged error; NaN where there is none."""
    values = run.record.column(run.metric)
    return float(np.nanmin(values)) if np.isfinite(values).any() else float("nan")


def _tuning_words(config: Mapping[str, Any]) -> str:
    """Where the method's rate comes from, in a few words."""
    if is_set(config, "learning_rate"):
        return "rate set by hand"
    if tuning := config.get("tuning"):
        by_hand = [name for name in (*(tuning.get("settings") or {}), "input_dropout") if is_set(config, name)]
        words = [str(tuning.get("words", "tuned")), *(f"{name.replace('_', ' ')} set by hand" for name in by_hand)]
        return "; ".join(words)
    return "not tuned" if "learning_rate" in (config.get("settings") or {}) else "has none"


def _time(seconds: Any, clock: str) -> str:
    """Time says what clock it is of where it is not the wall's."""
    return duration(number(seconds)) + (f" ({clock})" if clock != "wall" else "")


def _figure(value: Any, digits: int = 4) -> str:
    x = number(value)
    if not np.isfinite(x):
        return "–"
    whole = x == int(x) or abs(x) >= 10**digits
    return f"{x:.0f}" if whole and abs(x) < 1e7 else f"{x:.{digits}g}"


def _details(run: NamedRun) -> dict[str, Any]:
    record = run.record
    return {
        "label": run.label,
        "command": str(record.run.get("command", "")),
        "settings": _pairs(record.config.get("settings")),
        "versions": _pairs(record.run.get("versions")),
        "machine": _pairs(record.run.get("machine")),
        "data": _pairs((record.run.get("data") or {}).get("checksums")),
        "created": str(record.run.get("created", "")),
        "warnings": [str(w) for w in record.run.get("warnings") or ()],
        "problems": list(record.problems),
    }


def _pairs(mapping: Any) -> list[tuple[str, str]]:
    return [(str(k), str(v)) for k, v in mapping.items()] if isinstance(mapping, Mapping) else []


def _picture(run: NamedRun) -> dict[str, Any] | None:
    """Originals above reconstructions, misclassified digits with what they are and what they were taken for, or a map."""
    found = run.record.samples
    if "originals" in found and "reconstructions" in found:
        pairs = zip(_image_urls(found["originals"]), _image_urls(found["reconstructions"]), strict=False)
        return {"label": run.label, "kind": "autoencoder", "pairs": list(pairs)}
    if "maps" in found:
        return {"label": run.label, "kind": "map", "maps": _image_urls(found["maps"], colours="terrain")}
    if {"images", "labels", "predictions"} <= set(found):
        urls = _image_urls(found["images"])
        answers = zip(found["labels"].reshape(-1).tolist(), found["predictions"].reshape(-1).tolist(), strict=False)
        return {"label": run.label, "kind": "classifier", "digits": list(zip(urls, answers, strict=False))}
    return None


def _image_urls(images: NDArray[Any], colours: str = "gray_r") -> list[str]:
    """Images as data URLs, by default grey with ink dark on light."""
    fit = images.ndim == 3 and images.dtype == np.uint8
    return [_image_url(image, colours) for image in images] if fit else []


def _image_url(image: NDArray[np.uint8], colours: str) -> str:
    buffer = io.BytesIO()
    imsave(buffer, image, cmap=colours, vmin=0, vmax=255, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
