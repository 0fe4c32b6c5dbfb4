"""Successive halving: it finds the good setting, under its budget, on held-out rows, and the file remembers it."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import ticking
from shf import NonFiniteError
from shf.lab.baselines import METHODS
from shf.lab.baselines.protocol import MethodSpec, costs
from shf.lab.choices import (
    Choice,
    ChoicesError,
    Trial,
    find_choice,
    packaged_choices,
    read_choices,
    user_file,
    write_choice,
)
from shf.lab.models import classifier
from shf.lab.tuning import Budget, Subject, tune


class Scripted:
    """A method whose network is worth |log10(rate)| + how often it has stepped: known in advance which setting wins."""

    def __init__(self, model: nn.Module, settings: Any) -> None:
        self.model, self.settings, self.seen = model, settings, []

    def step(self, inputs: Any, targets: Any) -> dict[str, float]:
        self.seen.append(inputs)
        with torch.no_grad():
            self.model.weight.fill_(abs(torch.tensor(self.settings["rate"]).log10()) + 1 / len(self.seen))
        bad = self.settings["rate"] >= 100
        return {"objective": float("nan") if bad else 1.0, **costs(gradients=1)}

    def next_epoch(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def scripted_spec(made: list[Scripted], **options: Any) -> MethodSpec:
    def factory(model: nn.Module, loss: Any, settings: Any) -> Scripted:
        made.append(Scripted(model, settings))
        return made[-1]

    grid = options.pop("grid", {"rate": (0.01, 0.1, 1.0, 10.0, 100.0)})
    return MethodSpec("scripted", "for tests", factory, {"rate": 1.0, "seed": 0, "weight_decay": 0.0}, grid, **options)


def scripted_subject(_: float | None = None) -> Subject:
    def score(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
        assert not model.training
        return model.weight.item()

    inputs = torch.arange(60.0)[:, None]
    return Subject(nn.Linear(1, 1, bias=False), nn.MSELoss(), inputs, inputs, batch=10, score=score, metric="weight")


class TestSearch:
    def test_the_best_setting_wins_and_every_trial_is_recorded(self) -> None:
        made: list[Scripted] = []
        choice = tune("toy", scripted_spec(made), scripted_subject, budget=Budget(iterations=40))
        assert choice.settings == {"rate": 1.0}
        assert choice.edge == ()
        assert choice.metric == "weight"
        assert choice.budget == {"iterations": 40}
        assert [trial.settings["rate"] for trial in choice.trials] == [0.01, 0.1, 1.0, 10.0, 100.0]

    def test_rungs_share_the_budget_equally(self) -> None:
        """5 trials, then 2: half of 40 steps for 5, half for 2. A diverged trial stops at once."""
        choice = tune("toy", scripted_spec([]), scripted_subject, budget=Budget(iterations=40))
        by_rate = {trial.settings["rate"]: trial for trial in choice.trials}
        assert by_rate[1.0].iterations == 4 + 10
        assert by_rate[0.01].iterations == 4
        assert by_rate[100.0].iterations == 1
        assert by_rate[100.0].scores == (None,)
        assert sum(trial.iterations for trial in choice.trials) <= 40
        assert sorted(len(trial.scores) for trial in choice.trials) == [1, 1, 1, 2, 2]

    def test_a_trial_goes_on_where_it_was(self) -> None:
        made: list[Scripted] = []
        tune("toy", scripted_spec(made), scripted_subject, budget=Budget(iterations=40))
        assert len(made) == 5, "one network per combination, not one per rung"

    def test_held_out_rows_are_never_trained_on(self) -> None:
        made: list[Scripted] = []
        scored: list[Tensor] = []

        def build(_: float | None) -> Subject:
            subject = scripted_subject()

            def score(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
                scored.append(inputs)
                return model.weight.item()

            return Subject(subject.model, subject.loss, subject.inputs, subject.targets, 10, score, "weight")

        choice = tune("toy", scripted_spec(made), build, budget=Budget(iterations=100), held_out=0.25)
        held = set(scored[0].flatten().tolist())
        trained = {value for method in made for batch in method.seen for value in batch.flatten().tolist()}
        assert choice.held_out == len(held) == 15
        assert not held & trained
        assert len(held | trained) == 60
        assert all(set(s.flatten().tolist()) == held for s in scored)

    def test_input_dropout_is_chosen_too(self) -> None:
        def build(p: float | None) -> Subject:
            subject = scripted_subject()
            assert p is not None
            return Subject(
                subject.model, subject.loss, subject.inputs, subject.targets, 10, lambda *_: abs(p - 0.2), "distance"
            )

        spec = scripted_spec([], grid={})
        choice = tune("toy", spec, build, budget=Budget(iterations=9), input_dropout=(0.0, 0.2, 0.5))
        assert choice.input_dropout == 0.2
        assert choice.settings == {}

    def test_whole_data_methods_get_all_batches(self) -> None:
        made: list[Scripted] = []
        tune("toy", scripted_spec(made, reads_batches=True), scripted_subject, budget=Budget(iterations=5))
        batches = made[0].seen[0]
        first, second = (torch.cat([x for x, _ in batches]) for _ in range(2))
        assert torch.equal(first, second), "they can be gone through again"
        assert len(first.unique()) == 50
        assert [len(x) for x, _ in batches] == [10] * 5

    def test_a_method_s_own_batch_size_is_used(self) -> None:
        made: list[Scripted] = []
        tune("toy", scripted_spec(made, batch=7), scripted_subject, budget=Budget(iterations=40))
        assert len(made[0].seen[0]) == 7

    def test_fixed_settings_and_the_seed_reach_the_method(self) -> None:
        made: list[Scripted] = []
        fixed = {"weight_decay": 0.5}
        choice = tune("toy", scripted_spec(made), scripted_subject, budget=Budget(iterations=5), fixed=fixed, seed=3)
        assert made[0].settings["weight_decay"] == 0.5
        assert made[0].settings["seed"] == 3
        assert "weight_decay" not in choice.settings, "only what was searched is chosen"

    def test_a_choice_at_the_end_of_its_grid_says_so(self) -> None:
        spec = scripted_spec([], grid={"rate": (1.0, 10.0, 50.0)})
        assert tune("toy", spec, scripted_subject, budget=Budget(iterations=9)).edge == ("rate",)

    @pytest.mark.parametrize(("clock", "unit"), [("wall", "seconds"), ("processor", "processor_seconds")])
    def test_seconds_bound_the_time_of_training(self, clock: str, unit: str) -> None:
        budget = Budget(seconds=20.0, clock=clock)
        choice = tune("toy", scripted_spec([]), scripted_subject, budget=budget, clock=ticking())
        assert [trial.iterations for trial in choice.trials] == [2, 7, 7, 2, 1]  # the last diverges
        assert [trial.seconds for trial in choice.trials] == [2, 7, 7, 2, 1]
        assert choice.budget == {unit: 20.0}

    def test_a_trial_that_raises_for_numbers_that_are_not_finite_has_diverged(self) -> None:
        class Raises(Scripted):
            def step(self, inputs: Any, targets: Any) -> dict[str, float]:
                if self.settings["rate"] >= 10:
                    raise NonFiniteError("f is not finite")
                return super().step(inputs, targets)

        base = scripted_spec([])
        spec = MethodSpec("raises", "", lambda model, loss, s: Raises(model, s), base.defaults, base.grid)
        choice = tune("toy", spec, scripted_subject, budget=Budget(iterations=40))
        assert choice.settings == {"rate": 1.0}
        assert [trial.scores[0] is None for trial in choice.trials] == [False, False, False, True, True]

    def test_the_average_of_a_method_that_has_one_is_what_is_scored(self) -> None:
        class Averages(Scripted):
            @contextmanager
            def averaged(self) -> Iterator[None]:
                with torch.no_grad():
                    self.model.weight.neg_()
                    yield
                    self.model.weight.neg_()

        base = scripted_spec([])
        spec = MethodSpec("averages", "", lambda model, loss, s: Averages(model, s), base.defaults, base.grid)
        assert tune("toy", spec, scripted_subject, budget=Budget(iterations=40)).settings["rate"] in (0.01, 100.0)

    def test_a_clock_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Budget\(clock='sun'\): must be one of wall, processor"):
            Budget(seconds=1.0, clock="sun")

    def test_progress_is_reported(self) -> None:
        seen: list[tuple[int, int, Trial]] = []
        tune("toy", scripted_spec([]), scripted_subject, budget=Budget(iterations=20), report=lambda *a: seen.append(a))
        assert [(rung, size) for rung, size, _ in seen] == [(1, 5)] * 5 + [(2, 2)] * 2

    def test_nothing_to_tune_and_all_diverged_are_errors(self) -> None:
        with pytest.raises(ValueError, match="scripted has nothing to tune"):
            tune("toy", scripted_spec([], grid={}), scripted_subject, budget=Budget(iterations=5))
        with pytest.raises(ArithmeticError, match="every combination of settings diverged"):
            tune(
                "toy", scripted_spec([], grid={"rate": (100.0, 1000.0)}), scripted_subject, budget=Budget(iterations=5)
            )

    @pytest.mark.parametrize(
        "budget", [{}, {"seconds": 1.0, "iterations": 1}, {"seconds": 0.0}, {"seconds": math.inf}, {"iterations": -1}]
    )
    def test_a_budget_is_one_positive_number(self, budget: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="give one of the two"):
            Budget(**budget)

    def test_bad_arguments_are_named(self) -> None:
        for arguments, message in (
            ({"held_out": 0.0}, "held_out=0.0"),
            ({"held_out": 0.001}, "holds out 0"),
            ({"keep": 1}, "keep=1"),
        ):
            with pytest.raises(ValueError, match=message):
                tune("toy", scripted_spec([]), scripted_subject, budget=Budget(iterations=5), **arguments)


def test_a_real_method_on_a_real_network_is_deterministic() -> None:
    """SGD's rate on a small classifier: neither the frozen nor the exploding end of the grid."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(240, 8, generator=generator)
    targets = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()

    def build(p: float | None) -> Subject:
        torch.manual_seed(1)
        model = classifier((8, 12, 4), input_dropout=p or 0.0)
        loss = nn.CrossEntropyLoss()
        return Subject(model, loss, inputs, targets, 40, lambda m, x, t: loss(m(x), t).item(), "loss")

    spec = METHODS["sgd"]
    small = MethodSpec(
        spec.name, spec.summary, spec.factory, spec.defaults, {"learning_rate": (1000.0, 0.3, 1e-5)}, batch=40
    )
    first, second = (
        tune("toy", small, build, budget=Budget(iterations=360), input_dropout=(0.0, 0.8)) for _ in range(2)
    )
    assert first.settings == {"learning_rate": 0.3}
    assert first.input_dropout == 0.0
    scores = [[trial.scores for trial in choice.trials] for choice in (first, second)]
    assert scores[0] == scores[1]


