"""The queue of runs at the paper's settings, the claims, and the page made from the records."""

import fnmatch
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs_helpers import REPOSITORY, assert_same_run, tiny_config, tiny_experiment
from typer.testing import CliRunner

from shf.lab import experiments, runner
from shf.lab.configure import Request, configure
from shf.lab.lock import locked
from shf.lab.observer import Observer
from shf.lab.records import RecordError, RunRecord, read_run
from shf.lab.rerun import queue
from shf.lab.rerun.__main__ import app
from shf.lab.rerun.charts import FIGURE_LIST
from shf.lab.rerun.claims import CLAIMS, Claim, Verdict
from shf.lab.rerun.entries import ENTRIES, Run, Tuning
from shf.lab.rerun.judges import calmer, competitive, final, settled, vanishes
from shf.lab.rerun.page import PAGE, write_page
from shf.lab.rerun.quotes import MARKED, quoted

RECORDS, DOCS = REPOSITORY / "results" / "paper", REPOSITORY / "docs"


def silent(_: str) -> None:
    pass


class Interrupts(Observer):
    """A signal in the fourth iteration."""

    def iteration(self, row: Any, progress: Any) -> None:
        if progress.iteration == 4:
            signal.raise_signal(signal.SIGTERM)


# --- entries ---------------------------------------------------------------------------------------------------------


def test_every_entry_can_be_configured():
    for entry in ENTRIES:
        if isinstance(entry, Run):
            assert configure(entry.request).threads == 1


def test_names_are_unique_and_every_claim_and_figure_names_an_entry():
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    wanted = {run for claim in CLAIMS for run in claim.runs} | {
        run for figures in FIGURE_LIST.values() for figure in figures for run in figure.runs
    }
    assert wanted <= set(names)


def test_a_search_comes_before_the_runs_that_use_it():
    searched = {(e.experiment, e.method): i for i, e in enumerate(ENTRIES) if isinstance(e, Tuning)}
    uses = [(i, e.request) for i, e in enumerate(ENTRIES) if isinstance(e, Run) and not e.request.untuned]
    assert searched
    for (experiment, method), place in searched.items():
        runs = [i for i, request in uses if (request.experiment, request.method) == (experiment, method)]
        assert runs
        assert place < min(runs)


def test_trials_that_all_train_in_full_make_one_rung(monkeypatch, tmp_path):
    asked: list[Any] = []
    monkeypatch.setattr(queue, "tune_experiment", lambda *args, **options: asked.append((args, options)))
    monkeypatch.setattr(queue, "write_choice", lambda *_: None)
    (entry, *_) = [
        e for e in ENTRIES if isinstance(e, Tuning) and e.name == "tune usps-classifier-dropout dropout-sgd-last"
    ]
    queue._tune(entry, tmp_path, None)
    ((experiment, spec), options) = asked[0]
    assert experiment.initialisation == "normalised"
    assert spec.grid == {"learning_rate": (10.0, 3.0, 1.0, 0.3), "rate_decay": (0.993,), "momentum_epochs": (150,)}
    assert options["keep"] == 4
    assert options["budget"].iterations == 4 * 300 * 67


# --- queue -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def entries(monkeypatch) -> list[Run]:
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"tiny": tiny_experiment()})
    requests = {f"tiny/{seed}": Request("tiny", epochs=3, seed=seed, threads=1) for seed in (0, 1)}
    return [Run(name, request) for name, request in requests.items()]


def test_the_queue_runs_what_is_missing_and_nothing_twice(entries, tmp_path):
    heard: list[str] = []
    assert queue.work(entries, tmp_path, say=heard.append)
    assert heard == ["tiny/0", "tiny/1"]
    assert all(queue.is_done(entry, tmp_path) for entry in entries)
    assert queue.work(entries, tmp_path, say=heard.append)
    assert len(heard) == 2


