"""What the second graph is made from and what it keeps. That products are right is checked in test_cases.py."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES
from helpers import assert_close
from shf.data.batches import Batch
from shf.data.draws import Draws, preserved_global_state
from shf.model.jacobian import Jacobian
from shf.model.network import Network
from shf.model.secondgraph import cotangent
from shf.probing.layout import find_layout
from shf.runtime.context import twice_differentiable_kernels

ROWS, WIDE = 7, 11
CHANGED = (torch.ops.aten.mm, torch.ops.aten.tanh_backward)
"""What makes a cotangent of another, in a backward pass."""


def network(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, WIDE), activation(), nn.Linear(WIDE, WIDE), activation(), nn.Linear(WIDE, 3)
    ).double()


def jacobian(model, **wanted):
    torch.manual_seed(1)
    batch = Batch.of(torch.randn(ROWS, 4, dtype=torch.float64), torch.zeros(ROWS))
    net = model if isinstance(model, Network) else Network(model, list(model.parameters()))
    return Jacobian(net, batch, Draws(0, ROWS), **wanted)


class Counted(TorchDispatchMode):
    """Matrix products."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus])
def test_a_gradient_leaves_the_graph_that_zeros_make(activation):
    left, made = (jacobian(network(activation), products=products) for products in (True, False))
    u, v = torch.randn(ROWS, 3, dtype=torch.float64), torch.randn(left.network.shapes.total, dtype=torch.float64)
    assert_close(left.vjp([u]), made.vjp([u]))
    assert left._kept.pullback
    assert not made._kept.pullback
    assert_close(left.jvp(v)[0], made.jvp(v)[0])
    assert_close(left.vjp([u]), made.vjp([u]))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_on_all_declared_cases(name):
    (case,) = (case for case in CASES if case.name == name)
    torch.manual_seed(1)
    model, (inputs, targets) = case.model(), case.data()
    batch = Batch.of(inputs, targets, **case.handling)
    net = Network(model, list(model.parameters()))
    with preserved_global_state(), twice_differentiable_kernels(torch.device("cpu")):
        find_layout(net, batch, 3)
        left, made = (Jacobian(net, batch, Draws(7, batch.rows), products=products) for products in (True, False))
        u = [torch.randn_like(z) for z in made._kept.outputs]
        v = torch.randn(net.shapes.total)
        g = left.vjp(u)
        assert left._kept.pullback
        assert_close(g, made.vjp(u), 1e-4)
        for a, b in zip(left.jvp(v), made.jvp(v), strict=True):
            assert_close(a, b, 1e-4)


def test_beside_squares_none_is_left_but_one_known_to_be_small(monkeypatch):
    model = network()
    net, u = Network(model, list(model.parameters())), torch.randn(ROWS, 3, dtype=torch.float64)
    for small in (False, True):  # known from the first product
        J = jacobian(net, products=True, squares=True)
        J.vjp([u])
        assert bool(J._kept.pullback) is small
        J.jvp(torch.ones(net.shapes.total, dtype=torch.float64))
    monkeypatch.setattr("shf.model.zeros.FEW", 1)
    J = jacobian(net, products=True, squares=True)
    J.vjp([u])
    assert not J._kept.pullback


def test_the_first_product_makes_no_pass_of_its_own():
    counts = []
    for products in (True, False):
        J = jacobian(network(), products=products)
        J.vjp([torch.randn(ROWS, 3, dtype=torch.float64)])
        with Counted() as found:
            J.jvp(torch.randn(J.network.shapes.total, dtype=torch.float64))
        counts.append(found.calls)
    assert counts == [5, 5 + 5]  # Jv: two products a layer, one in the first; so has a backward pass


@pytest.mark.parametrize("products", [True, False])
def test_no_cotangent_is_kept(products):
    """Fails if the second graph keeps what autograd would: gradients by the layers' outputs."""
    J, made = jacobian(network(), products=products), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if func.overloadpacket in CHANGED and found.shape == (ROWS, WIDE):
                made.append(weakref.ref(found.untyped_storage()))
            return found

    with Watch():
        if products:
            J.vjp([torch.randn(ROWS, 3, dtype=torch.float64)])
        else:
            J.jvp(torch.randn(J.network.shapes.total, dtype=torch.float64))
    gc.collect()
    assert len(made) >= 4
    assert not any(ref() is not None for ref in made)


def test_a_cotangent_in_the_memory_of_its_output_is_copied():
    z = torch.randn(3)
    assert cotangent(z, z).data_ptr() != z.data_ptr()
    u = torch.randn(3)
    assert cotangent(u, z).data_ptr() == u.data_ptr()


class ByFunc(nn.Module):
    """A model that differentiates by torch.func: its graph has tensors without a place in memory."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return torch.func.vmap(torch.func.jacfwd(self.inner))(x).flatten(1)


def test_tensors_of_torch_func_are_kept():
    left, made = (jacobian(ByFunc(), products=products) for products in (True, False))
    u, v = torch.randn(ROWS, 12, dtype=torch.float64), torch.randn(left.network.shapes.total, dtype=torch.float64)
    assert_close(left.vjp([u]), made.vjp([u]))
    assert_close(left.jvp(v)[0], made.jvp(v)[0])
