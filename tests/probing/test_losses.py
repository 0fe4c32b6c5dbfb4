"""A loss is one function of outputs and targets, and scales with rows as it says; if not, the first step refuses it."""

import copy
import functools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shf
from helpers import identical, labelled, mlp, normalised, snapshot, valued
from shf.hessian.expansion import LossExpansion
from shf.losses import Loss

BATCH = labelled()


def summed(z, t):
    return F.cross_entropy(z, t, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (F.cross_entropy, None),
        (F.cross_entropy, "mean"),
        (summed, "sum"),
        (functools.partial(F.cross_entropy, reduction="sum"), None),
        (functools.partial(F.cross_entropy, reduction="mean"), "mean"),
        (lambda z, t: summed(z, t) / 1000, "sum"),  # a constant instead of the number of rows: it is a sum
        (lambda z, t: (z - z.mean(0)).square().sum(), None),  # neither: of one row it is zero
    ],
)
def test_a_loss_that_is_what_it_says_is_taken(loss, reduction):
    assert shf.SHF(mlp(), loss, reduction=reduction).step(*BATCH).accepted


@pytest.mark.parametrize(
    ("loss", "reduction", "words"),
    [
        (summed, None, "summed adds up the rows of a batch .* taken for a mean over them: give reduction='sum'"),
        (F.cross_entropy, "sum", "cross_entropy averages over the rows .* taken for a sum .*: give reduction='mean'"),
    ],
)
def test_a_loss_that_scales_otherwise_is_refused(loss, reduction, words):
    optimizer = shf.SHF(mlp(), loss, reduction=reduction, seed=0)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=words):
        optimizer.step(*BATCH)
    assert identical(snapshot(optimizer), before)


def unlabelled(rows, of=40):
    inputs, targets = labelled(of)
    targets[rows] = -1
    return inputs, targets


def summed_over_labelled(z, t):
    return F.cross_entropy(z, t, reduction="sum", ignore_index=-1)


def averaged_over_labelled(z, t):
    return F.cross_entropy(z, t, ignore_index=-1)  # not a number where there are none


@pytest.mark.parametrize("rows", [[0], [0, 1], slice(30), slice(39)], ids=["first", "two", "most", "all but one"])
@pytest.mark.parametrize(
    ("loss", "reduction", "right"),
    [(summed_over_labelled, None, "sum"), (averaged_over_labelled, "sum", "mean")],
)
def test_so_is_one_where_the_first_rows_have_no_target(loss, reduction, right, rows):
    """Fails if only the first row is tried: the loss is 0 there, which says nothing, and B is wrong in scale."""
    optimizer = shf.SHF(mlp(), loss, reduction=reduction, curvature_batch=10, seed=0)
    with pytest.raises(ValueError, match=f"give reduction='{right}'"):
        optimizer.step(*unlabelled(rows))
    assert shf.SHF(mlp(), loss, reduction=right, curvature_batch=10, seed=0).step(*unlabelled(rows)).loss_before > 0


def test_a_batch_without_targets_is_not_the_last_word():
    optimizer = shf.SHF(mlp(), summed_over_labelled, seed=0)
    optimizer.step(*unlabelled(slice(None)))
    with pytest.raises(ValueError, match="give reduction='sum'"):
        optimizer.step(*labelled(40))


def test_a_loss_that_is_zero_for_each_row_is_looked_at_once():
    """It is about differences between rows: of one alone there is nothing to tell."""
    calls = []

    def spread(z, t):
        calls.append(len(z))
        return (z - z.mean(0)).square().sum()

    optimizer = shf.SHF(mlp(), spread, seed=0)
    optimizer.step(*BATCH)
    assert min(calls) == 1
    calls.clear()
    optimizer.step(*BATCH)
    assert set(calls) == {len(BATCH[0])}


def test_a_partial_that_contradicts_is_refused():
    loss = functools.partial(F.cross_entropy, reduction="sum")
    with pytest.raises(ValueError, match="reduction='mean' contradicts the loss object's own reduction='sum'"):
        shf.SHF(mlp(), loss, reduction="mean")


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, t: F.cross_entropy(F.dropout(z), t),
        lambda z, t: F.cross_entropy(z, t) * random.random(),
    ],
)
@pytest.mark.parametrize("model", [mlp, lambda: mlp(dropout=0.5), normalised])
def test_a_loss_that_draws_is_refused(loss, model):
    optimizer = shf.SHF(model(), loss, seed=0)
    with pytest.raises(
        RuntimeError, match=r"gives different numbers for the same outputs .* draw in the model's forward"
    ):
        optimizer.step(*BATCH)


def test_the_loss_is_looked_at_once():
    calls = []

    def counted(z, t):
        calls.append(len(z))
        return F.cross_entropy(z, t)

    optimizer = shf.SHF(mlp(), counted, seed=0)
    optimizer.step(*BATCH)
    assert min(calls) == 1
    calls.clear()
    optimizer.step(*BATCH)
    assert set(calls) == {len(BATCH[0])}


def test_a_loss_that_cannot_be_called_on_one_row_is_taken():
    def at_least_three(z, t):
        if len(z) < 3:
            raise ValueError("too few")
        return F.cross_entropy(z, t)

    assert shf.SHF(mlp(), at_least_three).step(*BATCH).accepted


def test_hf_looks_too():
    with pytest.raises(ValueError, match="give reduction='sum'"):
        shf.HF(mlp(), summed).step([BATCH], BATCH)