def test_an_interrupted_queue_goes_on_exactly(entries, tmp_path):
    assert not queue.work(entries, tmp_path / "a", observer=Interrupts(), say=silent)
    assert read_run(tmp_path / "a" / "tiny/0").status == "interrupted"
    assert not (tmp_path / "a" / "tiny/1").exists()
    assert queue.work(entries, tmp_path / "a", say=silent)
    assert queue.work(entries, tmp_path / "b", say=silent)
    for entry in entries:
        assert_same_run(tmp_path / "a" / entry.name, tmp_path / "b" / entry.name)


def test_a_run_that_is_given_more_goes_on(entries, tmp_path):
    """Fails if a finished record is done whatever it was asked for: tables would name minutes that it did not have."""
    queue.work(entries[:1], tmp_path, say=silent)
    longer = replace(entries[0], request=replace(entries[0].request, epochs=5))
    assert not queue.is_done(longer, tmp_path)
    assert queue.work([longer], tmp_path, say=silent)
    assert read_run(tmp_path / "tiny/0").run["summary"]["epochs"] == 5
    assert queue.is_done(longer, tmp_path)
    assert queue.is_done(entries[0], tmp_path)
    queue.work(entries[1:], tmp_path, observer=Interrupts(), say=silent)
    longest = replace(entries[1], request=replace(entries[1].request, epochs=4))
    assert queue.work([longest], tmp_path, say=silent)
    assert read_run(tmp_path / "tiny/1").run["summary"]["epochs"] == 4


def test_a_run_of_minutes_goes_on_when_it_is_asked_for_epochs(entries, tmp_path):
    """Fails if a run that its minutes ended is done although its claim asks for more epochs."""
    hasty = replace(entries[0], request=replace(entries[0].request, epochs=None, minutes=1e-9))
    assert queue.work([hasty], tmp_path, say=silent)
    assert queue.is_done(hasty, tmp_path)
    assert not queue.is_done(entries[0], tmp_path)
    assert queue.work(entries[:1], tmp_path, say=silent)
    assert read_run(tmp_path / "tiny/0").run["summary"]["epochs"] == 3


def test_an_interrupted_record_without_checkpoints_is_left_as_it_is(entries, tmp_path):
    queue.work(entries, tmp_path, observer=Interrupts(), say=silent)
    shutil.rmtree(tmp_path / "tiny/0/checkpoints")
    before = (tmp_path / "tiny/0/metrics.jsonl").read_bytes()
    heard: list[str] = []
    assert not queue.work(entries, tmp_path, say=heard.append)
    assert "tiny/0 is left as it is: its record is here and its checkpoints are not" in heard
    assert queue.lacking_checkpoints(entries, tmp_path) == ["tiny/0"]
    assert (tmp_path / "tiny/0/metrics.jsonl").read_bytes() == before
    assert queue.is_done(entries[1], tmp_path)


def test_what_another_process_has_is_left_to_it(entries, tmp_path):
    held = tmp_path / "tiny/0"
    held.mkdir(parents=True)
    with locked(held):
        assert not queue.work(entries, tmp_path, say=silent)
    assert not queue.is_done(entries[0], tmp_path)
    assert queue.is_done(entries[1], tmp_path)


def test_no_entry_is_begun_after_the_minutes(entries, tmp_path):
    assert not queue.work(entries, tmp_path, minutes=0, say=silent)
    assert not (tmp_path / "tiny").exists()


# --- claims ----------------------------------------------------------------------------------------------------------


def record(name: str, status: str = "finished", **columns: list[float]) -> RunRecord:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for epoch, row in enumerate(rows):
        row.setdefault("epoch", epoch)
    metric = "train_squared_error" if "autoencoder" in name else "test_error_percent"
    experiment = {"metric": metric, "epochs": len(rows) - 1 if status == "finished" else 1000}
    run = {"config": {"experiment": experiment, "method": "shf"}, "status": status}
    return RunRecord(Path(name), run, tuple(rows), (), {}, ())


def claim(beginning: str) -> Claim:
    (found,) = [c for c in CLAIMS if c.words.startswith(beginning)]
    return found


