"""State: plain data, unchanged by saving and loading, and enough to continue bit by bit in a new process."""

import copy
import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shf
from helpers import identical, labelled, mlp, normalised, snapshot, valued

STEPS = 6
DTYPES = {"float32": torch.float32, "float64": torch.float64}
MODELS = {"dropout": lambda dtype: mlp(dropout=0.5, dtype=dtype), "batchnorm": normalised}
SEED = 11


def make(name: str, dtype: torch.dtype, **options) -> shf.SHF:
    """The optimizer of a case, at whatever state: everything that counts is loaded over it."""
    settings = {"curvature_batch": 5, "update_decay": 0.9, "weight_decay": 0.01, "cg_decay_growth": 1.3, **options}
    return shf.SHF(MODELS[name](dtype), nn.CrossEntropyLoss(), **settings)


def advance(optimizer: shf.SHF, begin: int, end: int) -> list[shf.StepInfo]:
    """Steps begin … end-1 of the run: two batches an epoch."""
    infos = []
    for k in range(begin, end):
        dtype = next(optimizer.model.parameters()).dtype
        infos.append(optimizer.step(*labelled(dtype=dtype, seed=k % 2)))
        if k % 2:
            optimizer.next_epoch()
    return infos


def everything(optimizer: shf.SHF) -> dict:
    return {"model": optimizer.model.state_dict(), "optimizer": optimizer.state_dict()}


def through_a_file(data: dict) -> dict:
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(optimizer: shf.SHF, saved: dict) -> shf.SHF:
    optimizer.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return optimizer


# --- what the state is made of ------------------------------------------------------------------------------------------

PLAIN = (bool, int, float, str, type(None))


def test_state_is_plain_data():
    optimizer = make("dropout", torch.float32)
    advance(optimizer, 0, 3)
    state = optimizer.state_dict()
    assert all(type(v) is torch.Tensor for entry in state["state"].values() for v in entry.values())
    assert all(
        type(v) in PLAIN
        for group in state["param_groups"]
        for key, value in group.items()
        for v in (value.values() if isinstance(value, dict) else value if key == "params" else [value])
    )


