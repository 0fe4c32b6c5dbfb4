"""What a step would not see is refused: also in models that cannot be run on some of their rows, such as a network over one
graph, and in outputs that no real derivative reaches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import shf
from helpers import FEATURES, identical, labelled, mlp, theta

CE = nn.CrossEntropyLoss()
NODES = 40
NEIGHBOURS = torch.eye(NODES, dtype=torch.float64) + 0.1


class Graph(nn.Module):
    """Two layers over the neighbours of each node: it takes all nodes or none."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x, neighbours):
        return neighbours @ self.second((neighbours @ self.hidden(x)).relu())

    def hidden(self, x):
        return self.first(x)


class ByReference(Graph):
    def __init__(self):
        super().__init__()
        self.kept = [self.first.weight]

    def hidden(self, x):
        return F.linear(x, self.kept[0], self.first.bias)


class DropEdge(Graph):
    def forward(self, x, neighbours):
        return super().forward(x, neighbours * torch.from_numpy(np.random.rand(*neighbours.shape) > 0.5))


class Autocast(Graph):
    def hidden(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.first(x)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g


class SingleDerivative(Graph):
    def hidden(self, x):
        return Once.apply(self.first(x))


def nodes():
    inputs, targets = labelled(NODES)
    return (inputs, NEIGHBOURS), targets


def test_a_model_that_takes_all_rows_or_none_is_trained():
    optimizer = shf.SHF(Graph(), CE)
    infos = [optimizer.step(*nodes()) for _ in range(5)]
    assert all(info.accepted for info in infos)
    assert infos[-1].loss_after < infos[0].loss_before
    assert shf.HF(Graph(), CE).step([nodes()], nodes()).accepted


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ByReference, "uses parameter first.weight by a reference of its own"),
        (DropEdge, "gives different outputs for the same inputs"),
        (Autocast, "runs under autocast"),
        (SingleDerivative, "cannot be differentiated again"),
    ],
)
def test_refusals_of_models_hold_where_they_take_all_rows_or_none(model, says):
    """Fails if they are left out where few rows cannot be had: weights would not be trained, and nobody told."""
    model = model()
    before = theta(model)
    with pytest.raises(RuntimeError, match=says):
        shf.SHF(model, CE).step(*nodes())
    assert identical(theta(model), before)


def test_so_do_refusals_of_losses():
    model = Graph()
    with pytest.raises(ValueError, match="otherwise than through the model's outputs"):
        shf.SHF(model, lambda z, t: CE(z, t) + model.first.weight.square().sum()).step(*nodes())


def test_a_whole_batch_is_looked_at_once():
    """Fails if what is known is not remembered: three passes over all rows more in every step."""
    runs, model = [], Graph()
    model.register_forward_hook(lambda *_: runs.append(1))
    optimizer = shf.SHF(model, CE)
    counts = []
    for _ in range(3):
        runs.clear()
        info = optimizer.step(*nodes())
        counts.append(len(runs) - info.evaluations)
    assert counts[1:] == [1, 1]  # the gradient's own


class Spectrum(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.head, self.waves, self.both = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 8), both

    def forward(self, x):
        spectrum = torch.fft.rfft(self.waves(x))
        return (self.head(x), spectrum) if self.both else spectrum


@pytest.mark.parametrize("both", [True, False])
def test_complex_outputs_are_refused(both):
    """Beside real ones, too: fails without the check, and the layer behind them is never trained."""
    model = Spectrum(both)
    before = theta(model)
    with pytest.raises(ValueError, match=r"returns torch.complex64.*view_as_real"):
        shf.SHF(model, lambda z, t: z[1].abs().square().mean()).step(torch.randn(20, FEATURES), None)
    assert identical(theta(model), before)


def test_complex_outputs_that_the_loss_does_not_look_at_are_fine():
    optimizer = shf.SHF(Spectrum(both=True), lambda z, t: CE(z[0], t))
    assert optimizer.step(torch.randn(20, FEATURES), torch.arange(20) % 3).accepted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_in_half_precision_are_refused(dtype):
    class Halved(nn.Linear):
        def forward(self, x):
            return super().forward(x).to(dtype)

    inputs, targets = labelled()[0].float(), labelled()[1]
    with pytest.raises(ValueError, match=f"returns {dtype}.*full precision"):
        shf.SHF(Halved(FEATURES, 3), CE).step(inputs, targets)
    with pytest.raises(ValueError, match=f"returns {dtype}.*full precision"):
        shf.gauss_newton_product(Halved(FEATURES, 3), CE, inputs, targets)


def test_products_alone_refuse_the_same():
    class Kept(nn.Linear):
        def __init__(self):
            super().__init__(FEATURES, 3)
            self.kept = [self.weight]

        def forward(self, x):
            return F.linear(x, self.kept[0], self.bias)

    with pytest.raises(RuntimeError, match="by a reference of its own"):
        shf.gauss_newton_product(Kept().double(), CE, *labelled())
    with pytest.raises(TypeError, match="EmbeddingBag"):
        shf.gauss_newton_product(nn.EmbeddingBag(5, 3), CE, torch.zeros(4, 2, dtype=torch.long), torch.arange(4) % 3)


class Head(nn.Module):
    """A loss with a layer of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, z, t):
        return CE(self.layer(z), t)


def test_a_loss_with_parameters_of_its_own_gets_a_warning():
    loss = Head()
    with pytest.warns(shf.SHFWarning, match=r"loss Head has parameters of its own \(layer.weight\)"):
        shf.SHF(mlp(), loss).step(*labelled())
    shf.SHF(mlp(), loss.requires_grad_(False)).step(*labelled())  # warnings are errors in these tests


def test_a_loss_that_divides_by_what_few_rows_do_not_have_is_taken():
    inputs, _ = labelled(20)
    targets = torch.zeros(20, dtype=torch.float64)
    targets[10:] = 1

    def balanced(z, t):
        positive = int(t.sum())
        weight = torch.tensor((len(t) - positive) / positive)
        return F.binary_cross_entropy_with_logits(z[:, 0], t, pos_weight=weight)

    assert shf.SHF(nn.Linear(FEATURES, 1).double(), balanced).step(inputs, targets).accepted
