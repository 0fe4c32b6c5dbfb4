"""The report: from records alone, without torch, escaped, the same for the same records, and right in a real browser."""

import dataclasses
import html
import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from shf.lab import plots, report
from shf.lab.figures import NamedRun, _without_the_start, charts, metric_words, named, slug
from shf.lab.npz import write_npz
from shf.lab.plots import Chart, Series, draw, spread, thinned
from shf.lab.records import MetricsFile, RecordError, Seal, read_run, write_run

HOSTILE = '"><script>alert(1)</script>&{{7*7}}$x$'


def make_run(
    directory: Path,
    method: str = "shf",
    *,
    task: str = "autoencoder",
    epochs: int = 30,
    seed: int = 0,
    text: str = "",
    **config: Any,
) -> Path:
    """A record as training would leave it, without training."""
    directory.mkdir(parents=True)
    metric = "train_squared_error" if task == "autoencoder" else "test_errors"
    draw_from = np.random.default_rng(seed)
    metrics = MetricsFile(directory / "metrics.jsonl")
    for epoch in range(epochs + 1):
        error = 200.0 / (1 + epoch) ** 0.7 + draw_from.uniform(0, 0.5)
        row: dict[str, Any] = {"row": "epoch", "epoch": epoch, "iteration": 4 * epoch, "passes": 3.0 * epoch}
        row |= {"elapsed_seconds": 0.5 * epoch, "objective": 5 * error}
        for part, scale in (("train", 1.0), ("test", 1.1)):
            if task == "autoencoder":
                row |= {f"{part}_squared_error": scale * error, f"{part}_half_squared_error": scale * error / 2}
            else:
                row |= {f"{part}_errors": round(scale * error), f"{part}_error_percent": scale * error / 10}
        if method == "shf" and epoch:
            row |= {"damping": 0.97**epoch, "reduction_ratio": 0.8}
        metrics.append(row)
        for i in range(4 * epoch + 1, 4 * epoch + 5):
            extra = {"damping": 0.99**i, "reduction_ratio": draw_from.normal(0.8, 0.2)} if method == "shf" else {}
            metrics.append({"row": "iteration", "iteration": i, "epoch": epoch, **extra})
    metrics.flush()
    content = write_npz(_samples(task))
    (directory / "samples.npz").write_bytes(content)
    experiment = {
        "name": f"{task}-experiment{text}",
        "summary": f"An {task}{text}",
        "metric": metric,
        "figure": "Table 1",
        "paper": {"shf": 0.089, "nag": 0.078},
        "paper_note": f"unit not given{text}",
        "data": "usps" if task == "classifier" else "curves",
    }
    settings = {"learning_rate": 0.01} if method != "shf" else {"damping": 1.0}
    write_run(
        directory / "run.json",
        {
            "status": "finished",
            "command": f"shf run {task} --optimizer {method}{text}",
            "config": {
                "experiment": experiment, "method": method + text, "seed": seed, "split": 2, "settings": settings,
                "options": [f"x=1{text}"] if text else [], **config,
            },
            "versions": {"torch": "2"},
            "machine": {"processor": f"a fast one{text}"},
            "data": {"note": f"generated{text}", "checksums": {f"file{text}": "00"}},
            "warnings": [f"the disk was full{text}"] if text else [],
            "metrics": metrics.seal().to_json(),
            "samples": Seal.of(content).to_json(),
        },
    )  # fmt: skip
    return directory


