"""What is particular to each family of methods: schedules, update rules, subspaces, reports."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy import LOSS, blobs, build, network, parameters, stepper

from shf.lab.baselines import METHODS
from shf.lab.baselines.dropout_sgd import DropoutSGDSettings, clip_incoming_
from shf.lab.baselines.ksd import krylov_subspace, minimise
from shf.lab.baselines.objective import TrainingObjective
from shf.lab.baselines.torch_methods import momentum_schedule
from shf.lab.baselines.vsgd import VSGD, VSGDSettings
from shf.lab.experiments import ExperimentError
from shf.lab.models import incoming_weights, weight_layers


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
        for total, updates, mu in (
            (20_000, 18_999, 0.95),
            (20_000, 19_000, 0.9),
            (8000, 7199, 0.95),
            (8000, 7200, 0.9),
            (None, 10**6, 0.95),
        ):
            method = build("momentum-0.99", network(), total_updates=total, max_momentum=0.95)
            method.updates = updates
            assert method.step(inputs, targets)["momentum"] == mu

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


class TestBorrowed:
    def test_schedule_free_is_judged_by_its_average(self) -> None:
        model, (inputs, targets) = network(), blobs()
        method, step = build("schedule-free", model), stepper(METHODS["schedule-free"], inputs, targets)
        for k in range(5):
            step(method, k)
        at_work = parameters(model)
        with method.averaged():
            judged = parameters(model)
        assert not torch.equal(judged, at_work)
        torch.testing.assert_close(parameters(model), at_work)

    @pytest.mark.parametrize(
        ("name", "package", "words"),
        [("soap", "pytorch_optimizer", "pytorch-optimizer"), ("prodigy", "prodigyopt", "prodigyopt")],
    )
    def test_an_absent_package_is_named(self, monkeypatch: Any, name: str, package: str, words: str) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ExperimentError, match=rf"package {words}: pip install '\.\[lab,opponents\]'"):
            build(name, network())


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
        return VSGD(TrainingObjective(model, total), VSGDSettings(**settings))

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
        original = TrainingObjective.gradient

        def interrupt(self: TrainingObjective, *args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return original(self, *args, **options)

        monkeypatch.setattr(TrainingObjective, "gradient", interrupt)
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