class TestFile:
    def choice(self, experiment: str = "toy", method: str = "sgd", rate: float = 0.1) -> Choice:
        trial = Trial({"learning_rate": rate}, None, (0.5, None), 12, 0.25)
        return Choice(
            experiment, method, {"learning_rate": rate}, 0.2, 0.5, "loss", {"seconds": 60.0}, 100, 0, (), (trial,)
        )

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "tuned.json"
        write_choice(self.choice(), path)
        write_choice(self.choice(method="adam"), path)
        write_choice(self.choice(rate=0.3), path)
        found = read_choices(path)
        assert found == {"toy": {"sgd": self.choice(rate=0.3), "adam": self.choice(method="adam")}}
        assert [file.name for file in path.parent.iterdir() if file.suffix == ".partial"] == []

    def test_the_schema(self, tmp_path: Path) -> None:
        path = write_choice(self.choice(), tmp_path / "tuned.json")
        record = json.loads(path.read_text())["toy"]["sgd"]
        assert set(record) >= {"experiment", "method", "settings", "budget", "trials", "seed", "input_dropout", "score"}
        assert record["trials"][0]["scores"] == [0.5, None]

    def test_the_user_s_choice_comes_before_the_package_s(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "tuned.json"
        monkeypatch.delenv("SHF_TUNED")
        monkeypatch.setattr("platformdirs.user_config_path", lambda _: tmp_path)
        monkeypatch.setattr("shf.lab.choices.packaged_choices", lambda: {"toy": {"sgd": self.choice(rate=1.0)}})
        assert user_file() == path
        packaged = find_choice("toy", "sgd")
        assert packaged is not None
        assert packaged.settings == {"learning_rate": 1.0}
        write_choice(self.choice(rate=0.3))
        own = find_choice("toy", "sgd")
        assert own is not None
        assert own.settings == {"learning_rate": 0.3}
        assert find_choice("toy", "adam") is None

    def test_a_file_that_is_named_and_absent_is_not_replaced_by_the_package_s(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHF_TUNED", str(tmp_path / "tuned.json"))
        monkeypatch.setattr("shf.lab.choices.packaged_choices", lambda: {"toy": {"sgd": self.choice(rate=1.0)}})
        with pytest.raises(
            ChoicesError, match=r"SHF_TUNED=.*tuned.json: there is no such file; let `shf tune` write it"
        ):
            find_choice("toy", "sgd")
        write_choice(self.choice(rate=0.3))
        assert find_choice("toy", "sgd") == self.choice(rate=0.3)

    def test_the_user_s_home_may_be_named_by_a_tilde(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHF_TUNED", "~/tuned.json")
        assert user_file() == Path.home() / "tuned.json"

    def test_the_package_s_file_can_be_read_and_fits_the_registry(self) -> None:
        for of in packaged_choices().values():
            for method, choice in of.items():
                assert set(choice.settings) <= set(METHODS[method].defaults)

    @pytest.mark.parametrize("text", ["", "[]", '{"toy": 3}', '{"toy": {"sgd": {"settings": {}}}}', '{"toy"'])
    def test_a_broken_file_is_an_error_that_names_it(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "tuned.json"
        path.write_text(text)
        with pytest.raises(ChoicesError, match=r"tuned.json is not a file of tuned settings"):
            read_choices(path)
        with pytest.raises(ChoicesError):
            write_choice(self.choice(), path)
        assert path.read_text() == text, "a file that cannot be read is not overwritten"

    @pytest.mark.parametrize("settings", [["a"], 5, None, "learning_rate"])
    def test_settings_that_are_none_are_an_error_too(self, tmp_path: Path, settings: Any) -> None:
        path = write_choice(self.choice(), tmp_path / "tuned.json")
        content = json.loads(path.read_text())
        content["toy"]["sgd"]["settings"] = settings
        path.write_text(json.dumps(content))
        with pytest.raises(
            ChoicesError, match=r"tuned.json is not a file of tuned settings .*must be an object, found"
        ):
            read_choices(path)

    def test_searches_that_end_together_do_not_lose_choices(self, tmp_path: Path) -> None:
        path = tmp_path / "tuned.json"
        threads = [
            threading.Thread(target=write_choice, args=(self.choice(method=f"method{k}"), path)) for k in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(read_choices(path)["toy"]) == 8
