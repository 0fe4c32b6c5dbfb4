"""Whatever interrupts a step, wherever: parameters, buffers and state are as they were, and the next step is the same."""

import copy
import itertools
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shf
from helpers import identical, labelled, mlp, normalised, snapshot
from shf.model.network import Network

CE = nn.CrossEntropyLoss()


class InterruptionError(Exception):
    """No error that anything else would raise or catch."""


class Countdown:
    """Raises at the n-th tick, once."""

    def __init__(self, error=None, at=0):
        self.error, self.left, self.ticks = error, at, 0

    def __call__(self):
        self.ticks += 1
        self.left -= 1
        if self.left == 0:
            raise self.error


class Interrupted(nn.Module):
    """A network with dropout and a buffer that counts passes; each forward pass is a tick, in the middle of it."""

    def __init__(self, tick):
        super().__init__()
        self.first, self.second, self.tick = normalised(), mlp(dropout=0.5), tick
        self.join = nn.Linear(6, 3).double()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes += 1
        left = self.first(x)
        self.tick()
        return self.join(torch.cat([left, self.second(x)], 1))


class Tick(torch.autograd.Function):
    """The identity; a tick in its backward pass, and in the backward pass of that."""

    @staticmethod
    def forward(ctx, x, tick):
        ctx.tick = tick
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.tick()
        return Tick.apply(g, ctx.tick), None


class InterruptedBackward(nn.Module):
    def __init__(self, tick):
        super().__init__()
        self.body, self.tick = normalised(), tick

    def forward(self, x):
        return Tick.apply(self.body(x), self.tick)


def in_forward(tick):
    return {"model": Interrupted(tick), "loss": CE}


def in_backward(tick):
    return {"model": InterruptedBackward(tick), "loss": CE}


def in_loss(tick):
    return {"model": normalised(), "loss": lambda z, t: (tick(), CE(z, t))[1]}


def in_select(tick):
    return {"model": normalised(), "loss": CE, "select": lambda data, rows: (tick(), data[rows])[1]}


PLACES = [in_forward, in_backward, in_loss, in_select]


def step_of(place, tick, warm):
    """An optimizer just before a step; if `warm`, not its first."""
    torch.manual_seed(0)
    optimizer = shf.SHF(**place(tick), curvature_batch=5, cg_iterations=2, seed=1)
    if warm:
        optimizer.step(*labelled(seed=1))
        optimizer.next_epoch()
    return optimizer


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_interrupted_anywhere_nothing_has_changed_and_the_step_can_be_repeated(place, warm):
    """Fails if a pass writes into the model's own buffers (no copy in `Network.buffers`)."""
    tick = Countdown()
    undisturbed = step_of(place, tick, warm)
    tick.ticks = 0
    undisturbed.step(*labelled())
    end, count = snapshot(undisturbed), tick.ticks
    assert count >= (2 if place is in_select and warm else 3)
    for n in range(1, count + 1):
        tick = Countdown()
        optimizer = step_of(place, tick, warm)
        before = snapshot(optimizer)
        tick.error, tick.left = InterruptionError(), n
        with pytest.raises(InterruptionError):
            optimizer.step(*labelled())
        assert identical(snapshot(optimizer), before), f"after an interruption at tick {n} of {count}"
        optimizer.step(*labelled())
        assert identical(snapshot(optimizer), end), f"repeated after an interruption at tick {n} of {count}"


