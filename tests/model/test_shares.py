"""Squares of rows' shares of a gradient, against networks written out with a copy of the parameters for each row."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shf
import shf.model.percase
import shf.model.shares
from helpers import Objective, assert_close, labelled, normalised
from shf.data.batches import Batch
from shf.losses import Loss
from shf.model.network import Network
from shf.preconditioners import EmpiricalFisher, Jacobi
from shf.probing.layout import find_layout

CE = nn.CrossEntropyLoss()
ROWS, CLASSES = 5, 3


def objective(model, inputs, targets, squares="auto", seed=7, kind=EmpiricalFisher) -> Objective:
    network, batch = Network(model, list(model.parameters())), Batch.of(inputs, targets)
    layout = find_layout(network, batch, 3)
    return Objective(network, Loss(CE), batch, layout, seed=seed, preconditioner=kind(squares=squares))


def gradient_and_diagonal(*args, **kwargs) -> tuple[Tensor, Tensor]:
    _, gradient, diagonal = objective(*args, **kwargs).data_terms()
    return gradient, diagonal


def shared_out(model, call, inputs, targets) -> tuple[Tensor, Tensor]:
    """∇L and rows · Σ_j s_j² of a network that `call(inputs, copies)` makes with copies (rows, …) of each parameter."""
    copies = [p.detach().expand(len(inputs), *p.shape).clone().requires_grad_() for p in model.parameters()]
    shares = torch.autograd.grad(CE(call(inputs, copies), targets), copies)
    gradient = torch.cat([s.sum(0).reshape(-1) for s in shares])
    return gradient, len(inputs) * torch.cat([s.square().sum(0).reshape(-1) for s in shares])


def dense(x, W, b):
    return torch.einsum("ni,noi->no", x, W) + b


def convolved(x, W):
    folded = F.conv2d(x.reshape(1, -1, *x.shape[2:]), W.flatten(0, 1), padding=1, groups=len(x))
    return folded.reshape(len(x), -1, *x.shape[2:])


def normed(x, weight, bias):
    shape = (*weight.shape, *[1] * (x.ndim - 2))
    return F.batch_norm(x, None, None, training=True) * weight.view(shape) + bias.view(shape)


def images(rows=ROWS):
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 2, 4, 4, generator=source, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (rows,), generator=source)


def convolutional():
    """With an activation that overwrites what batch normalisation returned, as in torchvision's networks."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    ).double()


def test_batch_normalisation_between_linear_layers():
    torch.manual_seed(0)
    model, (inputs, targets) = normalised(), labelled(40)

    def call(x, copies):
        W, b, gain, shift, V, c = copies
        return dense(normed(dense(x, W, b), gain, shift).tanh(), V, c)

    expected = shared_out(model, call, inputs, targets)
    for found, right in zip(gradient_and_diagonal(model, inputs, targets), expected, strict=True):
        assert_close(found, right)


def test_convolutions_whose_groups_have_one_row_each():
    torch.manual_seed(0)
    model, (inputs, targets) = convolutional(), images()

    def call(x, copies):
        W, gain, shift, V, c = copies
        return dense(normed(convolved(x, W), gain, shift).relu().flatten(1), V, c)

    expected = shared_out(model, call, inputs, targets)
    for found, right in zip(gradient_and_diagonal(model, inputs, targets), expected, strict=True):
        assert_close(found, right)


def test_groups_of_rows_estimate_without_bias(monkeypatch):
    torch.manual_seed(0)
    model, (inputs, targets) = convolutional(), images(12)
    monkeypatch.setattr(shf.model.shares, "GROUPS", 12)
    exact = gradient_and_diagonal(model, inputs, targets)[1]
    monkeypatch.setattr(shf.model.shares, "GROUPS", 3)
    found = torch.stack([gradient_and_diagonal(model, inputs, targets, seed=seed)[1] for seed in range(200)])
    spread = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - exact).abs() <= 5 * spread + 1e-12).all()
    assert (found.std(0)[:72] > 0).all(), "the convolution's are an estimate"


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0][-1])


def sequences(rows):
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 6, 2, generator=source, dtype=torch.float64)
    lengths = torch.randint(1, 7, (rows,), generator=source)
    return (inputs, lengths), torch.randint(CLASSES, (rows,), generator=source)


@pytest.mark.parametrize("kind", [EmpiricalFisher, Jacobi])
def test_packed_sequences_have_their_rows_gradients_for_shares(kind):
    torch.manual_seed(0)
    model, (inputs, targets) = Packed().double(), sequences(ROWS)
    found, exact = (gradient_and_diagonal(model, inputs, targets, squares, kind=kind) for squares in ("auto", "exact"))
    assert_close(found[0], exact[0])
    assert_close(found[1], exact[1])


def test_rows_that_keep_apart_have_their_own_gradients_for_shares():
    torch.manual_seed(0)
    model, (inputs, targets) = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double(), labelled(ROWS)
    assert_close(*(gradient_and_diagonal(model, inputs, targets, squares)[1] for squares in ("sampled", "exact")))


