"""Gradient checkpointing (not reentrant) runs parts of the model again in backward passes: a step with it is the step that
the model takes without it, with buffers that change whenever they are used too."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import shf
from helpers import CLASSES, FEATURES, identical, labelled, snapshot, theta
from shf.problems.shared import SharedProblem

CE = nn.CrossEntropyLoss()


class Checkpointed(nn.Module):
    """A block that is run again where gradients are needed, or an ordinary one."""

    def __init__(self, block, *, again):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head, self.again = block().double(), nn.Linear(6, CLASSES).double(), again

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x))


def normalised():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2))


def bounded():
    return nn.Sequential(spectral_norm(nn.Linear(FEATURES, 6)), nn.Tanh(), spectral_norm(nn.Linear(6, 6)), nn.Tanh())


@pytest.mark.parametrize(
    "options",
    [{}, {"preconditioner": None}, {"curvature_batch": 10}, dict(shf.presets.fast)],
    ids=["paper", "none", "some", "fast"],
)
@pytest.mark.parametrize("block", [normalised, bounded])
def test_steps_are_those_without_it(block, options):
    """Fails if blocks that run again use the module's own buffers: statistics move with every product."""
    plain, again = (shf.SHF(Checkpointed(block, again=a), CE, seed=1, **options) for a in (False, True))
    for _ in range(3):
        assert again.step(*labelled(30)).loss_after == plain.step(*labelled(30)).loss_after
    assert identical(again.model.state_dict(), plain.model.state_dict())


def test_products_are_symmetric_and_repeatable():
    products = []
    for again in (False, True):
        model = Checkpointed(bounded, again=again)
        before = copy.deepcopy(model.state_dict())
        product = shf.gauss_newton_product(model, CE, *labelled(30))
        torch.manual_seed(2)
        v, w = torch.randn(2, len(theta(model)), dtype=torch.float64)
        products += [product(v), product(v)]
        assert torch.dot(w, product(v)).item() == pytest.approx(torch.dot(v, product(w)).item(), rel=1e-12)
        assert identical(model.state_dict(), before)
    assert all(torch.equal(p, products[0]) for p in products)


def test_products_do_not_see_what_the_model_has_done_since():
    model = Checkpointed(bounded, again=True)
    product = shf.gauss_newton_product(model, CE, *labelled(30))
    v = torch.ones_like(theta(model))
    first = product(v)
    model(labelled(30)[0])  # moves its buffers
    assert torch.equal(product(v), first)


@pytest.mark.parametrize("block", [normalised, bounded])
@pytest.mark.parametrize("where", ["system", "value", "point"])
def test_an_error_in_the_middle_leaves_buffers_as_they_were(block, where, monkeypatch):
    optimizer = shf.SHF(Checkpointed(block, again=True), CE, seed=1)
    optimizer.step(*labelled(30))
    before = snapshot(optimizer)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(SharedProblem, where, fail)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(*labelled(30))
    assert identical(snapshot(optimizer), before)