@pytest.mark.parametrize(
    ("errors", "verdict"), [([1.0, 1.1, 0.8, 0.9, 1.0], "reproduced"), ([1.2] * 5, "not reproduced")]
)
def test_the_mean_of_five_splits(errors, verdict):
    usps = claim("USPS, dropout: mean")
    runs = dict(zip(usps.runs, errors, strict=True))
    records = {name: record(name, test_error_percent=[9.0, error]) for name, error in runs.items()}
    found = usps.find(records)
    assert found.verdict == verdict
    assert found.ours.startswith(f"{sum(errors) / 5:.2f} %")


def test_a_run_of_more_epochs_is_judged_after_the_experiments():
    longer = record("curves-autoencoder/nag", train_squared_error=[9.0, 3.0, 2.0, 1.0], epoch=[0, 1, 1.5, 2.5])
    longer.config["experiment"]["epochs"] = 2
    assert final(longer) == 2.0


def test_a_claim_whose_runs_have_not_all_ended_is_not_decided():
    usps = claim("USPS, dropout: mean")
    records = {name: record(name, test_error_percent=[9.0, 1.0]) for name in usps.runs}
    records[usps.runs[2]] = record(usps.runs[2], "interrupted", test_error_percent=[9.0, 1.0])
    assert usps.find(records).verdict is Verdict.NOT_DECIDED
    assert "at epoch 1 of 1000" in usps.find(records).ours
    del records[usps.runs[2]]
    assert usps.find(records).verdict is Verdict.NOT_DECIDED
    assert usps.find({}).ours == "not run yet"


def test_a_run_that_its_minutes_ended_before_the_experiments_epochs_decides_nothing():
    curves = claim("CURVES: SHF ends below HF")
    records = {
        name: record(name, train_squared_error=[9.0, error], elapsed_seconds=[0.0, 480.0])
        for name, error in zip(curves.runs, (1.0, 2.0), strict=True)
    }
    assert curves.find(records).verdict is Verdict.REPRODUCED
    for short in records.values():
        short.config["experiment"]["epochs"] = 250
    found = curves.find(records)
    assert found.verdict is Verdict.NOT_DECIDED
    assert "1 (training error ‖x-x̂‖² per case) by shf at epoch 1 of 250, 8 min" in found.ours


@pytest.mark.parametrize(
    ("damping", "verdict"),
    [
        ([1.0, 0.5, 0.4, 0.6], "reproduced"),
        ([1.0, 0.5, 0.4, 0.3], "not reproduced"),
        ([1.0, 0.5, 0.41, 0.42], "not reproduced"),
    ],
)
def test_damping_that_falls_and_rises(damping, verdict):
    falls = claim("USPS, dropout: λ")
    assert falls.find({name: record(name, damping=damping) for name in falls.runs}).verdict == verdict


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([9.0, 0.5, 0.5, 0.5], "reproduced"),
        ([9.0, 6.0, 0.5, 0.5], "not reproduced"),  # later to 5 %, sooner to all below
        ([9.0, 2.5, 1.5, 1.5], "not reproduced"),  # never at 1 %
    ],
)
def test_faster_means_in_fewer_epochs_at_every_level(ours, verdict):
    reuters = claim("Reuters: SHF")
    slow, slower = [9.0, 5.5, 4.5, 0.5], [9.0, 9.0, 9.0, 9.0]
    others = [slower] * (len(reuters.runs) - 3)
    columns = dict(zip(reuters.runs, (ours, [9.0, 0.4, 0.4, 0.4], slow, *others), strict=True))
    records = {name: record(name, train_error_percent=column) for name, column in columns.items()}
    assert reuters.find(records).verdict == verdict


def test_a_verdict_does_not_hang_on_the_last_epoch():
    """Fails if a run is judged by its last evaluation: one spike there, and the claim falls."""
    errors = [9.0] * 90 + [1.0] * 10 + [7.0]
    long = record("usps", test_error_percent=errors)
    assert (settled(long), final(long)) == (1.0, 7.0)
    usps = claim("USPS, dropout: mean")
    found = usps.find({name: record(name, test_error_percent=errors) for name in usps.runs})
    assert found.verdict is Verdict.REPRODUCED
    assert found.earlier.startswith("not reproduced")
    assert found.ours == "1.00 % ± 0.00 (1.00, 1.00, 1.00, 1.00, 1.00); last epochs 7.00 %"