@pytest.mark.parametrize(
    ("model", "loss", "data"),
    [
        (nn.Sequential(mlp(), nn.LogSoftmax(1)), nn.NLLLoss(), BATCH),
        (mlp(), nn.L1Loss(), valued()),
    ],
    ids=["nll", "l1"],
)
def test_a_loss_without_curvature_gets_a_warning(model, loss, data):
    with pytest.warns(shf.SHFWarning, match="has no curvature in the outputs"):
        shf.SHF(model, loss).step(*data)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.HuberLoss(delta=0.5), nn.SmoothL1Loss()])
def test_a_curved_one_gets_none(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shf.SHF(mlp(), loss).step(*valued()).accepted


def squared(z, t):
    return (z - t).square().mean()


def bernoulli(z, t):
    return (F.softplus(z) - t * z).mean()


def ranks(z, t):
    """Every row with every other, on purpose."""
    return F.softplus(-(z - z.transpose(0, -1)) * (t[:, None] - t).sign()).mean()


NUMBERS = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def to_one_number():
    return nn.Linear(4, 1).double()


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [(squared, None), (lambda z, t: 40 * squared(z, t), "mean"), (lambda z, t: (z - t).square().sum(), "sum")],
)
def test_outputs_and_targets_that_make_a_table_get_a_warning(loss, reduction):
    with pytest.warns(
        shf.SHFWarning, match=r"\(12, 1\) and targets of shape \(12,\), compares every output with every"
    ):
        shf.SHF(to_one_number(), loss, reduction=reduction).step(BATCH[0], NUMBERS)


def test_the_table_is_seen_where_outputs_and_the_first_targets_are_alike():
    model = to_one_number()
    nn.init.zeros_(model.weight)
    with pytest.warns(shf.SHFWarning, match="compares every output with every target"):
        shf.SHF(model, bernoulli).step(BATCH[0], (torch.arange(12) > 6).double())


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (squared, NUMBERS[:, None]),
        (lambda z, t: squared(z[:, 0], t), NUMBERS),
        (lambda z, t: squared(z.squeeze(), t), NUMBERS),
        (lambda z, t: squared(z, t[:, None]), NUMBERS),
        (lambda z, t: squared(z, t.view_as(z)), NUMBERS),
        (ranks, NUMBERS),
        (lambda z, t: squared(z[:, 0], t.double()), NUMBERS > 0),
        (lambda z, t: squared(z[:, 0], t.double()), NUMBERS.mul(9).to(torch.uint8)),
        (lambda z, t: squared(z[:, 0], t.real), NUMBERS.to(torch.complex128)),
    ],
)
def test_others_of_one_output_get_none(loss, targets):
    """Fails by the warning, which is an error in these tests."""
    assert shf.SHF(to_one_number(), loss).step(BATCH[0], targets).accepted


class Kept(nn.Sequential):
    """Leaves the hidden layer's values in an attribute, as auxiliary losses are often passed on."""

    def forward(self, x):
        self.hidden = self[0](x)
        return self[2](self[1](self.hidden))


@pytest.mark.parametrize(
    ("penalty", "name"),
    [
        (lambda model: model[2].weight.square().sum(), "2.weight"),
        (lambda model: model.hidden.square().mean(), "0.weight"),
    ],
    ids=["on weights", "on an attribute"],
)
@pytest.mark.parametrize("options", [{}, {"curvature_batch": 5}, dict(shf.presets.fast)], ids=["paper", "some", "fast"])
def test_a_loss_that_sees_parameters_past_the_outputs_is_refused(penalty, name, options):
    """Its value would count, and its gradient would not."""
    model = Kept(*mlp())
    optimizer = shf.SHF(model, lambda z, t: F.cross_entropy(z, t) + penalty(model), seed=0, **options)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"parameters \({name}\) otherwise than .* return what it needs from forward"):
        optimizer.step(*BATCH)
    assert identical(snapshot(optimizer), before)


def test_tensors_that_require_grad_and_are_not_trained_may_take_part():
    """A teacher, a detached penalty, targets that another network has made."""
    model, teacher = Kept(*mlp()), mlp()

    def loss(z, t):
        return F.mse_loss(z, t) + F.mse_loss(z, teacher(BATCH[0][: len(z)])) + model.hidden.detach().square().mean()

    assert shf.SHF(model, loss, preconditioner=None).step(BATCH[0], mlp()(BATCH[0])).accepted


def test_batchmean_is_a_mean_over_rows():
    loss = nn.KLDivLoss(reduction="batchmean", log_target=False)
    targets = torch.softmax(valued()[1], 1)
    optimizer = shf.SHF(mlp(), lambda z, t: loss(z.log_softmax(1), t), seed=1)
    twin = shf.SHF(copy.deepcopy(optimizer.model), nn.CrossEntropyLoss(), seed=1)
    assert shf.SHF(mlp(), loss).loss.reduction.value == "mean"
    found = [o.step(BATCH[0], targets).loss_after - o.step(BATCH[0], targets).loss_after for o in (optimizer, twin)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_where_the_loss_is_flat_is_no_negative_curvature(dtype):
    """Σ exp over all rows at once: L'' of it takes a constant vector to zero, and what is computed there has either sign."""
    z = 3 * torch.randn(200, 1, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for scale in torch.linspace(0.5, 1.5, 40).tolist():
        product = LossExpansion(Loss(lambda z, _: z.logsumexp(0).sum() - z.mean()), scale * z, None).hessian()
        assert product([torch.ones_like(z)])[0].abs().max() < 1e-5
    with pytest.warns(shf.NonConvexLossWarning):
        LossExpansion(Loss(lambda z, _: -z.logsumexp(0).sum()), z, None).hessian()
