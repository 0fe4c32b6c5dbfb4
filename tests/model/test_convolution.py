"""Convolutions with rules of their own: what Jv computes, and where autograd's rules stay. That results are right for every
kind of convolution is checked against dense matrices in test_cases.py."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, Functional
from helpers import assert_close
from shf.data.batches import Batch
from shf.data.draws import Draws
from shf.model.convolution import OwnConvolutions, is_convolution, is_own
from shf.model.jacobian import Jacobian
from shf.model.network import Network
from shf.model.secondgraph import graph_nodes
from shf.probing.layout import find_layout


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def jacobian(model, inputs):
    batch = Batch.of(inputs, torch.zeros(len(inputs)))
    network = Network(model, list(model.parameters()))
    find_layout(network, batch, 0)
    return Jacobian(network, batch, Draws(0, batch.rows))


def nodes(J):
    return [node for _, graph in J.graphs() for node in graph_nodes(graph.outputs) if is_convolution(node)]


def two_layers():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 3, 2), nn.Flatten())


def test_jv_makes_no_convolution_that_it_does_not_need():
    J = jacobian(two_layers(), torch.randn(5, 1, 5, 5))
    v = torch.randn(J.network.shapes.total)
    J.jvp(v)
    with Counted() as found:
        J.jvp(v)
    # ẋ * W + x * Ẇ; nothing comes from below the first
    assert {name: n for name, n in found.calls.items() if "conv" in str(name)} == {torch.ops.aten.convolution: 3}


def test_a_pass_makes_no_gradient_that_nobody_asks_for():
    J = jacobian(two_layers(), torch.randn(5, 1, 5, 5))
    ((_, graph),) = J.graphs()
    masks = []

    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.convolution_backward:
                masks.append(args[-1])
            return func(*args, **(kwargs or {}))

    weight, bias = graph.theta[2:]
    with Masks():
        J.pull(graph, [torch.ones_like(graph.outputs[0])], [weight])
        J.pull(graph, [torch.ones_like(graph.outputs[0])], [bias, graph.theta[0]])
    assert masks == [[False, True, False], [True, False, True], [False, True, False]]


@pytest.mark.parametrize("name", [case.name for case in CASES if case.kind == "convolutional"])
def test_all_convolutions_have_the_rules_unless_they_are_mapped(name):
    (case,) = (case for case in CASES if case.name == name)
    found = nodes(jacobian(case.model(), case.data()[0]))
    assert found
    assert all(map(is_own, found)) == (name != "convolutions, image by image")


class Traced(nn.Module):
    """A convolution that Python does not see."""

    def __init__(self, convolution):
        super().__init__()
        self.convolution, self.weight, self.head = convolution, nn.Parameter(torch.randn(4, 1, 3, 3)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.convolution(x, self.weight).tanh().sum((2, 3)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_traced_convolutions_are_torchs():
    x = torch.randn(5, 1, 4, 4)
    model = Traced(torch.jit.trace(F.conv2d, (x, torch.zeros(4, 1, 3, 3))))
    J = jacobian(model, x)
    assert not any(map(is_own, nodes(J)))
    v = torch.randn(J.network.shapes.total)
    model.convolution = F.conv2d
    assert_close(J.jvp(v)[0], jacobian(model, x).jvp(v)[0], 1e-5)


def test_a_model_without_convolutions_is_run_as_it_is():
    J = jacobian(nn.Linear(3, 2), torch.randn(4, 3))
    assert not J.network.evaluation.convolves


def test_models_that_differentiate_convolutions_have_all_derivatives():
    """Fails if a backward pass through the second graph forgets what comes by the weights and the inputs."""
    model, x = Functional().double(), torch.randn(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    def penalty():
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return torch.autograd.grad((g * h).sum(), [x, *model.parameters()])

    expected = penalty()
    with OwnConvolutions():
        found = penalty()
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_complex_convolutions_are_torchs():
    x, w = torch.randn(2, 1, 5, dtype=torch.complex64), torch.randn(1, 1, 2, dtype=torch.complex64, requires_grad=True)
    with OwnConvolutions():
        z = F.conv1d(x, w)
    assert not is_own(z.grad_fn)
    assert torch.equal(z, F.conv1d(x, w))
