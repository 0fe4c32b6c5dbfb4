"""The registry says what the paper says, and words typed by a user become a complete configuration or a clear error."""

import dataclasses
import json
import math
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_helpers import REPOSITORY

import shf
from shf.lab import choices, configure, measuring, subjects
from shf.lab.baselines.registry import METHODS
from shf.lab.choices import Choice, Trial, write_choice
from shf.lab.configure import Request, parse_options, pretraining
from shf.lab.data import Dataset
from shf.lab.experiments import EXPERIMENTS, Experiment, ExperimentError, Task, find
from shf.lab.problem import build_model
from shf.lab.runconfig import RunConfig
from shf.lab.tuning import Budget

PAPER = [
    "mnist-classifier",
    "mnist-classifier-dropout",
    "usps-classifier",
    "usps-classifier-dropout",
    "reuters-classifier",
    "reuters-classifier-dropout",
    "curves-autoencoder",
    "mnist-autoencoder",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHF_CACHE", str(tmp_path / "cache"))


def test_all_experiments_of_the_paper_are_there() -> None:
    assert list(EXPERIMENTS)[: len(PAPER)] == PAPER


def test_settings_agree_with_the_optimizers_presets() -> None:
    """Two places say what the paper's settings are; they must not drift apart."""

    def settings(name: str) -> dict[str, Any]:
        return {**EXPERIMENTS[name].shared_settings, **EXPERIMENTS[name].settings}

    for data in ("mnist", "usps", "reuters"):
        assert settings(f"{data}-classifier") == dict(shf.presets.classifier)
        assert settings(f"{data}-classifier-dropout") == dict(shf.presets.dropout_classifier)
    curves = settings("curves-autoencoder")
    assert curves.pop("curvature_batch") == EXPERIMENTS["curves-autoencoder"].gradient_batch == 2000
    assert {**curves, "weight_decay": 0.0} == dict(shf.presets.autoencoder)


def test_the_papers_figures() -> None:
    assert EXPERIMENTS["mnist-classifier"].paper == {"shf": 159.0}
    assert EXPERIMENTS["mnist-classifier-dropout"].paper == {"shf": 107.0}
    assert EXPERIMENTS["usps-classifier-dropout"].paper == {"shf": 0.95}
    assert EXPERIMENTS["curves-autoencoder"].paper["nag"] == 0.078
    assert EXPERIMENTS["mnist-autoencoder"].paper == {
        "nag": 0.730,
        "momentum-0.99": 0.770,
        "momentum-0.9": 0.990,
        "sgd": 1.100,
        "sgd-vi": 0.900,
        "hf": 0.780,
        "shf": 0.877,
    }
    assert {method for e in EXPERIMENTS.values() for method in e.paper} <= set(METHODS)


@pytest.mark.parametrize(
    ("name", "parameters", "dropouts"),
    [
        ("mnist-classifier", 784 * 1200 + 1200 + 1200 * 1200 + 1200 + 12010, 0),
        ("usps-classifier-dropout", 256 * 500 + 500 + 500 * 500 + 500 + 5010, 2),
        ("reuters-classifier-dropout", 18933 * 65 + 65, 1),
        ("curves-autoencoder", 842_340, 0),
        ("mnist-autoencoder", 2_837_314, 0),
    ],
)
def test_networks_have_the_papers_size(name: str, parameters: int, dropouts: int) -> None:
    model = build_model(EXPERIMENTS[name])
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum("dropout" in part for part, _ in model.named_children()) == dropouts


def test_initial_weights_are_decided_by_the_seed() -> None:
    experiment = EXPERIMENTS["usps-classifier"]
    a, b, c = (torch.cat([p.flatten() for p in build_model(experiment, seed=s).parameters()]) for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    biases = [p for p in build_model(experiment).parameters() if p.ndim == 1]
    assert all((bias == 0.1).all() for bias in biases)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_survives_json(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert Experiment.from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


def test_a_configuration_survives_json() -> None:
    config = configure.configure(Request("usps-classifier-dropout", split=3, options=("damping=0.1",), threads=1))
    copy = RunConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert copy == config
    assert copy.fingerprint() == config.fingerprint()
    assert dataclasses.replace(config, epochs=7).fingerprint() == config.fingerprint()
    assert dataclasses.replace(config, seed=7).fingerprint() != config.fingerprint()
    assert config.command() == (
        "shf run usps-classifier-dropout --optimizer shf --epochs 1000 --seed 0 --split 3 --threads 1 --untuned "
        "--set damping=0.1"
    )
    assert " --rows-every 5 " in dataclasses.replace(config, rows_every=5).command()


def test_the_command_names_what_was_tuned(tmp_path: Path) -> None:
    """Fails where it relies on the file of tuned settings of whoever types it."""
    choices = REPOSITORY / "results" / "paper" / "tuned.json"
    tuned = configure.configure(Request("mnist-autoencoder", "nag", minutes=5, threads=1), choices=choices)
    words = shlex.split(tuned.command())
    options = tuple(word for before, word in pairwise(words) if before == "--set")
    assert dict(option.split("=") for option in options).keys() == tuned.tuning["settings"].keys()
    again = Request("mnist-autoencoder", "nag", minutes=5, threads=1, options=options)
    assert configure.configure(again, choices=tmp_path / "none.json").settings == tuned.settings


@pytest.mark.parametrize(
    ("record", "words"),
    [({"x": 1}, "does not know"), ({}, "cannot be read"), ({"task": "dancing", "sizes": [1, 2]}, "cannot be read")],
)
def test_a_foreign_record_is_no_experiment(record: dict[str, Any], words: str) -> None:
    with pytest.raises(ExperimentError, match=words):
        Experiment.from_json(record)


@pytest.mark.parametrize(
    "changes",
    [{"epochs": 0}, {"gradient_batch": 0}, {"sizes": (3,)}, {"input_dropout": 1.0}, {"initialisation": "lucky"}],
)
def test_nonsense_in_an_experiment_names_the_field(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ExperimentError, match=f"curves-autoencoder: {name}="):
        dataclasses.replace(EXPERIMENTS["curves-autoencoder"], **changes)


# from words to a configuration


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"experiment": "mnist-clasifier"}, "did you mean 'mnist-classifier'"),
        ({"experiment": "zzz"}, "known: curves-autoencoder"),
        ({"method": "adamm"}, "did you mean 'adam'"),
        ({"split": 2}, "only USPS has splits"),
        ({"experiment": "usps-classifier", "split": 6}, "from 1 to 5"),
        ({"method": "dropout-sgd-all"}, "use mnist-classifier-dropout"),
        ({"options": ("damping",)}, "expected name=value"),
        ({"options": ("damping=1", "damping=2")}, "given twice"),
        ({"options": ("dampng=1",)}, "did you mean 'damping'"),
        ({"options": ("input_dropout=2",)}, "must be a number at least 0 and below 1"),
        ({"options": ("input_dropout=lots",)}, "input_dropout='lots': must be a number at least 0"),
        ({"options": ("epochs=3",)}, "no such setting"),
        ({"epochs": 0}, "epochs=0: must be at least 1"),
        ({"minutes": -1.0}, "minutes=-1.0: must be a number greater than 0"),
        ({"minutes": math.inf}, "minutes=inf: must be a number greater than 0"),
        ({"evaluate_seconds": math.inf}, "evaluate_seconds=inf: must be a number greater than 0"),
        ({"method": "adam", "options": ("learning_rate=fast",)}, r"learning_rate='fast': expected a value like 0\.001"),
        ({"method": "nag", "options": ("final_updates=1.5",)}, r"final_updates=1\.5: expected a value like 1000"),
        ({"method": "adam", "options": ("seed=1",)}, "--set seed=1: give --seed"),
        ({"method": "sgd", "options": ("learning_rate=true",)}, "learning_rate=True: expected a value like"),
        ({"rows_every": 0}, "rows_every=0"),
        ({"evaluate_seconds": 0.0}, "evaluate_seconds=0.0: must be a number greater than 0"),
        ({"experiment": "reuters-classifier", "pretraining": pretraining("rbm", 2)}, "no hidden layer"),
    ],
)
def test_wrong_words_are_answered(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        configure.configure(Request(**{"experiment": "mnist-classifier", **words}))


def test_find_returns_the_experiment() -> None:
    assert find("curves-autoencoder").task is Task.AUTOENCODER


def test_options_are_json_where_they_can_be() -> None:
    found = parse_options(["a=1", "b=0.5", "c=true", "d=null", "e=None", "f=text", "g=1e-3", "h=x=y"])
    assert found == {"a": 1, "b": 0.5, "c": True, "d": None, "e": None, "f": "text", "g": 1e-3, "h": "x=y"}


def test_pretraining_words() -> None:
    assert pretraining(None, None) is None
    assert pretraining("rbm", 3).epochs == 3
    with pytest.raises(ExperimentError, match="without --pretrain"):
        pretraining(None, 3)
    with pytest.raises(ExperimentError, match="denoising or rbm"):
        pretraining("magic", None)


def test_settings_of_the_experiment_reach_shf_and_only_the_shared_ones_the_others() -> None:
    def settings(method: str, **words: Any) -> dict[str, Any]:
        request = Request("mnist-classifier-dropout", method, untuned=True, seed=5, **words)
        return dict(configure.configure(request).settings)

    found = settings("shf")
    assert (found["damping"], found["curvature_batch"], found["weight_decay"]) == (1.0, 100, 2e-5)
    assert (found["update_decay"], found["seed"]) == (0.998, 5)
    assert settings("adam")["weight_decay"] == 2e-5
    assert settings("dropout-sgd-all")["weight_decay"] == 0.0  # the paper: no weight decay for dropout SGD
    assert settings("shf", options=("weight_decay=0.5",))["weight_decay"] == 0.5


def test_methods_bring_their_batches_start_and_dropout() -> None:
    def config(method: str, experiment: str = "curves-autoencoder", **words: Any) -> RunConfig:
        return configure.configure(Request(experiment, method, untuned=True, **words))

    assert config("shf").batch == 2000
    assert config("adam").batch == 200
    assert config("adam", options=("gradient_batch=50",)).batch == 50
    assert config("sgd-vi").experiment.initialisation == "normalised"
    assert config("sgd").experiment.initialisation == "sparse"
    assert config("dropout-sgd-all", "usps-classifier-dropout").dropout_layers == "all"
    assert config("shf").epochs == 250
    assert config("shf", minutes=3.0).epochs is None


def tuned(**changes: Any) -> Choice:
    choice = Choice(
        experiment="usps-classifier-dropout",
        method="adam",
        settings={"learning_rate": 0.0003},
        input_dropout=0.3,
        score=1.5,
        metric="held-out error percent",
        budget={"seconds": 60.0},
        held_out=1333,
        seed=0,
        trials=(Trial({"learning_rate": 0.0003}, 0.3, (1.5,), 10, 1.0),) * 4,
    )
    return dataclasses.replace(choice, **changes)


def test_tuned_settings_are_read_and_their_origin_recorded() -> None:
    write_choice(tuned())
    request = Request("usps-classifier-dropout", "adam")
    config = configure.configure(request)
    assert config.settings["learning_rate"] == 0.0003
    assert config.experiment.input_dropout == 0.3
    assert config.tuning["budget"] == {"seconds": 60.0}
    assert config.tuning["words"] == "tuned: 0.0003, input dropout 0.3 (best of 4)"
    json.dumps(config.to_json())
    by_hand = configure.configure(dataclasses.replace(request, options=("learning_rate=1", "input_dropout=0.1")))
    assert by_hand.settings["learning_rate"] == 1
    assert by_hand.experiment.input_dropout == 0.1
    untuned = configure.configure(dataclasses.replace(request, untuned=True))
    assert untuned.settings["learning_rate"] == METHODS["adam"].defaults["learning_rate"]
    assert untuned.tuning == {}


def test_tuning_an_experiment_scores_on_held_out_training_rows() -> None:
    experiment = dataclasses.replace(
        EXPERIMENTS["curves-demo"], data_options={"train": 60, "test": 10}, sizes=(784, 6, 2), gradient_batch=20
    )
    choice = subjects.tune_experiment(experiment, METHODS["adam"], budget=Budget(iterations=60))
    assert choice.held_out == 10
    assert choice.metric == "held-out squared error"
    assert choice.settings["learning_rate"] in METHODS["adam"].grid["learning_rate"]
    assert len(choice.trials) == len(METHODS["adam"].grid["learning_rate"])
    with pytest.raises(ExperimentError, match="must be 0: its autoencoder has no dropout"):
        subjects.tune_experiment(experiment, METHODS["shf"], budget=Budget(iterations=15), search_dropout=True)


def test_tuning_searches_the_amount_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(60, 256), torch.randint(10, (60,))
    data = Dataset("usps", inputs, targets, inputs, targets, None, 10, {}, "")
    monkeypatch.setattr(subjects, "load_data", lambda *args, **options: data)
    experiment = dataclasses.replace(EXPERIMENTS["usps-classifier-dropout"], sizes=(256, 6, 10), gradient_batch=20)
    searched = subjects.tune_experiment(experiment, METHODS["shf"], budget=Budget(iterations=15), search_dropout=True)
    assert searched.input_dropout in subjects.INPUT_DROPOUT
    assert {trial.input_dropout for trial in searched.trials} == set(subjects.INPUT_DROPOUT)


def test_the_demos_opponents_are_tuned() -> None:
    """The package carries the record of their search, so that the demo compares with tuned opponents and can say so."""
    found = choices.packaged_choices().get("curves-demo", {})
    for method in ("adam", "nag"):
        assert len(found[method].trials) > 4
        assert "learning_rate" not in found[method].edge


# time


def test_timings_are_remembered_and_damage_is_forgotten(tmp_path: Path) -> None:
    assert measuring.recall() == {}
    measuring.remember("usps-classifier", 0.5)
    measuring.remember("mnist-classifier", 7.0)
    assert measuring.recall() == {"usps-classifier": 0.5, "mnist-classifier": 7.0}
    (tmp_path / "cache" / "timings.json").write_text("[")
    assert measuring.recall() == {}


@pytest.mark.usefixtures("ticking")
def test_the_first_iterations_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(
        EXPERIMENTS["curves-demo"], data_options={"train": 60, "test": 10}, sizes=(784, 6, 2), gradient_batch=20
    )
    missing = dataclasses.replace(EXPERIMENTS["usps-classifier"], name="usps-classifier")
    registry = {"curves-demo": small, "usps-classifier": missing}
    monkeypatch.setattr(measuring, "EXPERIMENTS", registry)
    monkeypatch.setattr(configure, "find", registry.__getitem__)

    def nowhere(*_: Any, **__: Any) -> Any:
        raise measuring.DataError("usps: no source has it")

    genuine = measuring.new_training
    monkeypatch.setattr(
        measuring, "new_training", lambda c, d: nowhere() if c.experiment.data == "usps" else genuine(c, d)
    )
    outcomes = dict(measuring.measure_all())
    assert outcomes["curves-demo"].startswith("3 s per epoch, ")
    assert outcomes["usps-classifier"] == "not measured: usps: no source has it"
    assert measuring.recall() == {"curves-demo": 3.0}  # steps of a second
