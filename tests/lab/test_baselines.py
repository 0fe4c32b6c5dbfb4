"""One suite that every method of the registry must pass."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import LOSS, blobs, build, network, objective, parameters, stepper

from shf.lab.baselines import METHODS, find
from shf.lab.baselines.objective import TrainingObjective
from shf.lab.models import incoming_weights, weight_layers

NAMES = sorted(METHODS)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", NAMES)
class TestEveryMethod:
    def test_the_objective_falls(self, name: str) -> None:
        model, (inputs, targets) = network(), blobs()
        method, step = build(name, model), stepper(METHODS[name], inputs, targets)
        before = objective(model, inputs, targets)
        for k in range(30):
            step(method, k)
            if k % 3 == 2:
                method.next_epoch()
        assert objective(model, inputs, targets) < 0.8 * before

    @pytest.mark.parametrize("stop", [1, 4])
    def test_saved_and_loaded_it_goes_on_bitwise(self, name: str, stop: int) -> None:
        """With dropout, in the middle of an epoch, in a fresh model and method, after other use of torch's generator."""
        spec, (inputs, targets) = METHODS[name], blobs()
        step, model = stepper(spec, inputs, targets), network(dropout=0.3)
        method = build(name, model, weight_decay=1e-3)
        for k in range(stop):
            step(method, k)
            if k == 2:
                method.next_epoch()
        saved = through_a_file({"model": model.state_dict(), "method": method.state_dict()})
        reports = [step(method, k) for k in range(stop, stop + 3)]

        resumed_model = network(dropout=0.3)
        resumed = build(name, resumed_model, weight_decay=1e-3)
        resumed_model.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["method"])
        torch.manual_seed(12345)
        again = [step(resumed, k) for k in range(stop, stop + 3)]
        assert again == reports
        assert torch.equal(parameters(model), parameters(resumed_model))

    def test_the_state_is_plain_data_of_its_own(self, name: str) -> None:
        model, (inputs, targets) = network(), blobs()
        method, step = build(name, model), stepper(METHODS[name], inputs, targets)
        step(method, 0)
        state = method.state_dict()

        def check(value: Any) -> None:
            if isinstance(value, dict):
                for key, inner in value.items():
                    assert isinstance(key, str | int)
                    check(inner)
            elif isinstance(value, list | tuple):
                for inner in value:
                    check(inner)
            else:
                assert value is None or isinstance(value, bool | int | float | str | Tensor), type(value)

        check(state)
        frozen = copy.deepcopy(state)
        for k in range(1, 4):
            step(method, k)
        assert _equal(state, frozen), "a state that was taken does not change with later steps"

    def test_the_report_is_the_objective_before_the_update(self, name: str) -> None:
        spec, model, (inputs, targets) = METHODS[name], network(), blobs()
        method, step = build(name, model, weight_decay=0.01), stepper(METHODS[name], inputs, targets)
        for k in range(4):
            seen = slice(None) if spec.reads_batches else slice(30 * (k % 3), 30 * (k % 3) + 30)
            expected = objective(model, inputs[seen], targets[seen], weight_decay=0.01)
            report = step(method, k)
            assert report["objective"] == pytest.approx(expected, rel=1e-5)
            assert all(type(value) is float for value in report.values())
            assert report["gradients"] >= (3 if spec.reads_batches else 1)
            assert report["evaluations"] >= 0
            assert report["products"] >= 0

    def test_the_global_generator_is_neither_read_nor_moved(self, name: str) -> None:
        spec, (inputs, targets) = METHODS[name], blobs()
        ends = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            before, model = torch.get_rng_state(), network(dropout=0.3)
            torch.set_rng_state(before)
            method, step = build(name, model), stepper(spec, inputs, targets)
            for k in range(4):
                step(method, k)
            assert torch.equal(before, torch.get_rng_state())
            ends.append(parameters(model))
        assert torch.equal(*ends)

    def test_its_seed_decides_its_draws(self, name: str) -> None:
        spec, (inputs, targets) = METHODS[name], blobs()
        first = []
        for seed in (1, 1, 2):
            model = network(dropout=0.3)
            first.append(stepper(spec, inputs, targets)(build(name, model, seed=seed), 0)["objective"])
        assert first[0] == first[1] != first[2]

    def test_sparse_inputs_give_what_dense_ones_give(self, name: str) -> None:
        if name == "soap":
            pytest.skip("its eigenbasis is not unique while few batches have made it")
        spec, (inputs, targets) = METHODS[name], blobs()
        inputs = inputs.relu()
        dense, sparse = network().double(), network(sparse_input=True).double()
        state = dense.state_dict()
        sparse.load_state_dict({**state, "linear1.weight": state["linear1.weight"].T})
        for model, rows in ((dense, inputs.double()), (sparse, inputs.double().to_sparse_csr())):
            # a sparse layer has a diagonal where a dense one has factors, and its transposed weight draws another first λ
            own = {"preconditioner": "jacobi", "damping": 1.0} if name == "fast" else {}
            method, step = build(name, model, **own), stepper(spec, rows, targets)
            for k in range(3):
                step(method, k)
        tolerance = {"muon": 1e-2}.get(name, 1e-6)  # Muon iterates in bfloat16
        for ours, theirs in zip(weight_layers(sparse), weight_layers(dense), strict=True):
            torch.testing.assert_close(incoming_weights(ours), incoming_weights(theirs), rtol=tolerance, atol=tolerance)

    def test_unknown_settings_are_refused_by_name(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"{name} has no setting 'colour'; its settings are: .*weight_decay"):
            METHODS[name].build(network(), LOSS, {"colour": "blue"})

    def test_its_specification_is_consistent(self, name: str) -> None:
        spec = METHODS[name]
        assert spec.name == name
        assert set(spec.grid) <= set(spec.defaults)
        assert {"weight_decay", "seed"} <= set(spec.defaults)
        assert spec.batch == "experiment" or isinstance(spec.batch, int)
        assert all(len(values) >= 2 for values in spec.grid.values())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