def _samples(task: str) -> dict[str, Any]:
    shapes = np.zeros((6, 28, 28), np.uint8)
    for i, image in enumerate(shapes):
        image[4 + i : 20, 10:14] = 255
    if task == "regression":
        return {"maps": shapes[:2]}
    if task == "autoencoder":
        return {"originals": shapes, "reconstructions": shapes // 2}
    return {"images": shapes, "labels": np.arange(6), "predictions": np.arange(6)[::-1].copy()}


def page(*directories: Path) -> str:
    return report.render([read_run(directory) for directory in directories])


def text_of(markup: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", markup)))


# content


def test_the_page_has_ours_and_the_papers_figure_in_both_units(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    last = read_run(run).epochs[-1]
    words = text_of(page(run, make_run(tmp_path / "b", "adam")))
    assert f" shf {last['train_squared_error']:.4g} 0.089 " in words
    assert f"{last['train_half_squared_error']:.4g}" in words
    assert "training error ‖x-x̂‖² per case" in words
    assert "training error ½‖x-x̂‖² per case" in words
    assert "the paper" in words
    assert "shf run autoencoder --optimizer adam" in words
    assert "has none" in words
    assert "not tuned" in words


def test_the_page_says_on_how_many_cases_errors_are_measured(tmp_path: Path) -> None:
    directory, other = make_run(tmp_path / "a", epochs=1), make_run(tmp_path / "b", epochs=1)
    assert "Errors are measured on" not in page(directory)
    run = read_run(directory).run
    run["config"]["experiment"]["evaluation_cases"] = 1000
    write_run(directory / "run.json", run)
    assert "Errors are measured on the first 1000 cases of each part of the data." in text_of(page(directory))
    assert "Errors are measured on the first 1000 or all cases of each part" in text_of(page(directory, other))


def test_the_page_says_where_rates_come_from(tmp_path: Path) -> None:
    tuned = make_run(tmp_path / "a", "adam", tuning={"words": "tuned: 0.003 (best of 6)"})
    by_hand = make_run(tmp_path / "b", "nag", options=["learning_rate=0.5"])
    words = text_of(page(tuned, by_hand))
    assert "tuned: 0.003 (best of 6)" in words
    assert "rate set by hand" in words


def test_pictures_of_both_kinds(tmp_path: Path) -> None:
    markup = page(make_run(tmp_path / "a"), make_run(tmp_path / "b", task="classifier"))
    assert markup.count('alt="original"') == markup.count('alt="reconstruction"') == 6
    assert "0 → 5" in text_of(markup)
    assert markup.count("data:image/png;base64,") == 18
    assert "split" in text_of(markup)


def test_charts_against_epochs_seconds_and_gradients_and_of_damping_and_ratio(tmp_path: Path) -> None:
    runs = named([read_run(make_run(tmp_path / "a")), read_run(make_run(tmp_path / "b", "adam"))])
    found = charts(runs)
    assert [chart.x_label.split()[0] for chart in found] == [
        "epochs",
        "seconds",
        "gradient-equivalents",
        "epochs",
        "epochs",
    ]
    assert [chart.title for chart in found[3:]] == ["damping λ", "reduction ratio ρ"]
    curves = {series.label: series for series in found[1].series if series.label}
    assert set(curves) == {"shf", "adam"}
    np.testing.assert_allclose(curves["shf"].x, runs[0].record.column("elapsed_seconds"))
    np.testing.assert_allclose(curves["shf"].y, runs[0].record.column("train_squared_error"))
    assert [series.label for series in found[3].series] == ["shf"]
    assert found[4].references == (0.25, 0.75)


def test_the_untrained_network_does_not_press_the_curves_into_a_corner(tmp_path: Path) -> None:
    found = charts(named([read_run(make_run(tmp_path / "a"))]))[0]
    start, following = found.series[0].y[:2]
    assert found.y_limits is None or found.y_limits[1] < start
    flat = dataclasses.replace(found.series[0], y=np.array([900.0, 9.0, 8.0, 7.0]))
    limits = _without_the_start([flat])
    assert limits is not None
    assert limits[0] < 7.0 < 9.0 < limits[1] < 900.0
    assert _without_the_start([dataclasses.replace(flat, y=np.array([10.0, 9.0, 8.0]))]) is None
    assert _without_the_start([dataclasses.replace(flat, y=np.array([10.0]))]) is None
    assert following < start


def test_runs_that_differ_in_seed_share_a_colour_and_one_label(tmp_path: Path) -> None:
    records = [
        read_run(make_run(tmp_path / f"{method}{seed}", method, seed=seed))
        for seed in (1, 2)
        for method in ("nag", "shf")
    ]
    runs = named(records)
    assert [(run.label, run.colour) for run in runs] == [("shf", 0), ("shf", 0), ("nag", 1), ("nag", 1)]
    assert sorted(s.label for s in charts(runs)[0].series if s.label) == ["nag", "shf"]


def test_runs_of_several_seeds_get_their_mean_and_spread(tmp_path: Path) -> None:
    directories = [make_run(tmp_path / str(seed), seed=seed) for seed in range(5)]
    values = [read_run(d).epochs[-1]["train_squared_error"] for d in directories]
    words = text_of(page(*directories))
    assert f"shf: mean of 5 {np.mean(values):.4g} ± {np.std(values, ddof=1):.2g} 0.089" in words
    assert "mean of" not in text_of(page(directories[0]))


@pytest.mark.parametrize("status", ["interrupted", "running", "diverged"])
def test_a_run_that_did_not_finish_is_left_out_of_the_mean(tmp_path: Path, status: str) -> None:
    directories = [make_run(tmp_path / str(seed), seed=seed, epochs=30 if seed else 3) for seed in range(3)]
    values = [read_run(d).epochs[-1]["train_squared_error"] for d in directories[1:]]
    run = read_run(directories[0]).run
    write_run(directories[0] / "run.json", {**run, "status": status})
    words = text_of(page(*directories))
    assert f"shf: mean of the 2 that finished {np.mean(values):.4g} ± {np.std(values, ddof=1):.2g}" in words
    assert "mean of" not in text_of(page(*directories[:2]))


def test_a_repetition_of_a_run_does_not_count_twice(tmp_path: Path) -> None:
    first, again, other = (make_run(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert "mean of" not in text_of(page(first, again))
    values = [read_run(directory).epochs[-1]["train_squared_error"] for directory in (first, other)]
    assert f"shf: mean of 2 {np.mean(values):.4g} ±" in text_of(page(first, again, other))


def test_a_mean_of_edited_records_is_marked(tmp_path: Path) -> None:
    directories = [make_run(tmp_path / f"{seed}", seed=seed) for seed in range(2)]
    assert "not verified" not in text_of(page(*directories))
    with (directories[0] / "metrics.jsonl").open("a") as file:
        file.write(" ")
    assert text_of(page(*directories)).count("not verified") == 2  # the record's row, and the mean's


def test_a_run_without_an_epoch_yet_is_shown_without_curves(tmp_path: Path) -> None:
    words = text_of(page(make_run(tmp_path / "a", epochs=0)))
    assert "Curves" not in words
    assert "Run it again" in words


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b", "nag")
    assert page(*runs) == page(*runs)
    records = [read_run(run) for run in runs]
    first = {p.name: p.read_bytes() for p in report.write_figures(records, tmp_path / "figures")}
    second = {p.name: p.read_bytes() for p in report.write_figures(records, tmp_path / "again")}
    assert first == second
    assert len(first) == 5
    assert b"prefers-color-scheme" in first["autoencoder-experiment-damping.svg"]


# safety


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)


def test_everything_from_a_run_is_escaped(tmp_path: Path) -> None:
    """Names, options, commands, notes and paths with markup in them. Fails if the template's autoescape is off."""
    markup = page(make_run(tmp_path / HOSTILE.replace("/", ""), text=HOSTILE))
    found = _Elements()
    found.feed(markup)
    assert "script" not in found.tags
    assert not found.handlers
    assert "{{7*7}}" in html.unescape(markup)
    assert html.unescape(markup).count("alert(1)") > 8  # shown as text in the table, the notes, the charts


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    found = _Elements()
    markup = page(make_run(tmp_path / "a"), make_run(tmp_path / "b", "nag"))
    found.feed(markup)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in found.links)
    assert "default-src 'none'" in markup
    assert not re.search(r"@import|url\((?!#)", markup)
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "base"}


def test_no_torch_in_report_and_plots() -> None:
    """Drawing needs records, not the trainer: in a fresh process, with the package's own __init__ left out."""
    script = """
import sys, types, pathlib
package = types.ModuleType("shf")
package.__path__ = [sys.argv[1]]
sys.modules["shf"] = package
import shf.lab.report, shf.lab.plots, shf.lab.figures, shf.lab.experiments, shf.lab.runconfig
found = [name for name in sys.modules if name == "torch" or name.startswith("torch.")]
sys.exit(f"torch was imported: {found[:3]}" if found else 0)
"""
    source = Path(report.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script, str(source)], check=True, timeout=1200)


def test_a_name_from_a_record_stays_inside_the_directory(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", text="/../../etc/passwd")
    written = report.write_figures([read_run(run)], tmp_path / "figures")
    assert all(path.parent == tmp_path / "figures" for path in written)
    assert slug("../..") == "chart"


def test_a_record_that_cannot_be_read_is_refused_or_passed_over(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    (bad / "run.json").write_text("{")
    with pytest.raises(RecordError, match=r"run.json.*\n.*--unverified"):
        report.read_verified([good, bad])
    assert [record.directory for record in report.read_verified([good, bad], unverified=True)] == [good]
    with pytest.raises(RecordError, match=r"run.json"):
        report.read_verified([bad], unverified=True)


@pytest.mark.parametrize("name", ["warnings", "earlier", "data", "versions", "machine", "summary", "config"])
@pytest.mark.parametrize("value", [5, "text"])
def test_a_part_that_is_of_another_kind_is_refused_in_words(tmp_path: Path, name: str, value: Any) -> None:
    run = make_run(tmp_path / "a")
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, name: value}))
    with pytest.raises(RecordError, match=f"run.json: not a record of a run: {name} is {value!r}, expected a"):
        report.read_verified([run], unverified=True)


