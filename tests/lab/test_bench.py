"""The benchmark on shrunk shapes: everything is there, counted and written. Times themselves are never asserted."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from helpers import ticking
from shf.lab import bench, commands
from shf.lab.bench import CASES, anatomy, judge, measure_cases, memory, peers, report, run, select, speed
from shf.lab.bench.cases import FEED_FORWARD, MNIST, OTHER, REUTERS, USPS
from shf.lab.bench.floor import Floor
from shf.lab.bench.measure import QUICK, Pace, Timing, interleaved
from shf.lab.bench.targets import SPARSE
from shf.lab.clock import CLOCKS
from shf.lab.experiments import ExperimentError


@pytest.fixture(scope="module")
def results():
    in_this_process = [case for case in CASES if not case.startswith(("memory/", "sparse/"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CLOCKS, "wall", ticking())
        return measure_cases(in_this_process, quick=True, progress=lambda name: None)


def numbers(tree):
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in numbers(value)]
    if isinstance(tree, list):
        return [x for value in tree for x in numbers(value)]
    return [tree] if isinstance(tree, int | float) else []


@pytest.mark.xdist_group("bench")
def test_every_case_is_measured(results):
    found = {f"{section}/{name}" for section, entries in results["sections"].items() for name in entries}
    assert found == {case for case in CASES if not case.startswith(("memory/", "sparse/"))}
    assert all(math.isfinite(x) for x in numbers(results))
    assert results["quick"]


@pytest.mark.xdist_group("bench")
def test_the_kinds_of_work_add_up_to_the_step(results):
    for entry in results["sections"]["anatomy"].values():
        assert tuple(entry["shares"]) == anatomy.KINDS
        assert sum(entry["shares"].values()) == pytest.approx(1)
        assert min(entry["shares"].values()) > 0


@pytest.mark.parametrize(
    ("operation", "shapes", "kind"),
    [
        ("aten::addmm", [[3], [100, 20], [20, 3], [], []], "matrix products"),
        ("aten::dot", [[63], [63]], "passes over vectors"),
        ("aten::add", [[3, 20], [3, 20], []], "passes over vectors"),
        ("aten::cat", [[], []], "passes over vectors"),
        ("aten::clamp_min", [[100, 20], []], "elementwise work of the network"),
        ("Optimizer.step#SHF.step", [], "all else"),
    ],
)
def test_kinds_of_work(operation, shapes, kind):
    assert anatomy._kind(operation, shapes, sizes={63, 60}) == kind


@pytest.mark.xdist_group("bench")
def test_the_record_survives_json_and_names_machine_and_versions(results):
    assert json.loads(json.dumps(results)) == results
    assert {"processor", "cores", "memory_gib", "threads"} <= set(results["machine"])
    assert {"python", "torch", "shf"} <= set(results["versions"])


def test_a_step_is_the_second_step_each_time():
    """With a warm start, and with the same work at every repetition."""
    case = USPS.shrunk()
    problem = case.problem()
    step = speed.RepeatedStep(case, problem)
    infos = []
    for _ in range(2):
        step.rewind()
        step()
        infos.append(step.info)
    assert infos[0] == infos[1]
    assert infos[0].products == case.cg_iterations + 1


@pytest.mark.xdist_group("bench")
@pytest.mark.parametrize("what", speed.SWEEPS)
def test_steps_of_a_sweep_do_the_same_work(what, results):
    """Else the exponent would be that of the line search's luck."""
    for point in results["sections"]["scaling"][what]["points"]:
        zeta = point["value"] if what == "cg-iterations" else 1
        assert (point["products"], point["evaluations"]) == (zeta + 1, zeta)


def test_the_floor_has_the_products_that_are_counted():
    """3 products per layer for a gradient (2 in the first), 1 for the preconditioner, 4 (2) for J'L''J, of them
    2 (1) for J, 1 to evaluate."""
    floor, layers = Floor((4, 3, 2), 5, 5), 2
    counted = {}
    for name in ("gradient", "preconditioner", "product", "along", "evaluation"):
        with torch.profiler.profile() as profile:
            getattr(floor, name)()
        counted[name] = sum(e.count for e in profile.key_averages() if e.key == "aten::mm")
    assert counted == {
        "gradient": 3 * layers - 1,
        "preconditioner": layers,
        "product": 4 * layers - 2,
        "along": 2 * layers - 1,
        "evaluation": layers,
    }


