"""One suite that every method of the registry must pass, then what is particular to each family."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shf.lab.baselines import METHODS, Method, MethodSpec, find
from shf.lab.baselines.dropout_sgd import DropoutSGDSettings, clip_incoming_
from shf.lab.baselines.ksd import krylov_subspace, minimise
from shf.lab.baselines.objective import Objective
from shf.lab.baselines.torch_methods import momentum_schedule
from shf.lab.baselines.vsgd import VSGD, VSGDSettings
from shf.lab.initialisation import initialise_
from shf.lab.models import classifier, incoming_weights, weight_layers

LOSS = nn.CrossEntropyLoss()
NAMES = sorted(METHODS)
# Few cases, few steps: methods whose defaults are meant for long runs get settings for short ones.
QUICK: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1},
    "sgd-vi": {"learning_rate": 0.1},
    "dropout-sgd-all": {"learning_rate": 1.0},
    "dropout-sgd-last": {"learning_rate": 1.0},
    "vsgd": {"first_samples": 2},
    "hf": {"cg_iterations": 20},
    "ksd": {"dimensions": 5, "bfgs_iterations": 5},
    "lbfgs": {"iterations": 2},
}


def blobs(rows: int = 90, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three noisy classes in six dimensions."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(rows) % 3
    centres = 2 * torch.randn(3, 6, generator=generator)
    return centres[targets] + torch.randn(rows, 6, generator=generator), targets


def network(*, dropout: float = 0.0, sparse_input: bool = False) -> nn.Sequential:
    model = classifier((6, 8, 8, 3), input_dropout=dropout, hidden_dropout=dropout, sparse_input=sparse_input)
    initialise_(model, "normalised", generator=torch.Generator().manual_seed(1), bias=0.1)
    return model


def build(name: str, model: nn.Module, **settings: Any) -> Method:
    return METHODS[name].build(model, LOSS, {**QUICK.get(name, {}), **settings})


Step = Callable[[Method, int], dict[str, float]]


def stepper(spec: MethodSpec, inputs: Tensor, targets: Tensor, size: int = 30) -> Step:
    """Step k of a method: on batch k mod n, or on all batches where it wants them."""
    dense = inputs.layout == torch.strided
    parts = [slice(i, i + size) for i in range(0, len(targets), size)]
    rows = inputs if dense else inputs.to_dense()
    batches = [(rows[p] if dense else rows[p].to_sparse_csr(), targets[p]) for p in parts]

    def step(method: Method, k: int) -> dict[str, float]:
        if spec.reads_batches:
            return method.step(batches, None)
        return method.step(*batches[k % len(batches)])

    return step


def objective(model: nn.Module, inputs: Tensor, targets: Tensor, weight_decay: float = 0.0) -> float:
    with torch.no_grad():
        penalty = sum(p.square().sum().item() for p in model.parameters() if p.ndim >= 2)
        return LOSS(model(inputs), targets).item() + 0.5 * weight_decay * penalty


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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
        spec, (inputs, targets) = METHODS[name], blobs()
        inputs = inputs.relu()
        dense, sparse = network().double(), network(sparse_input=True).double()
        state = dense.state_dict()
        sparse.load_state_dict({**state, "linear1.weight": state["linear1.weight"].T})
        for model, rows in ((dense, inputs.double()), (sparse, inputs.double().to_sparse_csr())):
            method, step = build(name, model), stepper(spec, rows, targets)
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
            "adam muon"
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
        assert {name for name, spec in METHODS.items() if not spec.grid} == {"shf", "hf", "ksd", "lbfgs"}


class TestObjective:
    def test_all_batches_count_by_their_rows(self) -> None:
        model, (inputs, targets) = network(), blobs(80)
        o = Objective(model, LOSS, weight_decay=0.1)
        whole_value, whole = o.gradient(inputs, targets)
        batches = [(inputs[a:b], targets[a:b]) for a, b in ((0, 50), (50, 60), (60, 80))]
        value, gradient, count = o.gradient_over(batches)
        assert count == 3
        assert value == pytest.approx(whole_value, rel=1e-6)
        for ours, expected in zip(gradient, whole, strict=True):
            torch.testing.assert_close(ours, expected)

    def test_replay_repeats_the_draws_and_goes_on_after_them(self) -> None:
        model, (inputs, targets) = network(dropout=0.5), blobs()
        o = Objective(model, LOSS, seed=3)
        first, _ = o.gradient(inputs, targets)
        again, _ = o.gradient(inputs, targets, replay=True)
        following, _ = o.gradient(inputs, targets)
        assert first == again != following

    def test_no_batches_and_no_parameters_are_errors(self) -> None:
        with pytest.raises(ValueError, match="there are no batches"):
            Objective(network(), LOSS).gradient_over([])
        with pytest.raises(ValueError, match="no trainable parameters"):
            Objective(nn.ReLU(), LOSS)
        with pytest.raises(ValueError, match="weight_decay=-1"):
            Objective(network(), LOSS, weight_decay=-1.0)


class TestMomentum:
    @pytest.mark.parametrize(
        ("t", "mu"), [(0, 0.5), (249, 0.5), (250, 0.75), (500, 1 - 1 / 6), (750, 0.875), (250_000, 0.99)]
    )
    def test_schedule(self, t: int, mu: float) -> None:
        assert momentum_schedule(t, 0.99) == pytest.approx(mu)

    def test_it_is_reduced_near_the_end(self) -> None:
        assert momentum_schedule(9000, 0.99, final_from=9000) == 0.9
        assert momentum_schedule(8999, 0.99, final_from=9000) > 0.98
        assert momentum_schedule(0, 0.99, final_from=0) == 0.5, "never raised"

    def test_the_reduction_is_placed_by_the_number_of_updates(self) -> None:
        inputs, targets = blobs()
        method = build("momentum-0.99", network(), total_updates=10, final_updates=2, max_momentum=0.95)
        method.updates = 7_000
        assert method.step(inputs, targets)["momentum"] == 0.9
        free = build("momentum-0.99", network(), max_momentum=0.95)
        free.updates = 7_000
        assert free.step(inputs, targets)["momentum"] == 0.95

    @pytest.mark.parametrize("name", ["nag", "momentum-0.99"])
    def test_updates_are_those_of_sutskever(self, name: str) -> None:
        """v ← μv - ε∇f(θ + μv), θ ← θ + v (NAG; classical momentum takes ∇f(θ)); torch keeps NAG's look-ahead point."""
        inputs, targets = blobs()
        model, reference = network().double(), network().double()
        inputs = inputs.double()
        method = build(name, model, learning_rate=0.05)
        theta, v, mu = parameters(reference), torch.zeros_like(parameters(reference)), 0.5
        for _ in range(6):
            method.step(inputs, targets)
            nn.utils.vector_to_parameters(theta + mu * v if name == "nag" else theta, reference.parameters())
            loss = LOSS(reference(inputs), targets)
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))])
            v = mu * v - 0.05 * gradient
            theta = theta + v
        torch.testing.assert_close(parameters(model), theta + mu * v if name == "nag" else theta)