class TestRegistry:
    def test_all_methods_of_the_laboratory_are_there(self) -> None:
        expected = (
            "shf hf nag momentum-0.99 momentum-0.9 sgd sgd-vi dropout-sgd-all dropout-sgd-last ksd vsgd lbfgs adagrad "
            "adam muon fast soap shampoo prodigy schedule-free"
        )
        assert set(METHODS) == set(expected.split())

    def test_an_unknown_name_is_answered_with_the_nearest(self) -> None:
        assert find("adam") is METHODS["adam"]
        with pytest.raises(ValueError, match="no optimizer is called 'addam'; did you mean 'adam'"):
            find("addam")

    def test_what_defines_a_method_beside_its_settings(self) -> None:
        assert METHODS["sgd-vi"].initialisation == "normalised"
        assert METHODS["dropout-sgd-all"].dropout == "all"
        assert METHODS["dropout-sgd-last"].dropout == "last"
        assert {name for name, spec in METHODS.items() if spec.reads_batches} == {"hf", "ksd", "lbfgs"}
        untuned = "shf fast hf ksd lbfgs prodigy schedule-free"
        assert {name for name, spec in METHODS.items() if not spec.grid} == set(untuned.split())


class TestObjective:
    def test_all_batches_count_by_their_rows(self) -> None:
        model, (inputs, targets) = network(), blobs(80)
        o = TrainingObjective(model, LOSS, weight_decay=0.1)
        whole_value, whole = o.gradient(inputs, targets)
        batches = [(inputs[a:b], targets[a:b]) for a, b in ((0, 50), (50, 60), (60, 80))]
        value, gradient, count = o.gradient_over(batches)
        assert count == 3
        assert value == pytest.approx(whole_value, rel=1e-6)
        for ours, expected in zip(gradient, whole, strict=True):
            torch.testing.assert_close(ours, expected)

    def test_replay_repeats_the_draws_and_goes_on_after_them(self) -> None:
        model, (inputs, targets) = network(dropout=0.5), blobs()
        o = TrainingObjective(model, LOSS, seed=3)
        first, _ = o.gradient(inputs, targets)
        again, _ = o.gradient(inputs, targets, replay=True)
        following, _ = o.gradient(inputs, targets)
        assert first == again != following

    def test_no_batches_and_no_parameters_are_errors(self) -> None:
        with pytest.raises(ValueError, match="there are no batches"):
            TrainingObjective(network(), LOSS).gradient_over([])
        with pytest.raises(ValueError, match="no trainable parameters"):
            TrainingObjective(nn.ReLU(), LOSS)
        with pytest.raises(ValueError, match="weight_decay=-1"):
            TrainingObjective(network(), LOSS, weight_decay=-1.0)
