"""The benchmarks of docs/fast.md, at a budget of moments: they run, and their tables say what their records say."""

import sys

import pytest
import torch

import notuning
import solvers
from shf.batching import Batch
from shf.jacobian import Jacobian
from shf.lab.records import read_run
from shf.network import Network
from shf.randomness import Draws


def run(benchmark, out, monkeypatch, *options):
    arguments = ["--seconds", "0.1", "--tune", "0.01", "--points", "2", "--out", str(out), *options]
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


def test_the_contest_of_solvers(tmp_path, monkeypatch):
    records = run(solvers, tmp_path, monkeypatch, "--only", "cg-10", "lsmr-10")
    assert set(records) == {"cg-10-0", "lsmr-10-0"}
    starts = {record.column(solvers.METRIC)[0].item() for record in records.values()}
    assert len(starts) == 1, "both begin with the same network"


def test_one_preset_over_many_problems(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    records = run(notuning, tmp_path, monkeypatch, "--problems", "wine")
    assert set(records) == {f"{name}-0" for name in ("fast", "adam", "adam-tuned", "prodigy", "schedule-free")}
    head, _, row = notuning.table(tmp_path)
    assert head.count("|") == row.count("|")
    level = records["adam-tuned-0"].column("objective")[-1]
    for name, cell in zip(("fast", "adam", "prodigy", "schedule-free"), row.split("|")[3:], strict=False):
        found = records[f"{name}-0"].column("objective")
        assert cell.strip().endswith(f"ends at {found[-1]:.3g}")
        assert ("0 of 1" in cell) == (found.min() > level)