class TestMuon:
    def test_matrices_go_to_muon_and_biases_to_adamw(self) -> None:
        method = build("muon", network())
        muon, adamw = method.optimizers
        assert {p.ndim for group in muon.param_groups for p in group["params"]} == {2}
        assert {p.ndim for group in adamw.param_groups for p in group["params"]} == {1}


class TestLBFGS:
    def test_a_convex_quadratic_is_solved(self) -> None:
        inputs, targets = torch.randn(40, 5), torch.randn(40, 2)
        model = nn.Linear(5, 2)
        method = METHODS["lbfgs"].build(model, nn.MSELoss(), {"iterations": 30})
        method.step([(inputs[:25], targets[:25]), (inputs[25:], targets[25:])], None)
        best = torch.linalg.lstsq(torch.cat([inputs, torch.ones(40, 1)], 1), targets).solution
        torch.testing.assert_close(torch.cat([model.weight.T, model.bias[None]]), best, atol=1e-3, rtol=1e-3)


class TestDropoutSGD:
    def test_updates_are_the_paper_s(self) -> None:
        """Δθ = pΔθ - (1-p) a ∇f with a and p by epoch: the rate is inside the sum."""
        inputs, targets = blobs()
        model, reference = network().double(), network().double()
        inputs = inputs.double()
        method = build("dropout-sgd-last", model, learning_rate=2.0, momentum_epochs=4, max_norm=None)
        theta, delta = parameters(reference), 0.0
        for epoch in range(6):
            a, p = 2.0 * 0.998**epoch, min(0.5 + 0.49 * epoch / 4, 0.99)
            for _ in range(2):
                report = method.step(inputs, targets)
                assert report["learning_rate"] == pytest.approx(a)
                assert report["momentum"] == pytest.approx(p)
                nn.utils.vector_to_parameters(theta, reference.parameters())
                loss = LOSS(reference(inputs), targets)
                gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))])
                delta = p * delta - (1 - p) * a * gradient
                theta = theta + delta
            method.next_epoch()
        torch.testing.assert_close(parameters(model), theta)

    def test_defaults_are_the_paper_s(self) -> None:
        settings = DropoutSGDSettings()
        assert (settings.rate(0), settings.momentum(0), settings.momentum(500)) == (10.0, 0.5, 0.99)
        assert settings.momentum(250) == pytest.approx(0.745)
        assert settings.momentum(2000) == 0.99
        assert METHODS["dropout-sgd-all"].defaults["max_norm"] == 15.0
        assert METHODS["dropout-sgd-all"].batch == 100

    @pytest.mark.parametrize("sparse_input", [False, True])
    def test_units_above_the_bound_are_scaled_back_to_it(self, sparse_input: bool) -> None:
        model = network(sparse_input=sparse_input)
        layer = next(weight_layers(model))
        with torch.no_grad():
            incoming_weights(layer)[0].mul_(100.0)
        before = incoming_weights(layer).clone()
        clip_incoming_(model, 15.0)
        norms = incoming_weights(layer).square().sum(1)
        assert norms[0].item() == pytest.approx(15.0, rel=1e-4)
        ratio = incoming_weights(layer)[0] / before[0]
        torch.testing.assert_close(ratio, ratio[0].expand(6), msg="the direction is kept")
        assert torch.equal(incoming_weights(layer)[1:], before[1:]), "units within the bound are left alone"

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("learning_rate", 0.0),
            ("rate_decay", 1.5),
            ("first_momentum", 1.0),
            ("momentum_epochs", 0),
            ("max_norm", -1.0),
        ],
    )
    def test_bad_settings_are_named(self, setting: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"{setting}={value}"):
            DropoutSGDSettings(**{setting: value})


