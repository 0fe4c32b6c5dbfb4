"""What models and losses from elsewhere do that a step must not trip over."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import shf
from helpers import FEATURES, Objective, assert_close, identical, labelled, mlp, snapshot, theta
from shf.data.batches import Batch
from shf.losses import Loss
from shf.model.network import Network
from shf.preconditioners import EmpiricalFisher
from shf.probing.layout import find_layout

CE = nn.CrossEntropyLoss()


class Encoder(nn.Module):
    """A transformer whose padded positions count in the mean, as they come out of the layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        self.head = nn.Linear(8, 1)

    def forward(self, x, padding):
        return self.head(self.layer(x, src_key_padding_mask=padding).mean(1))


@pytest.mark.parametrize("curvature_batch", [None, 8])
def test_attention_in_eval_mode_is_one_function_in_all_evaluations(curvature_batch):
    """Fails where torch's fast path is open: it zeroes padded positions, and only where no gradient is wanted."""
    torch.manual_seed(0)
    model = Encoder().eval()
    x, padding, y = torch.randn(16, 5, 8), torch.zeros(16, 5, dtype=torch.bool), torch.randn(16, 1)
    padding[:, 3:] = True
    info = shf.SHF(model, nn.MSELoss(), curvature_batch=curvature_batch).step((x, padding), y)
    assert torch.backends.mha.get_fastpath_enabled()
    assert info.loss_after == pytest.approx(F.mse_loss(model(x, padding), y).item(), rel=1e-5)  # with gradients


