"""The benchmarks of docs/fast.md, at a budget of moments: they run, and their tables say what their records say."""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from runs_helpers import tiny_experiment

import fast
import notuning
import shf
import solvers
from shf.data.batches import Batch
from shf.data.draws import Draws
from shf.lab import contest, experiments
from shf.lab.configure import configure
from shf.lab.loop import evaluating
from shf.lab.records import RunRecord, read_run
from shf.lab.rerun.entries import Run, Tuning
from shf.lab.rerun.queue import work
from shf.model.jacobian import Jacobian
from shf.model.network import Network


def test_every_run_of_the_queue_can_be_made_and_has_its_search_before_it(tmp_path):
    entries = [entry for group in fast.GROUPS for entry in group.queue()]
    assert len({entry.name for entry in entries if isinstance(entry, Run)}) == sum(isinstance(e, Run) for e in entries)
    searched = set()
    for entry in entries:
        if isinstance(entry, Tuning):
            searched.add((entry.experiment, entry.method))
        else:
            config = configure(entry.request, choices=tmp_path / "none.json")
            assert (config.threads, config.clock) == (1, "processor")
            assert entry.request.untuned != ((entry.request.experiment, entry.request.method) in searched)


def made_up(seed, *errors):
    """A record with an error per second."""
    rows = tuple({"row": "epoch", "elapsed_seconds": k, "error": error} for k, error in enumerate(errors))
    return RunRecord(Path(), {"config": {"seed": seed}}, rows, (), {}, ())


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([made_up(0, 8, 4, 2, 1)], [made_up(0, 8, 6, 4, 4, 4)], "2 ×"),  # 4 after 1 s, and after 2 s: not after 4
        ([made_up(0, 8, 4, 2, 1)], [made_up(0, 8, 6, 4, 2, 9)], "1.5 ×"),  # their lowest, not their end
        ([made_up(0, 8, 7, 6)], [made_up(0, 8, 4, 2)], "not in 1 of 1"),
        ([made_up(1, 8, 2), made_up(0, 8, 4)], [made_up(1, 8, 5, 2)], "2 ×"),  # of the same seed
        ([made_up(0, 8, 4)], [made_up(1, 8, 2)], ""),
        ([made_up(0, 8, 4)], [made_up(0, 8, float("nan"))], "diverged"),
        ([made_up(0, 8, 4, 2), made_up(1, 8, 4, 2)], [made_up(0, 8, 2), made_up(1, 8, 6, 5, 4)], "1.75 (0.5 to 3) ×"),
    ],
)
def test_how_many_times_sooner(ours, theirs, words):
    assert fast._sooner(ours, theirs, "error", "elapsed_seconds") == words


def test_when_a_goal_is_reached():
    assert fast._reached([made_up(0, 8, 4, 2), made_up(1, 8, 8, 8, 0)], "error", 4) == "2 (1 to 2)"
    assert fast._reached([made_up(0, 8, 4, 2), made_up(1, 8, 6, 5)], "error", 4) == "not in 1 of 2"


def test_records_older_than_cg_noise_are_what_the_preset_gives_with_it():
    """Where ρ never falls below ¼ it does nothing, and what is recorded stands."""
    old, new = (read_run(fast.RESULTS / place / "fast-0") for place in ("mnist", "mnist-again"))
    assert "cg_noise" not in old.config["settings"]
    assert new.config["settings"]["cg_noise"] == shf.presets.fast["cg_noise"]
    assert new.column("reduction_ratio", "iteration").min() > 0.25
    ends = [{row["iteration"]: row["train_loss"] for row in record.epochs} for record in (old, new)]
    common = sorted(set(ends[0]) & set(ends[1]))
    assert common[-1] >= 200
    assert [ends[0][i] for i in common] == [ends[1][i] for i in common]