def test_an_earlier_criterion_about_equal_time_needs_no_end():
    curves = claim("CURVES: SHF ends below HF")
    times, errors = [0.0, 60.0, 120.0], {"shf": [9.0, 3.0, 1.0], "hf": [9.0, 2.0, 0.5]}
    records = {
        name: record(name, "interrupted", train_squared_error=errors[name.split("/")[1]], elapsed_seconds=times)
        for name in curves.runs
    }
    found = curves.find(records)
    assert found.verdict is Verdict.NOT_DECIDED
    assert found.earlier == "not reproduced (1 against 0.5 after 2 min)"


def test_steady_means_that_every_tenth_is_at_least_that_before():
    steady = claim("USPS, dropout: λ").earlier
    assert steady is not None
    falling, rising = [1.0, *np.linspace(1, 0.4, 20)], list(np.linspace(0.4, 0.8, 80))
    dented = [*rising[:60], *([0.5] * 20)]
    for rest, verdict in ((rising, True), (dented, False)):
        assert steady.judge([record("usps", damping=[*falling, *rest])])[1] is verdict


@pytest.mark.parametrize(("sgd", "holds"), [((1.0, 1.1), True), ((0.8, 0.9), False)])
def test_competitive_is_by_the_means_of_groups_and_a_margin(sgd, holds):
    runs = [record("usps", test_error_percent=[9.0, error]) for error in (1.0, 1.2, *sgd)]
    words, found = competitive(0.1, "%", (2, 2))(runs)
    assert found is holds
    assert words.startswith("1.1 (1.00, 1.20) against ")


def test_calmer_looks_from_an_epoch_to_the_end_of_the_shorter_run():
    short = record("usps", train_error_percent=[9.0, 5.0, 0.1, 0.2])
    long = record("usps", train_error_percent=[9.0, 0.0, 0.0, 0.3, 7.0])
    words, holds = calmer("train_error_percent", 2)([short, long])
    assert holds
    assert words.startswith("at most 0.2 against up to 0.3 from epoch 2 to 3")


@pytest.mark.parametrize(("damping", "holds"), [([1.0, 0.5, 0.1, 0.05], True), ([1.0, 0.04, 0.05, 0.06], False)])
def test_damping_that_vanishes_is_lowest_late(damping, holds):
    assert vanishes([record("usps", damping=damping)])[1] is holds


def test_equal_time_is_not_compared_across_machines():
    curves = claim("CURVES: SHF ends below HF")
    records = {name: record(name, train_squared_error=[9.0, 1.0], elapsed_seconds=[0.0, 9.0]) for name in curves.runs}
    records[curves.runs[0]].run["machine"] = {"processor": "another"}  # type: ignore[index]
    assert "different machines" in curves.find(records).earlier


# --- numbers in sentences --------------------------------------------------------------------------------------------

TWO_SPLITS = {
    "usps/a": record("a", test_error_percent=[9.0, 1.5, 2.0, 1.75]),
    "usps/b": record("b", test_error_percent=[8.0, 5.0, 4.0, 2.25]),
}


@pytest.mark.parametrize(
    ("mark", "number"),
    [
        ("last usps/a test_error_percent .2f", "1.75"),
        ("lowest usps/a test_error_percent .2f", "1.50"),
        ("lowest[2:3] usps/a test_error_percent .2f", "1.75"),
        ("highest[1:2] usps/a test_error_percent .3g", "2"),
        ("median[1:3] usps/a test_error_percent .2f", "1.75"),
        ("epoch-of-lowest usps/a test_error_percent .0f", "1"),
        ("epoch-of-highest[1:3] usps/b test_error_percent .0f", "1"),
        ("lowest usps/? test_error_percent .2f", "1.50, 2.25"),
        ("mean usps/? test_error_percent .1f", "2.0"),
        ("spread usps/* test_error_percent .1f", "0.5"),
        ("last mnist/a test_error_percent .1f", "(not run)"),
    ],
)
def test_a_quoted_number_is_read_from_the_records(mark, number):
    sentence = f"ends at <!--{mark}-->old<!--/--> %, and nothing else changes <!-- end -->"
    assert quoted(sentence, TWO_SPLITS) == sentence.replace("old", number)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("first usps/a test_error_percent .2f", "HOW one of last, lowest"),
        ("last usps/a test_error_percent", "expected 'HOW RECORD COLUMN DIGITS'"),
        ("last usps/a no_such_column .2f", "has no number in that column"),
        ("last[7:9] usps/a test_error_percent .2f", "and those epochs"),
    ],
)
def test_a_mark_that_cannot_be_read_is_refused(mark, message):
    with pytest.raises(ValueError, match=message):
        quoted(f"<!--{mark}-->1<!--/-->", TWO_SPLITS)


