"""Models and losses that `torch.compile` has made: a step runs them as they were written, and leaves them compiled."""

import pytest
import torch
from torch import nn

import shf
from helpers import CLASSES, FEATURES, labelled, theta

CE = nn.CrossEntropyLoss()


class Calls:
    """A compiler that leaves graphs as they are and counts how often they are called: none needs to be installed."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph, inputs):
        def run(*values):
            self.number += 1
            return graph.forward(*values)

        return run


class Partly(nn.Module):
    """A network that calls a function, with dropout behind it."""

    def __init__(self, activation=torch.tanh) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        self.activation, self.drop = activation, nn.Dropout(0.5)

    def forward(self, x):
        return self.head(self.drop(self.activation(self.body(x))))


def written(x):
    return torch.tanh(x) * torch.sigmoid(x)


def function(calls):
    return Partly(torch.compile(lambda x: written(x), backend=calls)), CE


def in_place(calls):
    model = Partly(written)
    model.compile(backend=calls)
    return model, CE


def part(calls):
    model = Partly(written)
    model.head = torch.compile(model.head, backend=calls)
    return model, CE


def model(calls):
    return torch.compile(Partly(written), backend=calls), CE


def loss(calls):
    return Partly(written), torch.compile(lambda z, t: CE(z, t), backend=calls)


@pytest.mark.parametrize("before", [False, True], ids=["unused", "used before"])
@pytest.mark.parametrize("compiled", [function, in_place, part, model, loss])
def test_what_is_compiled_runs_as_it_was_written_and_is_compiled_after_a_step(compiled, before):
    torch._dynamo.reset()
    calls, (inputs, targets) = Calls(), labelled(dtype=torch.float32)
    torch.manual_seed(0)
    plain = Partly(written)
    torch.manual_seed(0)
    own, criterion = compiled(calls)
    if before:
        criterion(own(inputs), targets).backward()
    calls.number = 0
    reference = shf.SHF(plain, lambda z, t: CE(z, t), seed=0)
    optimizer = shf.SHF(own, criterion if compiled is loss else lambda z, t: CE(z, t), seed=0)
    for _ in range(2):
        assert optimizer.step(inputs, targets) == reference.step(inputs, targets)
    assert torch.equal(theta(own), theta(plain))
    assert calls.number == 0
    criterion(own(inputs), targets)
    assert calls.number == 1