ERRORS = [
    KeyboardInterrupt(),
    SystemExit(1),
    torch.OutOfMemoryError("out of memory"),
    RuntimeError("no"),
    GeneratorExit(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at", [1, 2, 4])
def test_any_kind_of_exception(error, at):
    tick = Countdown()
    undisturbed, optimizer = step_of(in_forward, Countdown(), True), step_of(in_forward, tick, True)
    undisturbed.step(*labelled())
    before = snapshot(optimizer)
    tick.error, tick.left = error, at
    with pytest.raises(type(error)):
        optimizer.step(*labelled())
    assert identical(snapshot(optimizer), before)
    optimizer.step(*labelled())
    assert identical(snapshot(optimizer), snapshot(undisturbed))


@pytest.mark.parametrize("at", [1, 2])
def test_a_passing_failure_while_rows_are_looked_at_is_not_held_against_the_model(at):
    """Before the first step the model runs on two and three rows; to be out of memory there says nothing about it."""
    undisturbed = step_of(in_forward, Countdown(), warm=False)
    undisturbed.step(*labelled())
    optimizer = step_of(in_forward, Countdown(torch.OutOfMemoryError("out of memory"), at), warm=False)
    before = snapshot(optimizer)
    with pytest.raises((ValueError, torch.OutOfMemoryError), match="out of memory"):
        optimizer.step(*labelled())
    assert identical(snapshot(optimizer), before)
    optimizer.step(*labelled())
    assert identical(snapshot(optimizer), snapshot(undisturbed))


# --- writing ------------------------------------------------------------------------------------------------------------


class InterruptedCopies(TorchFunctionMode):
    """Raises at the n-th copy_ into a parameter or buffer: in the middle of the writes at the end of a step."""

    def __init__(self, optimizer, tick):
        self.tick = tick
        self.owned = {id(tensor) for tensor in (*optimizer.model.parameters(), *optimizer.model.buffers())}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_ and id(args[0]) in self.owned:
            self.tick()
        return function(*args, **(kwargs or {}))


class InterruptedDict(defaultdict):
    """Raises right after its n-th write."""

    tick = staticmethod(lambda: None)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.tick()


@pytest.mark.parametrize("warm", [False, True])
def test_writes_interrupted_midway_are_taken_back(warm):
    """Fails if `_all_or_nothing` leaves out the parameters or the buffers."""

    def make():
        torch.manual_seed(0)
        optimizer = shf.SHF(normalised(), CE, seed=1)
        if warm:
            optimizer.step(*labelled(seed=1))
        return optimizer

    undisturbed, tick = make(), Countdown()
    with InterruptedCopies(undisturbed, tick):
        undisturbed.step(*labelled())
    count = tick.ticks
    assert count == len(undisturbed.model.state_dict())  # each parameter and buffer is written once
    for n in range(1, count + 1):
        optimizer = make()
        before = snapshot(optimizer)
        with pytest.raises(KeyboardInterrupt), InterruptedCopies(optimizer, Countdown(KeyboardInterrupt(), n)):
            optimizer.step(*labelled())
        assert identical(snapshot(optimizer), before), f"after an interruption at write {n} of {count}"
        optimizer.step(*labelled())
        assert identical(snapshot(optimizer), snapshot(undisturbed))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("n", range(1, 8))
def test_state_written_midway_is_taken_back(n, warm):
    """Six parameters have a δ each; then the scalars are written. Fails if `_all_or_nothing` leaves out δ."""
    optimizer = shf.SHF(normalised(), CE)
    if warm:
        optimizer.step(*labelled(seed=1))
    before = snapshot(optimizer)
    optimizer.state = InterruptedDict(dict, optimizer.state)
    optimizer.param_groups[0] = InterruptedDict(None, optimizer.param_groups[0])
    optimizer.state.tick = optimizer.param_groups[0].tick = Countdown(KeyboardInterrupt(), n)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(*labelled())
    optimizer.param_groups[0] = dict(optimizer.param_groups[0])
    assert identical(snapshot(optimizer), before)


def test_a_buffer_that_cannot_be_written_takes_the_parameters_back(monkeypatch):
    optimizer, genuine, calls = shf.SHF(normalised(), CE), Network.assign_buffers_, itertools.count()

    def fails_at_first(network, buffers):
        if next(calls) == 0:
            raise RuntimeError("read-only memory")
        genuine(network, buffers)

    monkeypatch.setattr(Network, "assign_buffers_", fails_at_first)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="read-only memory"):
        optimizer.step(*labelled())
    assert identical(snapshot(optimizer), before)


# --- around the step ----------------------------------------------------------------------------------------------------


def test_the_model_is_clean_after_an_interruption():
    """No hook stays on a module, no mode stays on."""
    tick = Countdown()
    optimizer = step_of(in_forward, tick, warm=True)
    tick.error, tick.left = InterruptionError(), 3
    with pytest.raises(InterruptionError):
        optimizer.step(*labelled())
    hooks = itertools.chain(*(m._forward_hooks.values() for m in optimizer.model.modules()))
    assert list(hooks) == []
    assert torch.is_grad_enabled()
    assert not torch.equal(torch.rand(3), torch.rand(3))
    plain = mlp(dropout=0.5)
    assert not torch.equal(plain(labelled()[0]), plain(labelled()[0]))


def test_hf_is_as_safe():
    tick = Countdown()

    def make():
        torch.manual_seed(0)
        optimizer = shf.HF(Interrupted(tick), CE, cg_iterations=3, seed=1)
        optimizer.step(batches, curvature=labelled(4))
        return optimizer

    batches = [labelled(5, seed=1), labelled(7, seed=2)]
    undisturbed = make()
    tick.ticks = 0
    undisturbed.step(batches, curvature=labelled(4))
    end = snapshot(undisturbed)
    for n in range(1, tick.ticks + 1):
        tick = Countdown()
        optimizer = make()
        before = snapshot(optimizer)
        tick.error, tick.left = InterruptionError(), n
        with pytest.raises(InterruptionError):
            optimizer.step(batches, curvature=labelled(4))
        assert identical(snapshot(optimizer), before)
        optimizer.step(batches, curvature=labelled(4))
        assert identical(snapshot(optimizer), end)


def test_a_failing_hook_after_the_step_does_not_undo_it():
    optimizer = shf.SHF(mlp(), CE, seed=1)
    twin = copy.deepcopy(optimizer)
    optimizer.register_step_post_hook(lambda *_: Countdown(InterruptionError(), 1)())
    with pytest.raises(InterruptionError):
        optimizer.step(*labelled())
    twin.step(*labelled())
    assert identical(snapshot(optimizer), snapshot(twin))