@pytest.mark.parametrize("name", ["settings", "tuning", "options", "pretraining"])
def test_a_configuration_of_another_kind_is_refused_in_words(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "a")
    content = json.loads((run / "run.json").read_text())
    content["config"][name] = 5
    (run / "run.json").write_text(json.dumps(content))
    with pytest.raises(RecordError, match=f"{name} is 5, expected a"):
        report.read_verified([run], unverified=True)


def test_an_edited_record_is_refused_or_marked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"epoch":3,', '"epoch":4,', 1))
    with pytest.raises(RecordError, match=r"metrics.jsonl was changed.*\n.*--unverified"):
        report.read_verified([run])
    words = text_of(report.render(report.read_verified([run], unverified=True)))
    assert "Not verified." in words
    assert "finished , not verified" in words or "finished, not verified" in words


def test_runs_are_found_below_directories(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "runs" / "x" / "a"), make_run(tmp_path / "runs" / "b")
    assert report.find_runs([tmp_path / "runs"]) == [b, a]
    assert report.find_runs([a, tmp_path / "runs"]) == [a, b]
    above = tmp_path / "runs"
    shutil.copytree(make_run(tmp_path / "c"), above, dirs_exist_ok=True)
    assert report.find_runs([tmp_path / "runs"]) == [above, b, a], "also below a run"
    assert report.find_runs([a, tmp_path / "runs"]) == [a, above, b]
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(RecordError, match=place.name):
            report.find_runs([place])