@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_numbers_of_numpy_do_not_reach_the_state(number):
    """As a search over settings gives them: `torch.load(weights_only=True)` would refuse them."""
    values = {"damping": 2.0, "damping_factor": 0.9, "update_decay": 0.9, "cg_decay": 0.5, "cg_decay_growth": 1.3}
    options = {name: number(value) for name, value in {**values, "cg_decay_max": 0.6, "weight_decay": 0.01}.items()}
    optimizer = make("dropout", torch.float32, **options, cg_iterations=np.int64(2), seed=np.int64(3))
    unfrozen = nn.Parameter(torch.zeros(2))
    optimizer.model.extra = unfrozen
    optimizer.add_param_group({"params": unfrozen, "weight_decay": number(0.1)})
    advance(optimizer, 0, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert identical(torch.load(file, weights_only=True), optimizer.state_dict())


def test_delta_is_kept_per_parameter_and_everything_else_in_the_first_group():
    optimizer = make("dropout", torch.float64)
    advance(optimizer, 0, 3)
    assert all(set(optimizer.state[p]) == {"delta"} for p in optimizer.model.parameters())
    assert all(optimizer.state[p]["delta"].shape == p.shape for p in optimizer.model.parameters())
    assert [sorted(group) for group in optimizer.param_groups] == [
        ["params", "shf", "weight_decay"],
        ["params", "weight_decay"],
    ]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_state_survives_loading_unchanged(dtype):
    optimizer = make("dropout", dtype, seed=2**61 + 1)
    advance(optimizer, 0, 3)
    before = copy.deepcopy(optimizer.state_dict())
    loaded = load(make("dropout", dtype), through_a_file(everything(optimizer)))
    assert identical(loaded.state_dict(), before)
    assert identical(optimizer.state_dict(), before)


def test_what_was_saved_is_a_moment_not_a_window():
    optimizer = make("batchnorm", torch.float64)
    advance(optimizer, 0, 2)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    advance(optimizer, 2, 5)
    optimizer.disable_momentum()
    assert identical(state, before)


def test_a_state_may_be_loaded_twice():
    optimizer = make("dropout", torch.float64)
    advance(optimizer, 0, 2)
    saved = through_a_file(everything(optimizer))
    ends = []
    for _ in range(2):
        load(optimizer, saved)
        advance(optimizer, 2, 5)
        ends.append(snapshot(optimizer))
    assert identical(*ends)


def test_each_quantity_is_restored():
    optimizer = make("dropout", torch.float64, seed=SEED, damping=3.0)
    advance(optimizer, 0, 5)
    optimizer.disable_momentum()
    with pytest.warns(shf.SHFWarning, match=r"damping=1.0 \(saved with 3.0\)"):
        other = load(make("dropout", torch.float64, seed=1), everything(optimizer))
    assert optimizer.damping not in (1.0, 3.0)
    assert other.damping == optimizer.damping
    assert other.update_scale == optimizer.update_scale == pytest.approx(0.9**2)
    assert other.epoch_index == optimizer.epoch_index == 2
    assert other.cg_decay == optimizer.cg_decay == 0.0
    scalars = other.param_groups[0]["shf"]
    assert scalars["cg_decay"] == pytest.approx(0.5 * 1.3**2)
    assert (scalars["seed"], scalars["iteration"]) == (SEED, 5)
    assert identical(
        [other.state[p] for p in other.model.parameters()], [optimizer.state[p] for p in optimizer.model.parameters()]
    )


@pytest.mark.parametrize("after", [1, 2, 3])
def test_the_divergence_watch_is_part_of_the_state(after):
    def make_watched():
        return shf.SHF(mlp(), nn.MSELoss(), momentum_off_on_divergence=True)

    inputs, targets = valued()
    optimizer = make_watched()
    for epoch, scale in enumerate((1e3, 1e4, 1e5), start=1):
        optimizer.step(inputs, scale * targets)
        optimizer.next_epoch()
        if epoch == after:
            optimizer = load(make_watched(), through_a_file(everything(optimizer)))
    assert optimizer.cg_decay == 0


def test_groups_keep_their_weight_decay():
    def grouped(decay):
        model = mlp()
        groups = [{"params": model[0].parameters(), "weight_decay": decay}, {"params": model[2].parameters()}]
        return shf.SHF(model, nn.CrossEntropyLoss(), groups, weight_decay=decay / 2)

    saved = grouped(0.2)
    advance(saved, 0, 1)
    assert [g["weight_decay"] for g in load(grouped(0.0), everything(saved)).param_groups] == [0.2, 0.1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"averaging": 0.9, "cg_decay": 0.0},
        {"damping_rule": "held-out"},
        {"preconditioner": "kronecker", "factor_every": 2},
    ],
    ids=str,
)
def test_the_model_may_change_its_precision(options):
    """What is remembered of parameters follows them. Fails if an entry is used as it was kept."""
    torch.manual_seed(0)
    optimizer = shf.SHF(mlp(dtype=torch.float32), nn.CrossEntropyLoss(), seed=1, **options)
    for k in range(3):
        optimizer.step(*labelled(dtype=torch.float32, seed=k))
    optimizer.model.double()
    for k in range(3):
        assert optimizer.step(*labelled(dtype=torch.float64, seed=k)).accepted
    assert {t.dtype for entry in optimizer.state.values() for t in entry.values()} == {torch.float64}


def test_what_options_remember_that_are_off_is_dropped():
    """Fails if it stays: it would be stale once they are on again, and `cautious` would hold CG to one iteration."""
    model, batch = mlp(), labelled()
    extras = {"averaging": 0.9, "damping_rule": "held-out", "preconditioner": "kronecker", "damping": "auto"}
    full = shf.SHF(model, nn.CrossEntropyLoss(), cg_noise=0.3, noise_every=1, seed=1, **extras)
    full.step(*batch)
    saved = full.state_dict()
    saved["param_groups"][0]["shf"] |= {"cautious": True}
    plain = shf.SHF(model, nn.CrossEntropyLoss(), cg_iterations=4, seed=1)
    fresh = shf.SHF(mlp(), nn.CrossEntropyLoss(), seed=1)
    fresh.step(*batch)
    with pytest.warns(shf.SHFWarning, match="saved by an optimizer with other options"):
        plain.load_state_dict(saved)
    assert plain.param_groups[0]["shf"].keys() == fresh.param_groups[0]["shf"].keys()
    assert {name for entry in plain.state.values() for name in entry} == {"delta"}
    assert plain.step(*batch).cg_steps == 4
    again = shf.SHF(model, nn.CrossEntropyLoss(), cg_noise=0.3, noise_every=1, seed=1, **extras)
    again.load_state_dict(full.state_dict())
    assert identical(again.state_dict(), full.state_dict())


