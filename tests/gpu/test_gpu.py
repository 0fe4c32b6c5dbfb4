"""What a step does on an accelerator is what it does on the CPU: the declared cases, the optimizers, resuming, errors."""

import copy
import io

import pytest
import torch
from torch import nn

import pretend
import shf
from cases import CASES
from helpers import labelled, mlp, normalised, theta, valued
from shf.data.tree import leaves, map_leaves

SPREAD = {
    "MLP, ReLU", "cross-entropy, class weights", "cross-entropy, per case", "stochastic depth",
    "checkpointing with dropout inside", "tied weights", "Conv2d, groups", "Conv2d, BatchNorm", "LSTM, projection",
    "GRU, packed sequences", "MultiheadAttention, causal", "Tree-LSTM, trees of different shapes", "Embedding, padding_idx",
}  # fmt: skip
"""The cases of the ordinary suite; the others are slow."""
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
SOLVERS = {
    "default": {},
    "curvature batch": {"curvature_batch": 5, "weight_decay": 1e-3, "max_norm": 1.0},
    "chunks": {"microbatch": 5, "curvature_batch": 9},
    "fast": dict(shf.presets.fast),
    "held-out": {"damping_rule": "held-out", "delta_momentum": "exact", "averaging": 0.9, "cg_worth": True},
    "jacobi, first worse": {"preconditioner": "jacobi", "backtracking": "first-worse", "noise_every": 1},
    "residual": dict(shf.presets.residual),
    "dense": {"solver": "dense", "weight_decay": 1e-3},
    "rows": {"solver": "rows"},
}


def moved(value, device, dtype):
    """Inputs and targets, packed sequences and lists of trees too."""
    if hasattr(value, "batch_sizes"):
        return value.to(dtype).to(device)
    return map_leaves(lambda t: t.to(dtype).to(device) if t.is_floating_point() else t.to(device), value)


def on(value, device, dtype):
    """A copy of a model or loss there."""
    return copy.deepcopy(value).to(dtype).to(device) if isinstance(value, nn.Module) else value


def same(found, expected, tolerance):
    gap = (found.detach().cpu() - expected.detach().cpu()).abs().max()
    assert gap <= tolerance * expected.detach().abs().max().cpu().clamp_min(1.0)


def draws(case, model, data):
    """Whether the numbers of a step depend on its seed: those of another device are others."""
    steps = [shf.SHF(copy.deepcopy(model), case.loss, seed=s, **case.handling).step(*data) for s in (3, 4)]
    return steps[0].loss_before != steps[1].loss_before


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in SPREAD else pytest.mark.slow) for c in CASES]
)
def test_a_declared_case_takes_the_steps_of_the_cpu(case, device, dtype, tolerance):
    torch.manual_seed(1)
    model, data = on(case.model(), "cpu", dtype), [moved(part, "cpu", dtype) for part in case.data()]
    there, loss = on(model, device, dtype), on(case.loss, device, dtype)
    comparable = device.type == pretend.NAME or not draws(case, model, data)
    own = shf.SHF(there, loss, seed=3, **case.handling)
    reference = shf.SHF(model, on(case.loss, "cpu", dtype), seed=3, **case.handling)
    for _ in range(2):
        info = own.step(*(moved(part, device, dtype) for part in data))
        expected = reference.step(*data)
        assert info.loss_after <= info.loss_before
        if comparable:
            assert info.loss_after == pytest.approx(expected.loss_after, rel=tolerance, abs=tolerance)
            same(theta(there), theta(model), tolerance)


@pytest.mark.parametrize("name", SOLVERS)
def test_every_way_to_solve_takes_the_steps_of_the_cpu(name, device, dtype, tolerance):
    squares = name in ("residual", "dense", "rows")
    inputs, targets = valued(dtype=dtype) if squares else labelled(dtype=dtype)
    loss, model = MSE if squares else CE, mlp(dtype=dtype)
    there = on(model, device, dtype)
    reference, own = (shf.SHF(m, loss, seed=0, **SOLVERS[name]) for m in (model, there))
    for _ in range(3):
        expected = reference.step(inputs, targets)
        info = own.step(inputs.to(device), targets.to(device))
        assert (info.cg_stop, info.accepted) == (expected.cg_stop, expected.accepted)
        same(theta(there), theta(model), 100 * tolerance)
    assert all(t.device == device for state in own.state.values() for t in leaves(state) if t.ndim)