@pytest.mark.parametrize("config", [{}, {"experiment": 3}, {"experiment": {"name": "x"}}])
def test_a_record_without_an_experiment_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.flush()
    write_run(tmp_path / "run.json", {"config": config, "metrics": metrics.seal().to_json()})
    with pytest.raises(RecordError, match="names no experiment"):
        page(tmp_path)


def runs_below(place: Path) -> list[NamedRun]:
    return named(report.read_verified(report.find_runs([place])))


def test_only_replicates_share_a_name(tmp_path: Path) -> None:
    """Runs of one method with another budget, other settings or other tuning are no seeds of each other."""
    make_run(tmp_path / "a", "adam", seed=0, epochs=3)
    make_run(tmp_path / "b", "adam", seed=1, epochs=3)
    assert [run.label for run in runs_below(tmp_path)] == ["adam", "adam"]
    make_run(tmp_path / "c", "adam", seed=0, epochs=3, settings={"learning_rate": 0.5}, tuning={"words": "tuned"})
    assert [run.label for run in runs_below(tmp_path)] == [
        "adam, not tuned",
        "adam, not tuned",
        "adam, tuned",
    ]
    make_run(tmp_path / "d", "adam", seed=0, epochs=3, settings={"learning_rate": 0.7})
    assert len({run.label for run in runs_below(tmp_path)}) == 4


def test_directories_of_one_name_do_not_make_replicates(tmp_path: Path) -> None:
    for place, rate in (("before", 0.1), ("after", 0.2)):
        make_run(tmp_path / place / "adam-seed0", "adam", epochs=3, settings={"learning_rate": rate})
    assert len({run.label for run in runs_below(tmp_path)}) == 2
    assert "mean of" not in text_of(page(*report.find_runs([tmp_path])))


def test_a_method_without_a_rate_is_not_called_untuned(tmp_path: Path) -> None:
    for budget in (2, 3):
        make_run(tmp_path / str(budget), epochs=3, minutes=budget)
    assert [run.label for run in runs_below(tmp_path)] == ["shf, 2 minutes", "shf, 3 minutes"]


def test_a_run_that_is_named_twice_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "a", epochs=1)
    monkeypatch.chdir(tmp_path)
    assert report.find_runs([Path("a"), tmp_path / "a", Path()]) == [Path("a")]


def test_a_rate_set_by_hand_is_not_called_tuned(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "adam", epochs=1, options=["learning_rate=0.5"], tuning={"words": "tuned: 0.003"})
    shown = page(tmp_path / "a")
    assert "rate set by hand" in shown
    assert "tuned: 0.003" not in shown
    longer = {"options": ["learning_rate=0.5"], "tuning": {"words": "tuned: 0.003"}, "minutes": 2}
    make_run(tmp_path / "b", "adam", epochs=1, **longer)
    assert {run.label for run in runs_below(tmp_path)} == {
        "adam learning_rate=0.5",
        "adam learning_rate=0.5, 2 minutes",
    }


