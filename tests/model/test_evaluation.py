"""Models that differentiate in their forward: a step evaluates them as its gradient saw them, and as cheaply as it can."""

import pytest
import torch
from torch import nn

import shf
from helpers import FEATURES, identical, labelled, snapshot, theta, valued
from shf.model.evaluation import Evaluation


class Around(nn.Module):
    """Something that is done with a network, and what its passes saw."""

    def __init__(self, apply, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3)).double()
        self.apply_, self.seen = apply, []

    def forward(self, x):
        self.seen.append((torch.is_grad_enabled(), next(self.inner.parameters()).requires_grad))
        return self.apply_(self.inner, x)


def slope(inner, x):
    """By its inputs."""
    x.requires_grad_()
    z = inner(x)
    (g,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return z + g[:, :3]


def slope_by_func(inner, x):
    return inner(x) + torch.func.vmap(torch.func.jacrev(inner), randomness="different")(x).sum(1)[:, :3]


def adapted(inner, x):
    """By its parameters: a step of gradient descent first."""
    named = dict(inner.named_parameters())
    loss = inner(x).square().sum(1).mean()
    grads = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), grads, strict=True)}
    return torch.func.functional_call(inner, fast, (x,))


def hooked(inner, x):
    """A hook, which torch refuses where there is no graph."""
    h = inner[:2](x)
    h.register_hook(lambda g: g)
    return inner[2:](h)


def asking(inner, x):
    """Another function where there are no gradients."""
    return inner(x) if torch.is_grad_enabled() else 2 * inner(x)


def run(apply, steps=3, dropout=0.0, **options):
    model = Around(apply, dropout)
    optimizer = shf.SHF(model, nn.MSELoss(), seed=0, **options)
    infos = [optimizer.step(*valued()) for _ in range(steps)]
    return optimizer, infos


@pytest.mark.parametrize(
    ("apply", "level"), [(slope, 1), (slope_by_func, 0), (adapted, 2), (hooked, 2), (asking, 1), (lambda m, x: m(x), 0)]
)
def test_evaluations_see_what_the_gradient_saw(apply, level):
    """Fails if a model that differentiates is evaluated without graphs, or as another function, or if what is known of it
    is forgotten."""
    optimizer, infos = run(apply, damping=1e9, preconditioner=None)
    for info in infos:
        assert info.loss_after == pytest.approx(info.loss_before, rel=1e-6)
        assert info.accepted
    assert optimizer._subject._evaluation.level == level
    model = optimizer.model
    model.seen.clear()
    assert optimizer.step(*valued()).evaluations
    assert set(model.seen[1:]) == {[(False, False), (True, False), (True, True)][level]}


@pytest.mark.parametrize("apply", [slope, slope_by_func])
@pytest.mark.parametrize("options", [{}, {"preconditioner": "jacobi", "curvature_batch": 5}], ids=str)
def test_microbatches_change_nothing(apply, options):
    found = [theta(run(apply, dropout=0.0, microbatch=size, **options)[0].model) for size in (None, 5)]
    assert (found[0] - found[1]).abs().max() < 1e-9


def test_draws_are_frozen_where_a_pass_begins_anew():
    _, infos = run(slope, dropout=0.5, damping=1e9)
    for info in infos:
        assert info.loss_after == pytest.approx(info.loss_before, rel=1e-6)
    assert len({info.loss_before for info in infos}) == 3


def test_by_backward_passes_or_by_func_is_the_same():
    assert (theta(run(slope)[0].model) - theta(run(slope_by_func)[0].model)).abs().max() < 1e-9


def test_a_frozen_graph_does_not_stay_behind_an_evaluation():
    evaluation, p = Evaluation(), torch.ones(3, requires_grad=True)

    def forward(values):
        x = torch.ones(3).requires_grad_()
        return torch.autograd.grad((values[0] * x * x).sum(), x, create_graph=True)[0]

    with torch.no_grad():
        found = evaluation(forward, [p])
    assert evaluation.level == 1
    assert not found.requires_grad
    assert torch.equal(found, torch.full((3,), 2.0))


def test_an_error_that_no_graph_helps_is_the_models_own():
    def broken(inner, x):
        z = inner(x)
        return z + torch.autograd.grad(z.detach().sum(), x)[0][:, :3]

    model = Around(broken)
    optimizer = shf.SHF(model, nn.MSELoss(), seed=0)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="does not require grad"):
        optimizer.step(*valued())
    assert identical(snapshot(optimizer), before)
    assert optimizer._subject._evaluation.level == 0


def test_running_statistics_move_once_where_a_pass_begins_anew():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 3)

        def forward(self, x):
            x = self.norm(x).requires_grad_()
            return self.head(x) + torch.autograd.grad(self.head(x).sum(), x, create_graph=True)[0][:, :3]

    model = Normalised().double()
    shf.SHF(model, nn.CrossEntropyLoss(), preconditioner=None).step(*labelled())
    assert model.norm.num_batches_tracked == 1
