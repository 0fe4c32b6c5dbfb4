"""The method `fast`: the preset behind the laboratory's protocol, judged by averages, on batches that may grow."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs_helpers import assert_same_run, tiny_config

import shf
from shf.lab import runner
from shf.lab.baselines.registry import METHODS
from shf.lab.experiments import ExperimentError
from shf.lab.records import read_run_file
from shf.lab.runner import new_training

OFTEN = runner.RunOptions(checkpoint_seconds=0.0)


def test_its_settings_are_the_preset_whatever_the_experiment_says() -> None:
    settings = tiny_config("fast").settings
    assert {name: settings[name] for name in shf.presets.fast} == dict(shf.presets.fast)
    assert settings["curvature_batch"] is None


def test_an_epoch_is_judged_by_the_average() -> None:
    training = new_training(tiny_config("fast", options=("averaging=0.9",)), None)
    for _ in range(3):
        training.iterate()
    own = training.problem.evaluate()
    with training.method.optimizer.averaged():  # type: ignore[attr-defined]
        averaged = training.problem.evaluate()
    judged = training.evaluate()
    assert judged["train_squared_error"] == averaged["train_squared_error"] != own["train_squared_error"]
    assert training.problem.evaluate() == own


@pytest.mark.parametrize("options", [("growing=false",), ("noise_every=1",)])
def test_a_resumed_run_is_the_same(options: tuple[str, ...], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    runner.start(tiny_config("fast", epochs=4, options=options), whole, options=OFTEN)
    parts = tmp_path / "parts"
    runner.start(tiny_config("fast", epochs=2, options=options), parts, options=OFTEN)
    runner.resume(parts, epochs=4, options=OFTEN)
    assert_same_run(whole, parts)


def test_batches_grow_from_epoch_to_epoch() -> None:
    """Over as many epochs as it takes until noise matters."""
    training = new_training(tiny_config("fast", options=("noise_every=1", "damping=1")), None)
    sizes = []
    for _ in range(8):
        sizes.append(training._batch_size)
        while not training.epoch_ended:
            training.iterate()
        training.end_epoch()
    assert sizes == sorted(sizes)
    assert sizes[0] == 16 < sizes[-1]


def test_batches_may_begin_larger_than_they_would_grow() -> None:
    method = METHODS["fast"].build(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), {})
    method.step(torch.randn(10_001, 3), torch.randint(2, (10_001,)))
    assert method.batch_size == 10_001


def test_growing_is_true_or_false() -> None:
    with pytest.raises(ExperimentError, match=r"growing='no'.*True or False"):
        new_training(tiny_config("fast", options=("growing=no",)), None)


def test_seconds_may_be_the_processors(tmp_path: Path) -> None:
    runner.start(replace(tiny_config(), clock="processor"), tmp_path, options=OFTEN)
    record = read_run_file(tmp_path)
    assert record["config"]["clock"] == "processor"
    assert "--clock processor" in record["command"]
    with pytest.raises(ExperimentError, match="clock='sundial'"):
        replace(tiny_config(), clock="sundial")


def test_the_clock_does_not_separate_a_run_from_its_checkpoints() -> None:
    assert replace(tiny_config(), clock="processor").fingerprint() == tiny_config().fingerprint()


def test_the_registry_has_it() -> None:
    model = torch.nn.Linear(3, 2)
    method = METHODS["fast"].build(model, torch.nn.CrossEntropyLoss())
    reports = [method.step(torch.randn(20, 3), torch.randint(2, (20,))) for _ in range(2)]
    assert [report["gradients"] for report in reports] == [1, 1], "the trace for λ comes with the gradient"