def test_settings_over_a_search_are_named(tmp_path: Path) -> None:
    tuning = {"words": "tuned: 0.003, momentum 0.99", "settings": {"learning_rate": 0.003, "momentum_max": 0.99}}
    make_run(tmp_path / "a", "nag", epochs=1, options=["momentum_max=0.9", "input_dropout=0.2"], tuning=tuning)
    shown = text_of(page(tmp_path / "a"))
    assert "tuned: 0.003, momentum 0.99; momentum max set by hand; input dropout set by hand" in shown


def test_the_clock_is_named_where_it_is_not_the_walls(tmp_path: Path) -> None:
    make_run(tmp_path / "a", epochs=2, clock="processor")
    axes = [chart.x_label for chart in charts(runs_below(tmp_path))]
    assert "seconds of training (processor time)" in axes
    assert "without evaluation and pretraining" in text_of(page(tmp_path / "a"))
    make_run(tmp_path / "b", epochs=2, seed=1)
    words = text_of(page(tmp_path / "a", tmp_path / "b"))
    assert words.count(" 1 s (processor) ") == 1
    assert words.count(" 1 s ") == 2


# drawing


def chart(*series: Series, **options: Any) -> Chart:
    return Chart("test", "title", "epochs", series, **options)


def test_a_drawing_has_variables_for_colours_and_no_fixed_size() -> None:
    x = np.arange(1.0, 50)
    svg = draw(chart(Series("one", x, 1 / x), Series("two", x, x, colour=3, dashed=True), log_y=True))
    assert "var(--series-0," in svg
    assert "var(--series-3," in svg
    assert "#0103" not in svg
    assert not re.search(r"<svg[^>]* (width|height)=", svg)
    assert "<metadata>" not in svg


def test_ids_are_unique_and_referred_to() -> None:
    svg = draw(chart(Series("one", np.arange(9.0), np.arange(9.0))))
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert all(f"#{name}" in svg for name in ids)


@pytest.mark.parametrize(
    "values",
    [[], [np.nan] * 3, [0.0, 0.0], [1e-30, 1e30], [-1.0, 1.0], [5.0], [np.inf, 1.0, 2.0]],
    ids=["empty", "nan", "zero", "wide", "signed", "point", "inf"],
)
def test_strange_data_are_drawn_all_the_same(values: list[float]) -> None:
    y = np.array(values, dtype=np.float64)
    for log_x in (False, True):
        assert draw(chart(Series("one", np.arange(float(len(y))), y), log_y=True, log_x=log_x)).startswith("<svg")


def test_a_log_scale_of_time_has_its_powers_of_ten_and_leaves_out_the_start() -> None:
    x, y = np.array([0.0, 1, 10, 100, 1000, 10_000]), np.array([7e6, 5, 4, 3, 2, 1])
    svg = draw(chart(Series("one", x, y), log_x=True))
    assert all(f">{tick}<" in svg for tick in (1, 10, 100, 1000, 10000))
    assert "e+06" not in svg


def test_labels_are_moved_apart_in_order() -> None:
    placed = spread([0.5, 0.51, 0.49, 0.0, 1.0], 0.1)
    assert sorted(range(5), key=placed.__getitem__) == [3, 2, 0, 1, 4]
    ordered = sorted(placed)
    assert all(b - a > 0.0999 for a, b in itertools.pairwise(ordered))
    assert ordered[-1] <= 1.0 + 1e-9


def test_thinning_keeps_the_ends_and_the_spikes() -> None:
    x = np.arange(100_000.0)
    y = np.zeros_like(x)
    y[54_321], y[777] = 9.0, np.nan
    tx, ty = thinned(x, y)
    assert tx.size <= 600
    assert (tx[0], tx[-1]) == (0, 99_999)
    assert ty.max() == 9.0


def test_metric_words() -> None:
    assert metric_words("test_error_percent") == "test error, %"
    assert metric_words("train_half_squared_error") == "training error ½‖x-x̂‖² per case"