class Shared(nn.Module):
    """A weight that is used outside of its layer too, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.linear(self.code(x).tanh(), self.code.weight.t()))


def test_a_layer_that_does_not_explain_its_gradient_is_estimated_through_the_model():
    torch.manual_seed(0)
    model, inputs = Shared().double(), labelled(4)[0]
    targets = torch.tensor([0, 1, 2, 3])
    seeds = range(400)
    exact = gradient_and_diagonal(model, inputs, targets, "exact")[1][:12]
    found = torch.stack([gradient_and_diagonal(model, inputs, targets, seed=seed)[1][:12] for seed in seeds])
    assert ((found.mean(0) - exact).abs() <= 5 * found.std(0) / len(found) ** 0.5 + 1e-12).all()


def data_of(model, rows):
    return (
        sequences(rows) if isinstance(model, Packed) else images(rows) if model[0].weight.ndim > 2 else labelled(rows)
    )


@pytest.mark.parametrize(
    "make", [normalised, convolutional, lambda: Packed().double()], ids=["mlp", "images", "packed"]
)
@pytest.mark.parametrize("kind", ["empirical-fisher", "jacobi"])
def test_by_default_no_row_has_backward_passes_of_its_own(make, kind, monkeypatch):
    """A step makes as many backward passes as one without preconditioner, and so many as there are groups of rows."""

    def refused(*args, **kwargs):
        raise AssertionError("the exact fallback")

    passes = []
    monkeypatch.setattr(shf.model.percase, "_case_by_case", refused)
    original = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(1) or original(*a, **k))
    counts = []
    for preconditioner in (kind, None):
        torch.manual_seed(0)
        model = make()
        optimizer = shf.SHF(model, CE, preconditioner=preconditioner, cg_iterations=1, seed=0)
        inputs, targets = data_of(model, 100)
        optimizer.step(inputs, targets)
        passes.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step(inputs, targets)
        counts.append(len(passes))
    layers_in_groups = 1 if make is convolutional else 0
    second_graph = 1  # which a gradient without preconditioner leaves behind
    most = 2 * shf.model.shares.GROUPS * layers_in_groups + shf.model.shares.GROUPS + 1 + second_graph
    assert counts[0] - counts[1] <= most


def test_a_step_that_will_be_ten_times_as_dear_says_so_once():
    torch.manual_seed(0)
    optimizer = shf.SHF(normalised(), CE, preconditioner_squares="exact", cg_iterations=1, seed=0)
    small, large = labelled(20), labelled(80)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(*small)
        assert not caught
        for _ in range(2):
            optimizer.step(*large)
    (warning,) = caught
    assert "preconditioner_squares='sampled'" in str(warning.message)
    assert "about 13 times" in str(warning.message)


@pytest.mark.parametrize("kind", ["empirical-fisher", "jacobi"])
def test_the_warning_comes_before_the_backward_passes_that_it_counts(kind, monkeypatch):
    torch.manual_seed(0)
    model, (inputs, targets) = normalised(), labelled(80)
    passed, pull = [], shf.model.percase.pull_cases

    def counted(jacobian, graph, cotangents, rows, count, wanted):
        passed.append(len(rows) * count)
        return pull(jacobian, graph, cotangents, rows, count, wanted)

    monkeypatch.setattr(shf.model.percase, "pull_cases", counted)
    options = {"preconditioner": kind, "preconditioner_squares": "exact", "cg_iterations": 1}
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(shf.SHFWarning, match="times as dear"):
            shf.SHF(model, CE, **options, seed=0).step(inputs, targets)
    assert not passed
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.warns(shf.SHFWarning) as caught:
        shf.SHF(model, CE, **options, seed=0).step(inputs, targets)
    evaluations = 2 * sum(passed) / len(inputs)  # a backward pass is two
    assert f"worth {evaluations:.0f} evaluations" in str(caught[0].message)


def test_training_is_no_worse_than_with_the_exact_fallback():
    """Final objectives of a small network with batch normalisation, over seeds: the mean is not above by more than half of
    what the preconditioner is worth."""
    means = {}
    for name, options in {
        "auto": {},
        "exact": {"preconditioner_squares": "exact"},
        "none": {"preconditioner": None},
    }.items():
        final = []
        for seed in range(4):
            torch.manual_seed(seed)
            inputs = torch.randn(60, 8) * torch.logspace(-1, 1, 8)
            targets = (torch.tanh(inputs / torch.logspace(-1, 1, 8)) @ torch.randn(8, 3)).argmax(1)
            model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))
            optimizer = shf.SHF(model, CE, damping=0.1, seed=seed, **options)
            for _ in range(25):
                final.append(optimizer.step(inputs, targets).loss_after)
        means[name] = sum(final) / len(final)
    assert means["auto"] <= means["exact"] + 0.5 * abs(means["none"] - means["exact"])
    assert means["exact"] < means["none"]