def test_hf_takes_the_steps_of_the_cpu(device, dtype, tolerance):
    batches = [labelled(7, dtype, seed=1), labelled(5, dtype, seed=2)]
    model = mlp(dtype=dtype)
    there = on(model, device, dtype)
    reference, own = (shf.HF(m, CE, seed=0) for m in (model, there))
    for _ in range(2):
        reference.step(batches, curvature=batches[0])
        moving = [tuple(t.to(device) for t in batch) for batch in batches]
        own.step(moving, curvature=moving[0])
        same(theta(there), theta(model), 100 * tolerance)


@pytest.mark.parametrize(
    "options", [SOLVERS["default"], SOLVERS["held-out"], SOLVERS["fast"]], ids=["default", "held-out", "fast"]
)
@pytest.mark.parametrize("way", ["device", "through the CPU"])
def test_a_saved_state_goes_on_bitwise(options, way, device, dtype):
    """Loaded where it was, or on the CPU first: the state follows the parameters."""
    data = [t.to(device) for t in labelled(dtype=dtype)]
    model = on(normalised(dtype), device, dtype)
    first = shf.SHF(model, CE, seed=0, **options)
    first.step(*data)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=device if way == "device" else "cpu", weights_only=True)
    again = on(normalised(dtype), device, dtype)
    again.load_state_dict(loaded["model"])
    second = shf.SHF(again, CE, seed=5, **options)
    second.load_state_dict(loaded["optimizer"])
    for _ in range(2):
        assert first.step(*data) == second.step(*data)
    assert torch.equal(theta(model), theta(again))


def test_dropout_is_the_same_in_every_pass_of_a_step_and_leaves_both_generators_alone(device, dtype):
    data = [t.to(device) for t in labelled(dtype=dtype)]
    model = on(mlp(dropout=0.5, dtype=dtype), device, dtype)
    module = torch.get_device_module(device)
    before = torch.get_rng_state(), module.get_rng_state()
    infos = [shf.SHF(copy.deepcopy(model), CE, seed=0, curvature_batch=5).step(*data) for _ in range(2)]
    assert infos[0] == infos[1]
    assert all(map(torch.equal, before, (torch.get_rng_state(), module.get_rng_state())))


def test_a_product_is_that_of_the_cpu(device, dtype, tolerance):
    model, (inputs, targets) = mlp(dtype=dtype), labelled(dtype=dtype)
    vector = torch.linspace(-1, 1, theta(model).numel(), dtype=dtype)
    there = shf.gauss_newton_product(on(model, device, dtype), CE, inputs.to(device), targets.to(device))
    same(there(vector.to(device)), shf.gauss_newton_product(model, CE, inputs, targets)(vector), tolerance)


def test_a_bad_batch_changes_nothing(device, dtype):
    inputs, targets = labelled(dtype=dtype)
    inputs[3] = torch.nan
    model = on(normalised(dtype), device, dtype)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(shf.NonFiniteError, match="not finite: inputs"):
        shf.SHF(model, CE).step(inputs.to(device), targets.to(device))
    assert shf.SHF(model, CE, nonfinite="skip").step(inputs.to(device), targets.to(device)).skipped
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("forgotten", ["inputs", "targets"])
def test_a_batch_that_was_not_moved_is_refused(forgotten, device, dtype):
    inputs, targets = labelled(dtype=dtype)
    model = on(mlp(dtype=dtype), device, dtype)
    before = theta(model)
    with pytest.raises(RuntimeError, match="device"):
        shf.SHF(model, CE).step(
            *((inputs, targets.to(device)) if forgotten == "inputs" else (inputs.to(device), targets))
        )
    assert torch.equal(theta(model), before)


def test_the_average_and_a_growing_loader(device, dtype):
    inputs, targets = (t.to(device) for t in labelled(40, dtype))
    loader = shf.GrowingLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=10, seed=0)
    model = on(mlp(dtype=dtype), device, dtype)
    optimizer = shf.SHF(model, CE, **{**shf.presets.fast, "averaging": 0.9})
    for x, t in loader:
        loader.hear(optimizer.step(x, t))
    own = theta(model)
    with optimizer.averaged():
        assert theta(model).device == device
        assert not torch.equal(theta(model), own)
    assert torch.equal(theta(model), own)


def test_tensors_of_the_cpu_do_not_mix_with_those_of_the_device(device):
    there = torch.ones(3, device=device)
    for operation in (
        lambda: there + torch.ones(3),
        lambda: torch.cat([there, torch.ones(3)]),
        lambda: there @ torch.ones(3),
    ):
        with pytest.raises(RuntimeError):
            operation()
    with pytest.raises((RuntimeError, ValueError)):
        there.normal_(generator=torch.Generator())
    assert torch.equal((there + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))