def test_the_palette_can_be_read_on_its_ground() -> None:
    """Text at 4.5:1 or more, lines at 3:1 (WCAG), in light and in dark."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for ground, palette in (("#ffffff", plots._LIGHT), ("#14181d", plots._DARK)):
        for name, colour in palette.items():
            least = 4.5 if name in ("--ink", "--quiet") else 3.0
            assert name == "--grid" or contrast(colour, ground) >= least, (ground, name)


# in a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--hide-scrollbars", "--force-device-scale-factor=1"),
    "--enable-logging=stderr",
)
DARK = ["--blink-settings=preferredColorScheme=0"]

PROBE = """<script>
window.addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("svg")].map((s) => s.getBoundingClientRect());
  const root = document.documentElement;
  root.dataset.probe = JSON.stringify({
    charts: boxes.filter((b) => b.width > 200 && b.height > 100).length,
    images: [...document.images].filter((i) => i.complete && i.naturalWidth > 0).length,
    missing: [...document.images].filter((i) => !i.naturalWidth).length,
    overflow: root.scrollWidth - root.clientWidth,
    smallest: Math.min(...[...document.querySelectorAll("svg text")].map((t) => t.getBoundingClientRect().height)),
  });
});
</script></head>"""


def browse(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)


@pytest.fixture
def sample_page(tmp_path: Path) -> Path:
    runs = [make_run(tmp_path / name, name) for name in ("shf", "adam", "nag")]
    runs.append(make_run(tmp_path / "classes", task="classifier"))
    report.write_report([read_run(run) for run in runs], tmp_path / "report.html")
    return tmp_path / "report.html"


def test_a_map_is_shown_once_and_then_as_each_has_learned_it(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, name, task="regression") for name in ("fast", "adam")]
    shown = page(*runs)
    assert [f'alt="the map as learned by {name}"' in shown for name in ("fast", "adam", "nag")] == [True, True, False]
    assert shown.count("data:image/png") == 3


def test_what_the_paper_reports_has_a_column_where_it_reports_something(tmp_path: Path) -> None:
    assert '<th scope="col">the paper</th>' in page(make_run(tmp_path / "a", "nag"))
    assert '<th scope="col">the paper</th>' not in page(make_run(tmp_path / "b", "adam"))


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: the page is not opened in a browser"
)


@needs_chromium
@pytest.mark.parametrize(("width", "extra"), [(1280, []), (1280, DARK), (500, [])], ids=["light", "dark", "phone"])
def test_the_page_in_a_browser(sample_page: Path, tmp_path: Path, width: int, extra: list[str]) -> None:
    """No console message; charts and images have a size; nothing sticks out sideways; the curves' colours are on screen."""
    shot = tmp_path / "shot.png"
    window = f"--window-size={width},2400"
    seen = browse(tmp_path / "p1", *extra, window, f"--screenshot={shot}", sample_page.as_uri())
    assert "CONSOLE" not in seen.stderr
    pixels = (matplotlib.image.imread(shot)[:, :, :3] * 255).round().astype(int)
    palette = plots._DARK if extra else plots._LIGHT
    for name in ("--series-0", "--series-1", "--series-2"):
        colour = [int(palette[name][i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - colour).sum(axis=2) < 12).sum() > 50, name
    assert (pixels[2, 2] > 200).all() != bool(extra)

    probed = tmp_path / "probed.html"
    markup = sample_page.read_text()
    policy = re.search(r"<meta http-equiv[^>]*>", markup)
    assert policy is not None
    probed.write_text(markup.replace(policy[0], "").replace("</head>", PROBE))
    dom = browse(tmp_path / "p2", *extra, window, "--dump-dom", probed.as_uri()).stdout
    found = json.loads(html.unescape(re.search(r'data-probe="([^"]*)"', dom)[1]))
    assert found["charts"] == 10
    assert found["images"] == 42
    assert found["missing"] == 0
    assert found["overflow"] <= 0
    assert found["smallest"] >= 9


@needs_chromium
def test_a_hostile_run_shows_nothing_but_text(tmp_path: Path) -> None:
    """A script from a record would rewrite the title; it must stay what it is."""
    attack = '"><img src=x onerror="document.title=1"><script>document.title=2</script>'
    report.write_report([read_run(make_run(tmp_path / "a", text=attack))], tmp_path / "report.html")
    dom = browse(tmp_path / "p", "--dump-dom", (tmp_path / "report.html").as_uri())
    assert "<title>shf report" in dom.stdout
    found = _Elements()
    found.feed(dom.stdout)
    assert "script" not in found.tags
    assert not found.handlers
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in found.links)
    assert "CONSOLE" not in dom.stderr
