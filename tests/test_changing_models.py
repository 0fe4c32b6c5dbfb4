"""Models that change between steps, and batches that end unevenly: a step sees the model as it is then."""

import copy

import pytest
import torch
from torch import nn

import shf
from helpers import CLASSES, labelled, mlp, theta

CE = nn.CrossEntropyLoss()


class Folded(nn.Module):
    """Dropout over (time · rows, features): what belongs to a row is found by looking at the draws."""

    def __init__(self, p):
        super().__init__()
        self.body, self.drop = mlp(), nn.Dropout(p)

    def forward(self, inputs):
        steps = torch.cat([inputs, 2 * inputs, 3 * inputs])
        return self.drop(self.body(steps)).view(3, len(inputs), CLASSES).mean(0)


@pytest.mark.parametrize("options", [{"curvature_batch": 7}, {"microbatch": 10}])
def test_dropout_that_is_switched_on_later_is_seen(options):
    torch.manual_seed(0)
    x, t = labelled(33)
    optimizer = shf.SHF(Folded(0.0), CE, seed=1, **options)
    optimizer.step(x, t)
    fresh = shf.SHF(copy.deepcopy(optimizer.model), CE, seed=1, **options)
    fresh.load_state_dict(optimizer.state_dict())
    for o in (optimizer, fresh):
        o.model.drop.p = 0.5
        o.step(x, t)
    assert torch.equal(theta(optimizer.model), theta(fresh.model))


class EndsInSqueeze(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True).double(), nn.Linear(5, 1).double()

    def forward(self, inputs):
        return self.out(self.lstm(inputs)[0][:, -1]).squeeze()


@pytest.mark.parametrize("options", [{}, {"microbatch": 16}, {"preconditioner": None, "microbatch": 4}])
@pytest.mark.parametrize("rows", [17, 33])
def test_no_remainder_of_a_single_row(rows, options):
    torch.manual_seed(0)
    data = torch.randn(rows, 3, 4, dtype=torch.float64), torch.randn(rows, dtype=torch.float64)
    assert shf.SHF(EndsInSqueeze(), nn.MSELoss(), **options).step(*data).accepted


@pytest.mark.parametrize("options", [{}, {"preconditioner": "jacobi"}, {"preconditioner": None}, shf.presets.fast])
def test_outputs_of_another_dtype_and_a_parameter_without_use(options):
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unused = mlp(dtype=torch.float32), nn.Parameter(torch.ones(3))

        def forward(self, inputs):
            return self.body(inputs).double()

    assert shf.SHF(Doubles(), CE, **options).step(*labelled(dtype=torch.float32)).accepted


def test_curvature_rows_without_a_target_do_not_end_the_step():
    x, t = labelled()
    t[:5] = -100
    info = shf.SHF(mlp(), CE, curvature_batch=5).step(x, t)
    assert info.accepted
    assert torch.isfinite(torch.tensor(info.reduction_ratio))


@pytest.mark.parametrize("layer", [nn.Linear(6, 0).double(), nn.Linear(0, 6, bias=False).double()])
def test_the_kronecker_preconditioner_passes_over_empty_layers(layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.empty = mlp(), layer

        def forward(self, inputs):
            return self.body(inputs) + self.empty(inputs.new_zeros(len(inputs), layer.in_features)).sum()

    assert shf.SHF(Model(), CE, preconditioner="kronecker").step(*labelled()).accepted


class SometimesDropped(nn.Module):
    """Draws or not by something that is no plain attribute: a step cannot tell without running it."""

    def __init__(self):
        super().__init__()
        self.body, self.rates = nn.Sequential(mlp(), nn.BatchNorm1d(CLASSES).double()), [0.0]

    def forward(self, inputs):
        z = self.body(inputs)
        return torch.dropout(z, self.rates[0], True) if self.rates[0] else z


@pytest.mark.parametrize("options", [{}, {"curvature_batch": 7}])
def test_a_model_that_never_drew_is_caught_when_it_does(options):
    torch.manual_seed(0)
    x, t = labelled(33)
    optimizer = shf.SHF(SometimesDropped(), CE, seed=1, preconditioner=None, **options)
    optimizer.step(x, t)
    assert optimizer._network().draws_nothing
    fresh = shf.SHF(copy.deepcopy(optimizer.model), CE, seed=1, preconditioner=None, **options)
    fresh.load_state_dict(optimizer.state_dict())
    for o in (optimizer, fresh):
        o.model.rates[0] = 0.5
    state = torch.get_rng_state()
    assert optimizer.step(x, t).loss_before == fresh.step(x, t).loss_before
    assert not optimizer._network().draws_nothing
    assert torch.equal(theta(optimizer.model), theta(fresh.model))
    assert all(map(torch.equal, optimizer.model.buffers(), fresh.model.buffers()))
    assert torch.equal(state, torch.get_rng_state())
