"""The examples run, at a budget of moments; their records can be read; the page shows what the records say."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

import characters
import cnn
import expressions
import finetune
import longterm
import report
import training
from helpers import theta, ticking
from realdata import real
from shf.lab import contest
from shf.lab.data import Dataset, load
from shf.lab.pages import filled
from shf.lab.records import read_run
from trees import Tree

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("ticking")


def run(example, out, monkeypatch, *options):
    """Its records, by the names of their directories."""
    arguments = ["--seconds", "2", "--tune", "1", "--points", "1", "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", [example.__name__, *map(str, arguments)])
    example.main()
    return {str(path.parent.relative_to(out)): read_run(path.parent) for path in out.rglob("run.json")}


def assert_sound(records, metric, *names):
    assert sorted(records) == sorted(names)
    for record in records.values():
        assert record.problems == ()
        assert record.column("updates")[-1] >= 1
        assert record.column("processor_seconds")[-1] >= record.config["seconds"]
        assert torch.tensor(record.column(metric)).isfinite().all()


def noise(name, train=2000, test=300, **_):
    """Random pixels and classes in the shape of MNIST: the examples run wherever the tests do."""
    source = torch.Generator().manual_seed(0)
    parts = [part for n in (train, test) for part in (torch.rand(n, 784, generator=source), torch.arange(n) % 10)]
    return Dataset(name, *parts, image_shape=(28, 28), classes=10, checksums={}, note="random pixels")


def test_the_training_to_copy_goes_on_as_if_it_had_not_stopped(tmp_path, capsys):
    whole = training.main(4, tmp_path / "whole.pt")
    said = capsys.readouterr().out
    for epochs in (3, 4):
        resumed = training.main(epochs, tmp_path / "resumed.pt")
    assert capsys.readouterr().out == said
    assert theta(resumed).equal(theta(whole))
    states = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "resumed")]
    leaves, others = (torch.utils._pytree.tree_flatten(state) for state in states)
    assert leaves[1] == others[1]
    for one, other in zip(leaves[0], others[0], strict=True):
        assert one.equal(other) if isinstance(one, torch.Tensor) else one == other
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]


def test_the_training_to_copy_stops_early_with_its_best_weights(tmp_path, monkeypatch):
    seen = []

    def validate(model, *args):
        seen.append({**original(model, *args), "loss": abs(len(seen) - 1.0)})  # the second epoch is the best
        return seen[-1]

    original = training.validate
    monkeypatch.setattr(training, "validate", validate)
    monkeypatch.setattr(training, "PATIENCE", 2)
    model = training.main(10, tmp_path / "early.pt")
    assert len(seen) == 4
    assert not model.training
    assert all(value.equal(seen[1]["weights"][name]) for name, value in model.state_dict().items())
    training.main(10, tmp_path / "early.pt")
    assert len(seen) == 4, "it has ended"


def test_cnn(tmp_path, monkeypatch):
    monkeypatch.setattr(cnn, "HELD_OUT", 100)
    monkeypatch.setattr(cnn, "load", noise)
    records = run(cnn, tmp_path, monkeypatch, "--cases", 300)
    assert_sound(records, "test_errors", "cnn/shf-0", "cnn/adam-0", "cnn/sgd-0")
    assert len(records["cnn/adam-0"].config["tuning"]["found"]) == 4


def test_the_digits_of_the_example_are_those_of_mnist():
    task = cnn.digits(load("mnist", data_dir=real("mnist"), train=6000, test=100, standardise=False))
    inputs, targets = next(task.batches(50, torch.Generator()))
    assert inputs.shape == (50, 28, 28)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert set(targets.tolist()) <= set(range(10))


def test_finetuning_leaves_the_frozen_layers_alone(tmp_path, monkeypatch):
    bodies = []
    original = finetune.errors

    def watched(model, *data):
        bodies.append(torch.cat([p.detach().reshape(-1) for p in model.parameters() if not p.requires_grad]))
        return original(model, *data)

    monkeypatch.setattr(finetune, "errors", watched)
    monkeypatch.setattr(finetune, "load", noise)
    records = run(finetune, tmp_path, monkeypatch, "--cases", 100, "--pretraining", 1)
    assert_sound(records, "test_error_percent", "finetune/shf-0", "finetune/adam-0")
    assert len(bodies[0]) == 6 * 26 + 16 * 151
    assert all(torch.equal(body, bodies[0]) for body in bodies)


def test_long_term_tasks(tmp_path, monkeypatch):
    records = run(longterm, tmp_path, monkeypatch, "--T", 10)
    names = [f"{task}-10/{method}-0" for task in ("adding", "order") for method in ("shf", "shf-without", "adam")]
    assert_sound(records, "wrong_percent", *names, "order-10/shf-own-batch-0")
    assert records["adding-10/shf-0"].config["settings"]["structural_damping"] > 0


@pytest.mark.parametrize(("enough", "rows"), [(3, 3), (100, 6)])
def test_a_run_ends_when_its_task_is_solved(enough, rows):
    """With six evaluations planned: at the start, and five more."""
    looks = itertools.count(1)
    task = contest.Task(
        name="task",
        model=lambda: torch.nn.Linear(1, 1),
        batches=lambda size, source: itertools.repeat((torch.ones(size, 1), torch.ones(size, 1))),
        evaluate=lambda model: {"looks": next(looks)},
        tuned_on="looks",
        solved=lambda row: row["looks"] >= enough,
    )
    still = contest.Method("still", rows=2, build=lambda model, rate: lambda inputs, targets: None)
    found = list(contest.train(task, still, 0.0, seed=0, seconds=5, evaluations=5, clock=ticking()))
    assert [row["looks"] for row in found] == list(range(1, rows + 1))


def test_the_long_term_tasks_are_as_defined():
    source = torch.Generator().manual_seed(0)
    (x, lengths), wanted = longterm.adding(50, 300, source)
    assert (lengths.min(), lengths.max()) == (50, 55)
    assert (x[..., 1].sum(1) == 2).all()
    places = x[..., 1].nonzero()[:, 1].view(-1, 2)
    assert (places[:, 0] < 5).all()
    assert ((places[:, 1] >= 5) & (places[:, 1] < 25)).all()
    assert torch.allclose(wanted[:, 0], 0.5 + (x[..., 0] * x[..., 1]).sum(1) / 4)
    (x, lengths), wanted = longterm.order(50, 300, source)
    events = x[..., :2].sum(2).nonzero()[:, 1].view(-1, 2)
    assert ((events[:, 0] >= 5) & (events[:, 0] <= 10) & (events[:, 1] >= 25) & (events[:, 1] <= 30)).all()
    first, second = (x[torch.arange(300), events[:, k]].argmax(1) for k in (0, 1))
    assert torch.equal(wanted, 2 * first + second)


def test_expressions(tmp_path, monkeypatch):
    records = run(expressions, tmp_path, monkeypatch, "--cases", 50)
    assert_sound(records, "test_error_percent", *(f"expressions/{m}-0" for m in ("shf", "adagrad", "lbfgs")))


def test_a_contest_goes_on_where_it_was(tmp_path, monkeypatch):
    """Finished runs stay as they are, and the rate is not chosen again; another budget is another contest."""
    options = ("--cases", 50, "--only", "adagrad")
    first = run(expressions, tmp_path, monkeypatch, *options)["expressions/adagrad-0"]
    with monkeypatch.context() as patch:
        other = run(expressions, tmp_path, patch, *options, "--rates", 0.1, 0.2)["expressions/adagrad-0"]
        assert other.config["tuning"]["found"].keys() == {"0.1", "0.2"}
        again = run(expressions, tmp_path, patch, *options)["expressions/adagrad-0"]
        assert again.problems == ()
        assert again.run == first.run, "rates that were chosen from others are chosen again"
    monkeypatch.setattr(contest, "choose_rate", lambda *args, **kwargs: pytest.fail("the rate was chosen again"))
    records = run(expressions, tmp_path, monkeypatch, *options, "--seed", 0, 1)
    assert sorted(records) == ["expressions/adagrad-0", "expressions/adagrad-1"]
    assert records["expressions/adagrad-0"].run == first.run
    assert records["expressions/adagrad-1"].config["settings"] == first.config["settings"]
    assert records["expressions/adagrad-1"].config["tuning"] == first.config["tuning"]
    with pytest.raises(pytest.fail.Exception, match="chosen again"):
        run(expressions, tmp_path, monkeypatch, *options, "--seconds", "3")


def test_the_value_of_an_expression():
    product, difference = 4 + 5, 4 + 4
    tree = Tree(product, (Tree(difference, (Tree(1), Tree(2))), Tree(3)))
    assert expressions.value(tree) == (1 - 2) * 3 % 4
    trees, values = expressions.expressions(40, range(1, 5), seed=0)
    assert [tree.height for tree in trees] == [1, 2, 3, 4] * 10
    assert set(values.tolist()) == {0, 1, 2, 3}


def test_characters(tmp_path, monkeypatch):
    for name, value in {"WIDTH": 16, "HEADS": 2, "LAYERS": 1, "CONTEXT": 8}.items():
        monkeypatch.setattr(characters, name, value)
    records = run(characters, tmp_path, monkeypatch, "--modules", 3)
    assert_sound(records, "validation_loss", *(f"characters/{m}-0" for m in ("shf", "adamw", "muon")))


def test_the_transformer_has_the_size_that_is_said():
    assert 780_000 < sum(p.numel() for p in characters.Characters().parameters()) < 830_000


def test_the_page_of_examples_shows_its_records():
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    tables, charts = report.parts(ROOT / "results" / "examples")
    renewed = filled(text, tables)
    assert renewed == text
    assert charts
    for name, svg in charts.items():
        assert (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8") == svg


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_fits_a_sitting(name):
    lines = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) < (120 if name != "report.py" else 160)