def test_every_quoted_number_of_the_page_names_an_entry_or_a_record_of_the_first_curves():
    marks = [found["mark"] for found in MARKED.finditer((DOCS / PAGE).read_text(encoding="utf-8"))]
    first = [path.parent.relative_to(RECORDS).as_posix() for path in RECORDS.glob("curves-version-1/*/run.json")]
    names = [*(entry.name for entry in ENTRIES), *first]
    assert marks
    for mark in marks:
        assert fnmatch.filter(names, mark.split()[1]), mark


# --- page ------------------------------------------------------------------------------------------------------------


def copy_of_pages(directory: Path) -> Path:
    docs = directory / "docs"
    docs.mkdir()
    shutil.copy(DOCS / PAGE, docs / PAGE)
    shutil.copy(REPOSITORY / "README.md", directory / "README.md")
    return docs


@pytest.fixture
def small_results(tmp_path) -> tuple[Path, Path]:
    """One record, under the name of an entry, and a copy of the page."""
    docs = copy_of_pages(tmp_path)
    runner.start(tiny_config(), tmp_path / "paper" / "curves-autoencoder" / "shf")
    return tmp_path / "paper", docs


def test_the_page_is_made_from_the_records_and_again_the_same(small_results):
    root, docs = small_results
    written = write_page(root, docs)
    assert [path.name for path in written] == [
        PAGE,
        "README.md",
        "curves.svg",
        "curves-epochs.svg",
        "curves-momentum.svg",
    ]
    first = [path.read_bytes() for path in written]
    assert b"`curves-autoencoder/shf`" in first[0]
    assert "| USPS, dropout: mean test error of five splits after 1000 epochs |" in first[1].decode()
    assert first == [path.read_bytes() for path in write_page(root, docs)]


def test_the_curves_stand_beside_what_is_published(small_results):
    root, docs = small_results
    measured = {
        "published": {"PCA, 18": 5.9},
        "figures": {"PCA, 18": 6.0},
        "off_percent": {"PCA, 18": 1.7},
        "black": 0.01,
    }
    (root / "curves.json").write_text(json.dumps({"version 2": measured}))
    write_page(root, docs)
    assert "| PCA, 18 | 5.90 | 6.00 (+1.7 %) |" in (docs / PAGE).read_text(encoding="utf-8")


def test_what_stays_undecided_is_said(small_results):
    root, _ = small_results
    outcome = CliRunner().invoke(app, ["continue", "mnist/dropout-sgd-all-500", "--minutes", "0", "--root", str(root)])
    assert outcome.exit_code == 1
    assert "not decided: MNIST, dropout: test errors at epoch 500" in " ".join(outcome.output.split())


def test_a_record_changed_by_hand_is_refused(small_results):
    root, docs = small_results
    before = (docs / PAGE).read_bytes()
    metrics = root / "curves-autoencoder" / "shf" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"epoch":2', '"epoch":3'))
    with pytest.raises(RecordError, match="was changed after it was written"):
        write_page(root, docs)
    assert (docs / PAGE).read_bytes() == before


@pytest.mark.skipif(not RECORDS.exists(), reason="no records of the paper's experiments")
def test_the_committed_page_is_what_the_records_say(tmp_path):
    docs = copy_of_pages(tmp_path)
    for path in write_page(RECORDS, docs):
        assert path.read_bytes() == (REPOSITORY / path.relative_to(tmp_path)).read_bytes(), path.name
