"""`gauss_newton_product` as its users meet it; what it computes is compared with dense matrices in test_cases.py."""

import pytest
import torch
from torch import nn

import shf
from helpers import assert_close, labelled, mlp

CE = nn.CrossEntropyLoss()


def matrix(product, size):
    return torch.stack([product(v) for v in torch.eye(size, dtype=torch.float64)], 1)


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_every_product_has_the_masks_of_the_seed():
    model = mlp(dropout=0.5)
    first, again, other = (
        matrix(shf.gauss_newton_product(model, CE, *labelled(), seed=s), size(model)) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert_close(first, first.T)  # one matrix in all columns, or it would not be symmetric


def test_the_order_of_the_parameters_is_the_callers():
    model = mlp()
    whole = matrix(shf.gauss_newton_product(model, CE, *labelled()), size(model))
    last = list(model[-1].parameters())
    product = shf.gauss_newton_product(model, CE, *labelled(), params=reversed(last))
    weight, bias = (p.numel() for p in last)
    order = [*range(size(model) - bias, size(model)), *range(size(model) - bias - weight, size(model) - bias)]
    assert_close(matrix(product, weight + bias), whole[order][:, order])


def test_the_model_is_called_as_it_is_said():
    model, (inputs, targets) = mlp(), labelled()
    doubled = shf.gauss_newton_product(model, CE, inputs, targets, forward=lambda model, x: model(2 * x))
    expected = shf.gauss_newton_product(model, CE, 2 * inputs, targets)
    assert_close(matrix(doubled, size(model)), matrix(expected, size(model)))


class Looked(torch.autograd.Function):
    """x², with a backward pass that leaves torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return torch.tensor((2 * ctx.saved_tensors[0] * g).tolist(), dtype=g.dtype)


@pytest.mark.parametrize("beside", [0.0, 1.0], ids=["alone", "beside a connection"])
def test_a_gradient_that_cannot_be_differentiated_is_refused(beside):
    """Its part of J would silently be missing, and J'L''J not even be symmetric."""
    model = mlp()

    def forward(model, x):
        h = model[0](x)
        return model[2](Looked.apply(h) + beside * h)

    with pytest.raises(RuntimeError, match=r"gradient by 0\.weight cannot be differentiated again"):
        shf.gauss_newton_product(model, CE, *labelled(), forward=forward)
    last = list(model[-1].parameters())
    product = shf.gauss_newton_product(model, CE, *labelled(), forward=forward, params=last)
    found = matrix(product, sum(p.numel() for p in last))
    assert_close(found, found.T)
    assert found.any()


def test_buffers_gradients_and_the_global_generator_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    shf.gauss_newton_product(model, CE, *labelled())(torch.ones(size(model), dtype=torch.float64))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_loss_per_case_leaves_the_given_one_as_it_is():
    given = nn.MSELoss()
    found = shf.losses.per_case(given)
    outputs, targets = torch.randn(5, 7), torch.randn(5, 7)
    assert given.reduction == "mean"
    torch.testing.assert_close(found(outputs, targets), 7 * given(outputs, targets))


def test_a_loss_per_case_needs_a_reduction():
    with pytest.raises(TypeError, match="expected a torch loss with a `reduction`"):
        shf.losses.per_case(lambda outputs, targets: outputs.sum())