@pytest.mark.usefixtures("ticking")
def test_opponents_are_tuned_and_the_table_reads_what_was_run(tmp_path, monkeypatch):
    """Two seeds of the preset on a network of moments, and an opponent that is tuned before it runs; steps of a second."""
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"tiny": tiny_experiment()})
    monkeypatch.setattr(fast, "RESULTS", tmp_path)
    ours, goals = replace(fast.FAST, seeds=(0, 1)), (("train_loss", 100), ("train_loss", -1))
    group = fast.Group("tiny", "tiny", 30 / 60, (ours, *fast.tuned("adam")), (), tuning=20 / 60, goals=goals)
    assert group.records() == {}
    assert work(list(group.queue()), tmp_path, say=lambda words: None)
    records = group.records()
    assert [len(found) for found in records.values()] == [2, 1]
    head, _, first, second = fast._table(group, records).splitlines()
    assert head.count("|") == first.count("|") == second.count("|")
    assert "fast, 2 runs" in first
    assert head.split("|")[-3].strip() == "training loss per case of 100 after, s"
    assert all(len(record.iterations) == 0 and record.column("elapsed_seconds")[-1] == 30 for record in records[ours])
    soonest, latest = sorted(record.reached("train_loss", 100) for record in records[ours])
    assert 0 < soonest < latest < 30
    words = f"{(soonest + latest) / 2:.0f} ({soonest:.0f} to {latest:.0f})"
    assert [cell.strip() for cell in first.split("|")[-3:-1]] == [words, "not in 2 of 2"]
    assert first.split("|")[4].strip() == "", "ours is not compared with itself"
    assert second.split("|")[4].strip().endswith(("×", "not in 1 of 1"))
    with (tmp_path / "tiny" / "adam-0" / "metrics.jsonl").open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(ValueError, match="adam-0"):
        group.records()


def run(benchmark, out, monkeypatch, *options):
    arguments = ["--seconds", "4", "--tune", "2", "--points", "2", "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, *map(str, arguments)])
    benchmark.main()
    return {path.parent.name: read_run(path.parent) for path in out.rglob("run.json")}


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_both_solvers_find_the_solution_of_the_damped_system(damping):
    """On a network small enough for the matrices themselves, with as many iterations as there are unknowns."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    inputs, targets = torch.randn(20, 4).double(), torch.rand(20, 3).double()
    network = Network(model, list(model.parameters()))
    J = Jacobian(network, Batch.of(inputs, targets), Draws(0, 20))
    d, residual = torch.rand(20, 3).double() + 0.1, torch.randn(20, 3).double()
    columns = torch.stack([J.jvp(e)[0].flatten() for e in torch.eye(15).double()], 1)
    matrix = columns.T @ (d.flatten()[:, None] * columns) + damping * torch.eye(15).double()
    wanted = torch.linalg.solve(matrix, -columns.T @ residual.flatten())
    for solve in (solvers.by_cg, solvers.by_lsmr):
        torch.testing.assert_close(solve(J, d, residual, damping, 40), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("ticking")
def test_the_contest_of_solvers(tmp_path, monkeypatch):
    records = run(solvers, tmp_path, monkeypatch, "--only", "cg-10", "lsmr-10")
    assert set(records) == {"cg-10-0", "lsmr-10-0"}
    starts = {record.column(solvers.METRIC)[0].item() for record in records.values()}
    assert len(starts) == 1, "both begin with the same network"
    for record in records.values():
        assert record.problems == ()
        assert record.column("updates")[-1] >= 1
        assert record.column(solvers.METRIC)[-1] not in starts


@pytest.mark.usefixtures("ticking")
def test_one_preset_over_many_problems(tmp_path, monkeypatch):
    for package in ("sklearn", "prodigyopt", "schedulefree"):
        pytest.importorskip(package)
    records = run(notuning, tmp_path, monkeypatch, "--problems", "wine")
    assert set(records) == {f"{name}-0" for name in ("fast", "adam", "adam-tuned", "prodigy", "schedule-free")}
    (row,) = notuning.rows(tmp_path)
    level = records["adam-tuned-0"].column("objective")[-1]
    assert row[1] == f"{records['fast-0'].config['seconds']:g} s"
    for name, cell in zip(("fast", "adam", "prodigy", "schedule-free"), row[3:], strict=True):
        found = records[f"{name}-0"].column("objective")
        assert cell.endswith(f"; ends at {found[-1]:.3g}")
        assert cell.startswith("never") == (found.min() > level)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.filterwarnings("ignore::shf.errors.FloorWarning")
def test_the_preset_survives_batches_that_contradict_each_other(seed):
    """Digits in batches of 500: a λ that rises too late makes training diverge. Fails with `damping_rise=1`."""
    pytest.importorskip("sklearn")
    torch.manual_seed(seed)
    problem = notuning.bundled("digits", 100, 100)
    task, model = problem.task(), problem.model()
    options = {**shf.presets.fast, "weight_decay": problem.weight_decay, "seed": 0}
    step = contest.stochastic(model, problem.loss, 4, **options)
    for inputs, targets in islice(task.batches(500, torch.Generator().manual_seed(seed)), 110):
        step(inputs, targets)
    with step.averaged(), evaluating(model):
        assert task.evaluate(model)["objective"] < 0.1