class Counted(nn.Module):
    """A layer over an embedding whose gradients torch would divide by how often each word occurs."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4, scale_grad_by_freq=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).sum(1))


def test_gradients_scaled_by_frequency_are_taken_as_they_are():
    """Fails where the scaling reaches the products: they would not be those of a symmetric matrix."""
    torch.manual_seed(0)
    model, words, targets = Counted().double(), torch.randint(6, (12, 3)), torch.randint(3, (12,))
    plain = copy.deepcopy(model)
    plain.words.scale_grad_by_freq = False
    v = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    found, expected = (shf.gauss_newton_product(m, CE, words, targets)(v) for m in (model, plain))
    assert_close(found, expected)


class Labelled(nn.Linear):
    """Checks that every row comes with its own label, a word."""

    def forward(self, x, words):
        assert [word == "above" for word in words] == (x[:, 0] > 0).tolist()
        return super().forward(x)


def test_lists_with_an_entry_for_each_row_follow_the_rows():
    x, targets = labelled()
    words = ["above" if value > 0 else "below" for value in x[:, 0]]
    optimizer = shf.SHF(Labelled(FEATURES, 3).double(), CE, curvature_batch=5)
    for _ in range(3):
        assert optimizer.step((x, words), targets).accepted
        optimizer.next_epoch()


class Switched(nn.Linear):
    """Centres its outputs over the batch once `centred` is set."""

    centred = False

    def forward(self, x):
        z = super().forward(x)
        return z - z.mean(0) if self.centred else z


def test_a_switch_that_is_thrown_between_steps_is_seen():
    """Fails where only float attributes are looked at: rows would be taken for independent of each other."""
    optimizer = shf.SHF(Switched(FEATURES, 3).double(), CE, microbatch=5)
    optimizer.step(*labelled())
    optimizer.model.centred = True
    with pytest.raises(ValueError, match="microbatch"):
        optimizer.step(*labelled())


class Rich(nn.Linear):
    """Returns more than the loss looks at, of all shapes and types."""

    def forward(self, x):
        logits = super().forward(x)
        more = {"hidden": 2 * x, "count": torch.tensor(5), "none": torch.zeros(0, dtype=torch.long)}
        return {"logits": logits, "best": logits.argmax(1), **more}


@pytest.mark.parametrize("options", [{}, {"microbatch": 5}, dict(shf.presets.fast), {"preconditioner": "jacobi"}])
def test_outputs_that_the_loss_does_not_look_at(options):
    optimizer = shf.SHF(Rich(FEATURES, 3).double(), lambda z, t: F.cross_entropy(z["logits"], t), **options)
    assert optimizer.step(*labelled()).accepted


class WithPenalty(nn.Module):
    """Also returns one number for the whole batch, such as a penalty that another loss would add."""

    def __init__(self, body, penalty, first):
        super().__init__()
        self.body, self.penalty, self.first = body, penalty, first

    def forward(self, inputs):
        outputs = self.body(inputs)
        number = self.penalty(self.body, outputs)
        return (number, outputs) if self.first else (outputs, number)


PENALTIES = {
    "of the weights": lambda body, outputs: body[0].weight.square().sum(),
    "of the outputs": lambda body, outputs: outputs.square().mean(),
    "constant": lambda body, outputs: outputs.new_ones(()),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"preconditioner": "jacobi"}, {"noise_every": 1}, {"curvature_batch": 5}, {"microbatch": 5}, shf.presets.fast],
    ids=["default", "jacobi", "noise", "curvature", "microbatch", "fast"],
)
def test_a_number_of_the_whole_batch_that_the_loss_does_not_look_at(options, penalty, first):
    if penalty == "of the outputs" and "microbatch" in options:
        pytest.skip("refused: it is another number on every chunk")
    torch.manual_seed(0)
    body = mlp()
    model = WithPenalty(copy.deepcopy(body), PENALTIES[penalty], first)
    plain = shf.SHF(body, lambda outputs, targets: CE(outputs, targets), seed=1, **options)
    optimizer = shf.SHF(model, lambda outputs, targets: CE(outputs[first], targets), seed=1, **options)
    for _ in range(3):
        expected, found = plain.step(*labelled()), optimizer.step(*labelled())
        assert_close(found.loss_after, expected.loss_after, 1e-9)
        if expected.gradient_noise is not None:
            assert_close(found.gradient_noise, expected.gradient_noise, 1e-9)
    assert_close(theta(model), theta(body), 1e-9)


def test_a_number_of_the_whole_batch_that_the_loss_uses_is_refused_where_rows_are_needed():
    model = WithPenalty(mlp(), PENALTIES["of the weights"], first=False)
    for options in ({"microbatch": 5}, {"noise_every": 1}):
        optimizer = shf.SHF(model, lambda outputs, targets: CE(outputs[0], targets) + outputs[1], **options)
        with pytest.raises(ValueError, match="output number 1 of the model is shared by all rows"):
            optimizer.step(*labelled())


def test_a_function_has_the_closed_form_of_its_module():
    """1100 classes are too many for a root of L'' by dense blocks."""
    x, targets = torch.randn(9, 3), torch.randint(1100, (9,))
    first = nn.Linear(3, 1100)
    models = [copy.deepcopy(first) for _ in range(3)]
    for model, loss in zip(models, (CE, F.cross_entropy, lambda z, t: F.cross_entropy(z, t)), strict=True):
        shf.SHF(model, loss, preconditioner="jacobi", seed=0).step(x, targets)
    assert torch.equal(models[0].weight, models[1].weight)
    assert_close(models[2].weight.detach(), models[0].weight.detach(), 1e-4)
    with pytest.raises(ValueError, match="at most 1024 numbers a row"):
        shf.SHF(first, lambda z, t: z.sum(1).square().mean(), preconditioner="jacobi").step(x, targets)


@dataclass
class Weighted:
    """A loss that is no function and, being compared by its values, has no hash."""

    weight: float

    def __call__(self, outputs, targets):
        return self.weight * F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("preconditioner", ["empirical-fisher", "jacobi"])
def test_a_loss_without_a_hash(preconditioner):
    assert shf.SHF(mlp(), Weighted(2.0), preconditioner=preconditioner).step(*labelled()).accepted


class InsistsOnRows(nn.Linear):
    def forward(self, x):
        assert len(x) == 12, "this model was written for twelve rows"
        return super().forward(x)


def test_a_model_that_asserts_its_number_of_rows():
    assert shf.SHF(InsistsOnRows(FEATURES, 3).double(), CE).step(*labelled(12)).accepted


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.steps(x)[0][:, -1]).squeeze()


def test_a_last_batch_of_one_row_that_is_squeezed_away():
    optimizer = shf.SHF(Squeezed(), lambda z, t: F.mse_loss(z.reshape(-1), t))
    for rows in (9, 1):
        assert optimizer.step(torch.randn(rows, 6, 4), torch.randn(rows)).accepted


def test_parameters_without_a_shape():
    with pytest.raises(ValueError, match="no shape yet"):
        shf.SHF(nn.LazyLinear(3), CE)


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)], ids=["plain", "weights"])
def test_targets_may_be_bytes(weight):
    models, (inputs, targets) = [nn.Linear(FEATURES, 3).double()], labelled()
    models.append(copy.deepcopy(models[0]))
    for model, given in zip(models, (targets, targets.byte()), strict=True):
        shf.SHF(model, nn.CrossEntropyLoss(weight), seed=0).step(inputs, given)
    assert torch.equal(models[0].weight, models[1].weight)


def smoothed(z, t):
    return F.cross_entropy(z, t, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [CE, smoothed], ids=["module", "function"])
def test_a_compiled_loss_is_looked_through(loss):
    """A compiled graph cannot be differentiated twice; a module has its closed form."""
    models = [nn.Linear(FEATURES, 3).double()]
    models.append(copy.deepcopy(models[0]))
    for model, given in zip(models, (loss, torch.compile(loss, backend="aot_eager")), strict=True):
        shf.SHF(model, given, seed=0).step(*labelled())
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_loss_that_torch_cannot_differentiate_twice_is_named():
    optimizer = shf.SHF(mlp(), nn.MultiMarginLoss())
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="MultiMarginLoss cannot be differentiated twice"):
        optimizer.step(*labelled())
    assert identical(snapshot(optimizer), before)


@pytest.mark.parametrize("state", ["empty", "other shapes"])
def test_states_of_other_models_are_refused(state):
    first, second = (shf.SHF(nn.Linear(*sizes).double(), CE) for sizes in ((4, 3), (3, 4)))
    first.step(*labelled())
    before = snapshot(second)
    with pytest.raises(ValueError, match="not saved by SHF" if state == "empty" else "of another model"):
        second.load_state_dict({} if state == "empty" else first.state_dict())
    assert identical(snapshot(second), before)


def test_hf_refuses_a_loader_that_shuffles():
    x, targets = labelled()
    optimizer = shf.HF(mlp(), CE)
    data, weights = TensorDataset(x, targets), torch.ones(len(x))
    for loader in (
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(weights, len(x))),
        DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(len(x)))),
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)),
        DataLoader([(row + torch.rand(()), t) for row, t in data], batch_size=len(x), shuffle=True),
        shf.GrowingLoader((x, targets), batch_size=4),
    ):
        with pytest.raises(ValueError, match=rf"{type(loader).__name__} that shuffles.*without a random sampler"):
            optimizer.step(loader, (x, targets))
    assert optimizer.step(DataLoader(data, batch_size=4), (x, targets)).accepted


def test_hf_refuses_to_shuffle_what_is_no_tensor_or_sparse():
    samples = [({"row": i}, i % 3) for i in range(12)]
    words = DataLoader(samples, batch_size=4, shuffle=True, collate_fn=lambda rows: ([r for r, _ in rows], None))
    with pytest.raises(ValueError, match="shuffles or draws"):
        shf.HF(mlp(), CE, count=len).step(words, labelled())

    class Turned:
        """Rows of ones in another order each time: only their places differ."""

        turns = 0

        def __iter__(self):
            self.turns += 1
            yield torch.eye(4).roll(self.turns, 0).to_sparse_csr(), torch.arange(4) % 3

    with pytest.raises(ValueError, match="shuffles or draws"):
        shf.HF(nn.Linear(4, 3), CE).step(Turned(), (torch.eye(4), torch.arange(4) % 3))


def test_hf_refuses_random_augmentation():
    class Augmented(TensorDataset):
        def __getitem__(self, i):
            row, target = super().__getitem__(i)
            return row + torch.randn_like(row), target

    with pytest.raises(ValueError, match="shuffles or draws"):
        shf.HF(mlp(), CE).step(DataLoader(Augmented(*labelled()), batch_size=8), labelled())


class PaddedToTheLongest(nn.Module):
    """A recurrent network whose outputs have as many steps as the longest of the rows that it is run on."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x, lengths):
        h, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.out(pad_packed_sequence(h, batch_first=True)[0])