def test_the_state_of_another_optimizer_is_refused():
    optimizer = make("dropout", torch.float64)
    advance(optimizer, 0, 1)
    before = snapshot(optimizer)
    foreign = torch.optim.SGD([{"params": g["params"]} for g in optimizer.param_groups], lr=0.1)
    with pytest.raises(ValueError, match="not saved by SHF"):
        optimizer.load_state_dict(foreign.state_dict())
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize("kind", [shf.SHF, shf.HF])
@pytest.mark.parametrize(
    "state", [{}, {"param_groups": []}, {"weight": torch.ones(1)}], ids=["nothing", "none", "model"]
)
def test_what_is_no_state_of_an_optimizer_is_refused(kind, state):
    with pytest.raises(ValueError, match=f"not saved by {kind.__name__}"):
        kind(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()).load_state_dict(state)


def test_hf_takes_a_state_of_shf():
    model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
    auto, batch = shf.SHF(model, loss, damping="auto"), shf.HF(model, loss)
    with pytest.warns(shf.SHFWarning, match="saved by an optimizer with other options"):
        batch.load_state_dict(auto.state_dict())
    assert math.isnan(batch.damping)  # its first step chooses
    auto.step(torch.randn(20, 3), torch.randint(2, (20,)))
    with pytest.warns(shf.SHFWarning, match="other options"):
        batch.load_state_dict(auto.state_dict())
    assert batch.damping == auto.damping


# --- exact resume -------------------------------------------------------------------------------------------------------

CASES = [(name, dtype, k) for name in MODELS for dtype in DTYPES for k in range(STEPS)]

CONTINUE = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_state as here

torch.set_num_threads(1)
saved = torch.load(sys.argv[1], weights_only=True)
ends = {{}}
for (name, dtype, k) in here.CASES:
    torch.manual_seed(12345)  # nothing may hang on the global generator
    optimizer = here.load(here.make(name, here.DTYPES[dtype]), saved[f"{{name}} {{dtype}} {{k}}"])
    infos = here.advance(optimizer, k, here.STEPS)
    ends[f"{{name}} {{dtype}} {{k}}"] = here.everything(optimizer) | {{"last": repr(infos[-1])}}
torch.save(ends, sys.argv[2])
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Each case's end, uninterrupted and continued from step k in one new process."""
    folder = tmp_path_factory.mktemp("resume")
    torch.set_num_threads(1)
    checkpoints, ends = {}, {}
    for name in MODELS:
        for dtype in DTYPES:
            torch.manual_seed(0)
            optimizer = make(name, DTYPES[dtype], seed=SEED)
            for k in range(STEPS):
                checkpoints[f"{name} {dtype} {k}"] = copy.deepcopy(everything(optimizer))
                (info,) = advance(optimizer, k, k + 1)
            ends[name, dtype] = everything(optimizer) | {"last": repr(info)}
    torch.save(checkpoints, folder / "saved.pt")
    subprocess.run(
        [sys.executable, "-c", CONTINUE, str(folder / "saved.pt"), str(folder / "ends.pt")], check=True, timeout=1200
    )
    return ends, torch.load(folder / "ends.pt", weights_only=True)


@pytest.mark.xdist_group("resume")
@pytest.mark.parametrize(("name", "dtype", "k"), CASES)
def test_resume_in_a_new_process_is_exact(resumed, name, dtype, k):
    ends, found = resumed
    assert identical(found[f"{name} {dtype} {k}"], ends[name, dtype])