class Noisy(nn.Module):
    """f = ½ Σ h (θ - c)², where each row of the inputs is one noisy centre c."""

    def __init__(self, h: Tensor, start: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.clone())
        self.h = h

    def forward(self, c: Tensor) -> Tensor:
        return 0.5 * self.h * (self.theta - c).square()


def total(outputs: Tensor, targets: Any) -> Tensor:
    return outputs.sum(1).mean()


class TestVSGD:
    h = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)

    def method(self, model: Noisy, **settings: Any) -> VSGD:
        return VSGD(Objective(model, total), VSGDSettings(**settings))

    def test_without_noise_and_overestimate_the_first_update_is_newton_s(self) -> None:
        """All gradients agree: g²/v = 1, and differences find h, so η = 1/h for every parameter."""
        model = Noisy(self.h, torch.full((3,), 5.0, dtype=torch.float64))
        method = self.method(model, slow_start=1.0, first_samples=2)
        centre = torch.zeros(1, 3, dtype=torch.float64)
        for _ in range(2):
            assert method.step(centre, None)["learning_rate"] == 0.0
            assert torch.equal(model.theta.detach(), torch.full((3,), 5.0, dtype=torch.float64))
        torch.testing.assert_close(method.averages.h, self.h)
        method.step(centre, None)
        torch.testing.assert_close(model.theta.detach(), torch.zeros(3, dtype=torch.float64), atol=1e-8, rtol=0)

    def test_rates_fall_as_noise_takes_over(self) -> None:
        generator = torch.Generator().manual_seed(0)
        model = Noisy(self.h, torch.full((3,), 20.0, dtype=torch.float64))
        method = self.method(model, slow_start=2.0)
        rates, distances = [], []
        for _ in range(1500):
            centre = torch.randn(1, 3, generator=generator, dtype=torch.float64)
            rates.append(method.step(centre, None)["learning_rate"])
            distances.append(model.theta.detach().abs().max().item())
        assert max(rates) > 0.1
        assert rates[-1] < 0.05
        assert max(distances[-100:]) < 0.3, "far below the noise of a single sample"
        assert method.averages.tau.min() > 10

    def test_rates_rise_again_when_the_optimum_moves(self) -> None:
        generator = torch.Generator().manual_seed(0)
        model = Noisy(self.h, torch.zeros(3, dtype=torch.float64))
        method = self.method(model, slow_start=2.0)
        for _ in range(500):
            method.step(0.1 * torch.randn(1, 3, generator=generator, dtype=torch.float64), None)
        for _ in range(300):
            method.step(10.0 + 0.1 * torch.randn(1, 3, generator=generator, dtype=torch.float64), None)
        torch.testing.assert_close(model.theta.detach(), torch.full((3,), 10.0, dtype=torch.float64), atol=0.2, rtol=0)

    def test_outliers_lengthen_the_memory(self) -> None:
        model = Noisy(self.h, torch.zeros(3, dtype=torch.float64))
        method = self.method(model)
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            method.step(torch.randn(1, 3, generator=generator, dtype=torch.float64), None)
        averages, tau = method.averages, method.averages.tau.clone()
        far = averages.g + 10 * averages.v.sqrt()
        averages.update_(far, averages.h.clone(), method.settings)
        assert torch.equal(averages.tau, tau + 1)
        averages.update_(averages.g.clone(), averages.h.clone(), method.settings)
        assert torch.equal(averages.tau, tau + 1)

    @pytest.mark.parametrize(("setting", "value"), [("slow_start", 0.5), ("first_samples", 1), ("outlier", 0.0)])
    def test_bad_settings_are_named(self, setting: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"{setting}={value}"):
            VSGDSettings(**{setting: value})