def of_unequal_length(longest):
    """Forty rows of up to 4 steps, but for some of 6."""
    torch.manual_seed(0)
    lengths = torch.arange(40) % 3 + 2
    lengths[longest] = 6
    return (torch.randn(40, 6, 2, dtype=torch.float64), lengths), torch.randn(40, 6, 2, dtype=torch.float64)


def squared(z, t):
    return (z - t).square().mean()


@pytest.mark.parametrize(("longest", "microbatch"), [([33], None), ([5, 25], 20)])
def test_squares_of_outputs_that_are_padded_to_the_longest_row(longest, microbatch):
    """Fails if few rows are taken to have the outputs that they have in the batch. Padding counts in this loss."""
    inputs, targets = of_unequal_length(longest)
    model = PaddedToTheLongest().double()
    network, batch = Network(model, list(model.parameters())), Batch.of(inputs, targets)
    found = Objective(
        network,
        Loss(squared),
        batch,
        find_layout(network, batch, 3),
        preconditioner=EmpiricalFisher(squares="exact"),
        microbatch=microbatch,
    ).data_terms()[2]
    z = model(*inputs)
    (u,) = torch.autograd.grad(squared(z, targets), z, retain_graph=True)
    expected = torch.zeros_like(found)
    for row in (u * z).sum((1, 2)):
        gradient = torch.autograd.grad(row, list(model.parameters()), retain_graph=True)
        expected += torch.cat([g.reshape(-1) for g in gradient]).square()
    assert_close(found, 40 * expected)


@pytest.mark.parametrize("options", [{}, {"preconditioner": "jacobi"}, shf.presets.fast])
def test_outputs_that_are_padded_to_the_longest_row(options):
    info = shf.SHF(PaddedToTheLongest().double(), squared, **options).step(*of_unequal_length([33]))
    assert info.accepted
    assert info.loss_after < info.loss_before


def test_a_curvature_batch_without_the_longest_row_is_refused_where_targets_do_not_fit():
    """The loss may bring them to one length itself."""
    inputs, targets = of_unequal_length([33])
    optimizer = shf.SHF(PaddedToTheLongest().double(), squared, curvature_batch=10)
    with pytest.raises(ValueError, match=r"curvature_batch: .*\(10, 4, 2\), \(40, 6, 2\).*total_length"):
        optimizer.step(inputs, targets)

    def fitted(z, t):
        return (z - t[:, : z.shape[1]]).square().sum((1, 2)).mean()

    assert shf.SHF(PaddedToTheLongest().double(), fitted, curvature_batch=10).step(inputs, targets).accepted
