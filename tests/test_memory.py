"""What is left in memory after a step: nothing of its graphs, with the garbage collector switched off."""

import gc
import resource
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import shf
from helpers import labelled, mlp, normalised
from shf.data.tree import leaves

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
    """Fails if `Objective` hands what its gradient pass recorded to anything that outlives the step."""
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
    """Fails if a step leaves a tensor anywhere, in a list of the optimizer's for instance."""
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


def resident():
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_thousand_steps_without_growth():
    """No tensor, no Python object and no memory more after 10,000 steps than after 1,000. Fails if a step keeps anything,
    a list of its losses for instance: 9,000 floats are seen among the objects."""
    torch.set_num_threads(1)
    optimizer = shf.SHF(mlp(dropout=0.5), CE, curvature_batch=5, cg_iterations=2, max_rejections=None)
    data = [labelled(seed=k) for k in range(10)]
    sizes = {}
    for k in range(1, 10_001):
        optimizer.step(*data[k % 10])
        if k % 10 == 0:
            optimizer.next_epoch()
        if k in (1_000, 10_000):
            gc.collect()
            sizes[k] = (tensors_alive(), len(gc.get_objects()), sys.getallocatedblocks(), resident())
    print(sizes)
    first, last = sizes[1_000], sizes[10_000]
    assert last[0] == first[0]
    assert last[1] <= first[1] + 100
    assert last[2] <= first[2] + 1_000
    assert last[3] <= first[3] + 4 * 2**20