class TestKSD:
    @pytest.fixture
    def quadratic(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(12, 12, generator=generator, dtype=torch.float64)
        return A @ A.T + torch.eye(12), torch.randn(12, generator=generator, dtype=torch.float64), torch.rand(12) + 0.5

    def test_the_subspace_is_the_preconditioned_krylov_space(self, quadratic: tuple[Tensor, Tensor, Tensor]) -> None:
        B, g, D = quadratic
        previous = torch.randn(12, dtype=torch.float64)
        found = krylov_subspace(lambda v: B @ v, g, D, 4, previous)
        V = found.basis
        torch.testing.assert_close(V @ V.T, torch.eye(5, dtype=torch.float64))
        torch.testing.assert_close(found.curvature, V @ B @ V.T)
        powers = [g / D]
        for _ in range(3):
            powers.append(B @ powers[-1] / D)
        dense = torch.stack([*powers, previous])
        outside = dense - dense @ V.T @ V
        assert outside.norm() < 1e-8 * dense.norm()
        assert found.products == 5

    def test_an_exhausted_krylov_space_is_smaller(self) -> None:
        g = torch.tensor([1.0, 1.0, 0.0, 0.0])
        found = krylov_subspace(lambda v: 3 * v, g, torch.ones(4), 4, previous=None)
        assert found.basis.shape == (1, 4)
        with_previous = krylov_subspace(lambda v: 3 * v, g, torch.ones(4), 4, previous=torch.tensor([0.0, 0, 1, 0]))
        assert with_previous.basis.shape == (2, 4)
        same = krylov_subspace(lambda v: 3 * v, g, torch.ones(4), 4, previous=2 * g)
        assert same.basis.shape == (1, 4)

    def test_the_first_trial_inside_the_subspace_is_newton_s(self) -> None:
        rng = np.random.default_rng(0)
        M = rng.normal(size=(5, 5))
        H, b = M @ M.T + 0.1 * np.eye(5), rng.normal(size=5)
        points = []

        def f(a: Any) -> tuple[float, Any]:
            points.append(a)
            return 0.5 * a @ H @ a + b @ a, H @ a + b

        a = minimise(f, torch.from_numpy(H), floor=1e-8, iterations=20)
        np.testing.assert_allclose(a, -np.linalg.solve(H, b), rtol=1e-4, atol=1e-6)
        assert len(points) <= 6, "the curvature is exact, so BFGS has nothing to learn"

    def test_no_progress_leaves_everything_where_it_was(self) -> None:
        a = minimise(lambda a: (float("nan") if a.any() else 1.0, np.ones(3)), torch.eye(3), floor=1e-4, iterations=5)
        assert not a.any()

    def test_a_convex_quadratic_is_solved_in_one_step(self) -> None:
        inputs, targets = torch.randn(60, 4).double(), torch.randn(60, 1).double()
        model = nn.Linear(4, 1).double()
        method = METHODS["ksd"].build(model, nn.MSELoss(), {"dimensions": 5, "floor": 1e-9})
        method.step([(inputs, targets)], None)
        best = torch.linalg.lstsq(torch.cat([inputs, torch.ones(60, 1)], 1), targets).solution
        torch.testing.assert_close(torch.cat([model.weight.T, model.bias[None]]), best, atol=1e-5, rtol=1e-5)

    def test_the_previous_direction_joins_the_subspace(self) -> None:
        model, (inputs, targets) = network(), blobs()
        method, step = build("ksd", model), stepper(METHODS["ksd"], inputs, targets)
        assert [step(method, k)["dimensions"] for k in range(2)] == [5.0, 6.0]

    def test_an_interrupted_search_leaves_the_parameters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, (inputs, targets) = network(), blobs()
        method, before = build("ksd", model), parameters(model)
        calls = 0
        original = Objective.gradient

        def interrupt(self: Objective, *args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return original(self, *args, **options)

        monkeypatch.setattr(Objective, "gradient", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stepper(METHODS["ksd"], inputs, targets)(method, 0)
        assert torch.equal(parameters(model), before)


class TestSecondOrder:
    def test_shf_tells_what_the_record_needs(self) -> None:
        model, (inputs, targets) = network(), blobs()
        method = build("shf", model, curvature_batch=9, cg_iterations=4, update_decay=0.5)
        report = method.step(inputs, targets)
        expected = "objective damping reduction_ratio cg_decay update_scale step_size chosen_iterate cg_steps accepted"
        assert set(expected.split()) <= set(report)
        assert report["damping"] == 1.0
        assert report["cg_decay"] == 0.5
        assert report["products"] == pytest.approx(0.1 * report["cg_steps"]), "9 of 90 rows: a tenth of a pass each"
        method.next_epoch()
        following = method.step(inputs, targets)
        assert following["cg_decay"] == pytest.approx(0.505)
        assert following["update_scale"] == 0.5

    def test_hf_takes_its_curvature_batches_in_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, (inputs, targets) = network(), blobs()
        method = build("hf", model)
        batches = [(inputs[i : i + 30], targets[i : i + 30]) for i in (0, 30, 60)]
        seen = []
        original = method.optimizer.step

        def step(data: Any, curvature: Any) -> Any:
            seen.append(next(k for k, (x, _) in enumerate(batches) if x is curvature[0]))
            return original(data, curvature)

        monkeypatch.setattr(method.optimizer, "step", step)
        for _ in range(4):
            report = method.step(batches, None)
        assert seen == [0, 1, 2, 0]
        assert report["gradients"] == 3, "one gradient is a pass over all three batches"
        assert report["evaluations"] % 3 == 0

    def test_hf_takes_a_curvature_batch_that_it_is_given(self) -> None:
        model, (inputs, targets) = network(), blobs()
        report = build("hf", model).step([(inputs, targets)], (inputs[:10], targets[:10]))
        assert report["accepted"] == 1.0
