"""Ctrl-C at any line of a step: the state is the one before or the one after, never between."""

import random
import signal
import sys
import threading

import pytest
import torch
from torch import nn

import shf
from helpers import identical, labelled, mlp, normalised, snapshot

CE = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    """A process that was started in the background ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


class Tracer:
    """Counts the lines of Python that run, ours and torch's; at a given one, Ctrl-C is pressed."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def __call__(self, frame, event, _):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self

    def run(self, call):
        sys.settrace(self)
        try:
            call()
        finally:
            sys.settrace(None)


KINDS = {
    "dropout": lambda: shf.SHF(mlp(dropout=0.5), CE, cg_iterations=2, curvature_batch=5, seed=1, max_norm=0.5),
    "batch statistics": lambda: shf.SHF(normalised(), CE, cg_iterations=2, curvature_batch=5, seed=1),
}


def before_step(kind):
    torch.manual_seed(0)
    optimizer = KINDS[kind]()
    optimizer.step(*labelled(seed=1))
    return optimizer


@pytest.mark.parametrize("points", [15, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_at_random_lines(kind, points):
    """Fails without `deferred_interrupts`: left in the middle, a mode of torch stays on, and with it the frozen draws; or
    some parameters are new and some old. The slow form presses Ctrl-C 200 times for each kind."""
    undisturbed, tracer = before_step(kind), Tracer()
    before = snapshot(undisturbed)
    tracer.run(lambda: undisturbed.step(*labelled()))
    after = snapshot(undisturbed)
    assert tracer.lines > 1000
    draw, undone = random.Random(points), 0
    for _ in range(points):
        optimizer, trap = before_step(kind), Tracer(draw.randint(1, tracer.lines))
        raised = False
        try:
            trap.run(lambda optimizer=optimizer: optimizer.step(*labelled()))
        except KeyboardInterrupt:
            raised = True
        assert raised == bool(trap.where)  # a step may have fewer lines than the one that was counted
        found = snapshot(optimizer)
        undone += identical(found, before)
        assert identical(found, before) or identical(found, after), f"interrupted at {trap.where}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert undone > 0


class Pressed(nn.Module):
    """Presses Ctrl-C, so many times, in the middle of its first pass on a whole batch."""

    def __init__(self, times):
        super().__init__()
        self.body, self.times, self.passed = mlp(), times, False

    def forward(self, inputs):
        outputs = self.body(inputs)
        if len(inputs) == 12:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
            self.times, self.passed = 0, True
        return outputs


def test_the_first_waits_for_the_end_of_the_pass_and_the_second_does_not():
    """Fails if the handler only notes, or never waits."""
    for times, passed in ((1, True), (2, False)):
        optimizer = shf.SHF(Pressed(times), CE)
        before = snapshot(optimizer)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(*labelled())
        assert optimizer.model.passed is passed
        optimizer.model.times, optimizer.model.passed = 0, False
        assert identical(snapshot(optimizer), before)
        assert optimizer.step(*labelled()).accepted


def test_while_parameters_are_written_not_even_the_second_comes_up():
    """Fails without `no_interrupts`: the writes would be undone, and the rollback itself could be hit by a third."""
    optimizer, twin = before_step("dropout"), before_step("dropout")
    twin.step(*labelled())
    genuine = type(optimizer._last_solution).write

    def write(*args):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        genuine(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer._last_solution), "write", write)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(*labelled())
    assert identical(snapshot(optimizer), snapshot(twin))


def test_a_handler_of_the_users_own_is_left_alone():
    heard = []
    previous = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        assert shf.SHF(Pressed(1), CE).step(*labelled()).accepted
    finally:
        signal.signal(signal.SIGINT, previous)
    assert heard == [1]


def test_steps_in_other_threads_work():
    """Handlers can be set in the main thread alone. Fails if that is not asked first: ValueError in the thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(shf.SHF(mlp(), CE).step(*labelled())))
    thread.start()
    thread.join()
    assert found[0].accepted
