"""What is left in memory after a step: nothing of its graphs, with the garbage collector switched off."""

import gc
import weakref

import pytest
import torch
from torch import nn

import shf
from helpers import labelled, mlp, normalised
from shf.tree import leaves

CE = nn.CrossEntropyLoss()


class Watched:
    """A loss that remembers, weakly, what it was given and returned, and the outputs of every layer.

    A graph keeps the tensors that its backward pass needs, and with them their Python objects.
    """

    def __init__(self, model):
        self.seen = []
        for module in model.modules():
            module.register_forward_hook(lambda module, args, output: self.remember(output))

    def remember(self, outputs):
        self.seen += map(weakref.ref, leaves(outputs))

    def __call__(self, outputs, targets):
        loss = CE(outputs, targets)
        self.remember((outputs, loss))
        return loss

    @property
    def alive(self):
        return sum(ref() is not None for ref in self.seen)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(1, 3, batch_first=True).double(), nn.Linear(3, 3).double()

        def forward(self, x):
            return self.out(self.rnn(x[:, :, None])[0][:, -1])

    return Last()


def step(optimizer):
    if isinstance(optimizer, shf.HF):
        return optimizer.step([labelled(7), labelled(5, seed=1)], curvature=labelled(4))
    return optimizer.step(*labelled())


CASES = {
    "plain": (shf.SHF, mlp, {}),
    "dropout": (shf.SHF, lambda: mlp(dropout=0.5), {"curvature_batch": 5}),
    "batch statistics": (shf.SHF, normalised, {"curvature_batch": 5}),
    "recurrent": (shf.SHF, recurrent, {"curvature_batch": 5}),
    "jacobi": (shf.SHF, mlp, {"preconditioner": "jacobi"}),
    "no preconditioner": (shf.SHF, mlp, {"preconditioner": None}),
    "microbatch": (shf.SHF, mlp, {"microbatch": 5}),
    "batches": (shf.HF, mlp, {"cg_iterations": 5}),
}


@pytest.mark.usefixtures("no_collector")
def test_the_watch_sees_a_graph_that_is_kept():
    model = mlp()
    watch = Watched(model)
    kept = watch(model(labelled()[0]), labelled()[1]).grad_fn
    assert watch.alive > 0
    del kept
    assert watch.alive == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("case", CASES)
def test_no_graph_survives_a_step(case):
    kind, make, options = CASES[case]
    model = make()
    loss = Watched(model)
    optimizer = kind(model, loss, **options)
    for _ in range(2):
        step(optimizer)
        assert len(loss.seen) > 10
        assert loss.alive == 0


def tensors_alive():
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("case", CASES)
def test_steps_do_not_pile_up_tensors(case):
    kind, make, options = CASES[case]
    optimizer = kind(make(), CE, **options)
    for _ in range(2):
        step(optimizer)
    before = tensors_alive()
    for _ in range(3):
        step(optimizer)
    assert tensors_alive() == before


@pytest.mark.usefixtures("no_collector")
def test_no_graph_survives_an_interrupted_step():
    model = mlp()
    loss = Watched(model)
    calls = 0

    def failing(outputs, targets):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return loss(outputs, targets)

    try:
        shf.SHF(model, failing).step(*labelled())
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("the step was not interrupted")
    assert len(loss.seen) > 4
    assert loss.alive == 0


@pytest.mark.usefixtures("no_collector")
def test_the_state_holds_values_only():
    optimizer = shf.SHF(mlp(), CE)
    step(optimizer)
    assert all(p.grad_fn is None and p.is_leaf for p in optimizer.model.parameters())
    assert all(s["delta"].grad_fn is None and not s["delta"].requires_grad for s in optimizer.state.values())