def test_the_floor_of_a_step_adds_up():
    floor = Floor((4, 3), 5, 2)
    with torch.profiler.profile() as profile:
        floor.step(products=3, evaluations=2)
    last = 1  # product, without J'
    assert sum(e.count for e in profile.key_averages() if e.key == "aten::mm") == 2 + 1 + 2 * 2 + last + 2


def test_shapes_are_the_papers():
    assert FEED_FORWARD["curves"].units == (784, 400, 200, 100, 50, 25, 6, 25, 50, 100, 200, 400, 784)
    assert FEED_FORWARD["mnist-autoencoder"].units == (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
    for case in FEED_FORWARD.values():
        small = replace(case, rows=4)
        assert sum(p.numel() for p in small.problem().model.parameters()) == case.parameters


def test_sparse_and_dense_hold_the_same_numbers():
    dense = REUTERS.shrunk()
    sparse = replace(dense, sparse=True)
    a, b = dense.problem(), sparse.problem()
    assert torch.equal(a.inputs, b.inputs.to_dense())
    value, other = (p.loss(p.model(p.inputs), p.targets) for p in (a, b))
    torch.testing.assert_close(value, other)


@pytest.mark.parametrize("name", OTHER)
def test_other_networks_can_be_differentiated(name):
    problem = OTHER[name].shrunk().problem()
    assert len(problem.gradient()) == len(list(problem.model.parameters()))


def test_tasks_take_turns():
    order = []
    tasks = {name: lambda name=name: order.append(name) for name in "ab"}
    found = interleaved(tasks, Pace(repetitions=2, seconds=0.0), before={"b": lambda: order.append("-")})
    assert "".join(order) == "a-b" + "a-b" * 2
    assert [len(found[name].seconds) for name in "ab"] == [2, 2]


def test_a_ratio_is_of_neighbours():
    """A disturbance that slows a pair of runs does not count."""
    assert Timing([2.0, 20.0, 2.0]).over(Timing([1.0, 10.0, 1.0])) == 2.0


def test_exponents_are_found():
    sizes = [1, 2, 5, 10, 20, 50]
    assert speed._fit(sizes, [7 + 3 * s for s in sizes])["exponent"] == pytest.approx(1.0, abs=1e-3)
    assert speed._fit(sizes, [7 + 3 * s**1.5 for s in sizes])["exponent"] == pytest.approx(1.5, abs=1e-3)
    assert speed._slope(sizes, [3 * s**0.8 for s in sizes])["exponent"] == pytest.approx(0.8)


def test_absent_peers_are_skipped_visibly(monkeypatch):
    absent = replace(peers.PEERS["soap"], package="no-such-package")
    monkeypatch.setitem(peers.PEERS, "soap", absent)
    found = peers.seconds_per_epoch(["soap", "adam"], replace(QUICK, clock=ticking()))
    assert "no-such-package is not installed" in found["soap"]["skipped"]
    assert found["adam"]["seconds_per_epoch"] > 0
    ((_, _, rows),) = report.tables({"quick": True, "sections": {"peers": found}})
    assert any("not installed" in cell for row in rows for cell in row)


@pytest.mark.xdist_group("bench")
def test_the_terminal_shows_brackets_as_they_are(results, capsys):
    soap = {"peer": "SOAP", "package": None, "setup": "", "skipped": "absent: pip install '.[bench]'"}
    report.show({**results, "sections": {"peers": {"soap": soap}}}, Console(width=300, file=sys.stdout))
    assert "pip install '.[bench]'" in capsys.readouterr().out


def test_memory_is_measured_in_a_process_of_its_own():
    found = memory.step_against_gradient("usps", quick=True)
    assert found["network"] == USPS.name
    assert {"gradient_bytes", "step_bytes", "step_over_gradient"} <= set(found)


def test_a_failing_process_is_reported():
    with pytest.raises(RuntimeError, match="no such thing"):
        memory.measure("no such thing", "usps", quick=True)


def test_cases_are_selected_by_name_and_by_section():
    assert select(None) == list(CASES)
    assert select(["step"]) == [f"step/{name}" for name in FEED_FORWARD]
    assert select(["product/cnn", "step/usps"]) == ["step/usps", "product/cnn"]
    with pytest.raises(ValueError, match="no case 'stop'; cases are step/curves"):
        select(["stop"])


def test_an_unknown_case_is_refused():
    with pytest.raises(ExperimentError, match="no case 'stop'; cases are step/curves"):
        run(cases=["stop"])


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_measured(tmp_path, monkeypatch, place):
    def measured(*_, **__):
        raise AssertionError("measured first")

    monkeypatch.setattr(bench, "measure_cases", measured)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        run(out=tmp_path / place, quick=True)
    result = CliRunner().invoke(commands.app, ["bench", "--quick", "--out", str(tmp_path / place)])
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_run_writes_record_and_plot_and_prints_tables(tmp_path, capsys):
    assert run(out=tmp_path, cases=["step/usps", "scaling/batch"], quick=True) == 0
    (record,) = tmp_path.glob("*.json")
    (drawing,) = tmp_path.glob("*.svg")
    assert set(json.loads(record.read_text())["sections"]) == {"step", "scaling"}
    assert "step / floor" in drawing.read_text()
    assert "USPS" in capsys.readouterr().out


def full(results):
    """The same record as if it came from a full run, with the sections that need processes of their own."""
    step, gradient = 3 * 2**20, 2**20
    entry = {"network": "N", "gradient_bytes": gradient, "step_bytes": step, "step_over_gradient": step / gradient}
    sparse = {
        "rows": 1000,
        "curvature_rows": 100,
        **{k: {"dense": {"median_seconds": 1.0}, "sparse": {"median_seconds": 0.1}} for k in SPARSE},
        **{f"{k}_speedup": 10.0 for k in SPARSE},
        "dense_bytes": 2**30,
        "sparse_bytes": 2**29,
    }
    growth = {"steps": 1000, "early": 100, "late": 100}
    chunked = {"network": "N", "microbatch": 10, "whole_bytes": step, "chunked_bytes": gradient}
    memories = {"usps": entry, "growth": growth, "microbatch": chunked}
    sections = {**results["sections"], "memory": memories, "sparse": {"reuters": sparse}}
    return {**results, "quick": False, "sections": sections}


@pytest.mark.xdist_group("bench")
def test_targets_are_judged_in_a_full_run_only(results):
    assert judge(results) == []
    targets = {target.name: target for target in judge(full(results))}
    assert targets["peak memory, step / gradient, N"].met
    assert not targets["sparse against dense, products"].met
    assert targets["sparse against dense, step"].met
    assert targets["sparse, peak memory of a step"].value == 0.5
    assert targets[f"step / floor, {MNIST.name}"].most == 1.25
    assert targets[f"step / floor, {USPS.name}"].most == 1.6


@pytest.mark.xdist_group("bench")
def test_the_page_is_filled_in_between_its_marks(results, tmp_path):
    page, record = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text("before\n<!-- bench -->\nold\n<!-- end -->\nafter\n")
    record.write_text(json.dumps(full(results)))
    for _ in range(2):  # the second time over its own result
        assert report.main([str(record), str(page)]) == 0
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "old" not in text
        assert (tmp_path / report.FIGURE).is_file()
        # against the floor, by kinds of work, against a gradient, and compiled
        assert text.count("| USPS classifier |") == 4
        assert "| sparse against dense, products | 10 × | ≥ 20 | **no** |" in text


@pytest.mark.xdist_group("bench")
def test_a_page_without_marks_is_refused(results):
    with pytest.raises(ValueError, match="0 places for 'bench'"):
        report.fill_in("no marks", results)


def test_the_page_needs_two_arguments(capsys):
    assert report.main(["only.json"]) == 2
    assert "usage" in capsys.readouterr().err
