"""The declared list: models, losses and data on which products, gradients and preconditioners are checked against dense
float64 matrices. To add a case, add a line to `CASES`; every test of tests/test_cases.py and the table in the docs follow.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import shf
from shf.data.batches import Count, Select, count_rows, select_rows
from trees import Tree, TreeLSTM, select_trees

ROWS = 6


@dataclass(frozen=True)
class Case:
    """One line of the list.

    Attributes:
        name: as it appears in test names and in the docs.
        kind: the section of the docs table.
        model: builds the module (float32; the tests make it float64).
        data: builds (inputs, targets) with ROWS rows.
        loss: the loss.
        layers: whether the preconditioner has a layer formula for every parameter (else the exact fallback is used).
        separable: whether a row's output depends on that row alone.
        select, count: as the optimizer takes them, for data that is not rows of tensors.
        stands_in: where the loss is not convex, (dense L'', outputs) ↦ the matrix that stands for L''.
    """

    name: str
    kind: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any]]
    loss: Any
    layers: bool = True
    separable: bool = True
    select: Select = select_rows
    count: Count = count_rows
    stands_in: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def handling(self) -> dict[str, Any]:
        return {"select": self.select, "count": self.count}


def classes(k: int = 3, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(k, (ROWS, *shape))


def real(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(ROWS, *shape)


def unit(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(ROWS, *shape)


def tokens(vocabulary: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocabulary, (ROWS, *shape))


def pair(inputs: Callable[[], Any], targets: Callable[[], Any]) -> Callable[[], tuple[Any, Any]]:
    return lambda: (inputs(), targets())


def mlp(activation: Callable[[], nn.Module] = nn.Tanh, out: int = 3, dropout: float = 0.0) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 5), activation(), nn.Dropout(dropout), nn.Linear(5, out))


class Tied(nn.Module):
    """Autoencoder whose decoder is the encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t())


class TwiceUsed(nn.Module):
    """One layer applied two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Cell(nn.Module):
    """A recurrent network written by hand, the rows on axis 0."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.over, self.out = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = torch.tanh(self.into(x[:, t]) + self.over(h))
        return self.out(h)


class Recurrent(nn.Module):
    """A recurrent layer of torch and a linear output, on the last step or on all."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool, every: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(2, 3, batch_first=batch_first, **options)
        self.out = nn.Linear(3, 3)
        self.batch_first, self.every = batch_first, every

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x if self.batch_first else x.transpose(0, 1))
        h = h if self.batch_first else h.transpose(0, 1)
        return self.out(h).transpose(1, 2) if self.every else self.out(h[:, -1])


class LoopOverCell(nn.Module):
    """One of torch's cells in a loop, an output per step: (rows, classes, steps)."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.out = kind(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for u in x.unbind(1):
            state = self.cell(u, state)
            outputs.append(self.out(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs, 2)


class Packed(nn.Module):
    """A linear and a recurrent layer on packed sequences: the last hidden state, or all of them padded to `steps`."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, steps: int | None = None) -> None:
        super().__init__()
        self.into, self.rnn, self.out = nn.Linear(2, 2), kind(2, 3, batch_first=True), nn.Linear(3, 3)
        self.steps = steps

    def forward(self, x: PackedSequence) -> Tensor:
        h, last = self.rnn(x._replace(data=self.into(x.data)))
        if self.steps is None:
            return self.out((last[0] if isinstance(last, tuple) else last)[-1])
        return self.out(pad_packed_sequence(h, batch_first=True, total_length=self.steps)[0]).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention through nn.MultiheadAttention, then LayerNorm and a mean over positions."""

    def __init__(self, dropout: float = 0.0, *, weights: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 3)
        self.weights, self.causal = weights, causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype) if self.causal else None
        y, _ = self.attention(x, x, x, need_weights=self.weights, attn_mask=mask)
        return self.out(self.norm(x + y).mean(1))


class FusedAttention(nn.Module):
    """Attention of two heads through F.scaled_dot_product_attention, causal by its flag or by a mask."""

    def __init__(self, dropout: float = 0.0, *, mask: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)
        self.dropout, self.mask = dropout, mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if self.mask else None
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None
        )
        return self.out(attended.transpose(1, 2).flatten(2)[:, -1])


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another whose padding is masked: inputs (x, y, padding)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True, kdim=3, vdim=3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.attention(x, y, y, key_padding_mask=padding, need_weights=False)[0].mean(1))


class TinyLanguageModel(nn.Module):
    """Embedding, one linear layer, output tied to the embedding."""

    def __init__(self, *, tied: bool, **options: Any) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(5, 4, **options), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x)))).transpose(1, 2)


class Siamese(nn.Module):
    """Two sequences through one embedding, the words along axis 0 as in the inputs of torch's recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 4, padding_idx=1), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(x.t()).sum(0)) * self.embedding(y.t()).mean(0))


class Noise(nn.Module):
    """Additive Gaussian noise in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class StochasticDepth(nn.Module):
    """A residual branch that is dropped for whole rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.rand(len(x), 1, dtype=x.dtype, device=x.device) < 0.5).to(x.dtype) if self.training else 0.5
        return x + keep * torch.tanh(self.inner(x))


class Checkpointed(nn.Module):
    """A block recomputed in the backward pass, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


class Slope(nn.Module):
    """du/dx + u of a network u(x), as for a differential equation: `forward` differentiates by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.u(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope


class Idle(nn.Module):
    """A parameter that does not influence the output, and one only through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = nn.Linear(4, 3), nn.Parameter(torch.randn(2, 2))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.randn(3))])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scales[0] + self.scales[1]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def cnn(
    norm: Callable[[], nn.Module] = nn.Identity, *, inplace: bool = False, groups: int = 1
) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=groups),
        norm(),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def one_layer(layer: Callable[[], nn.Module], features: int) -> Callable[[], nn.Module]:
    """A layer, tanh, and a linear output on its so many features."""
    return lambda: nn.Sequential(layer(), nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))


class Functional(nn.Module):
    """Convolutions by functions, with weights that are parameters or made of some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 2, 3, 3)), nn.Parameter(torch.randn(2, 2, 2, 2))
        self.bias, self.head = nn.Parameter(torch.randn(4)), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.first, self.bias, stride=2, padding=1).tanh()
        x = F.conv_transpose2d(x, torch.cat([self.second, self.second.square()]), padding=1, stride=2, output_padding=1)
        x = torch.conv2d(x.tanh(), weight=self.first, bias=self.bias, padding="same", dilation=2).tanh()
        return self.head(x.flatten(1))


class Again(nn.Module):
    """A model that runs again in its backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


class Mapped(nn.Module):
    """A convolution of one image without an axis of rows, and another mapped over the images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([self.first(image) for image in x]).tanh()
        return self.head(torch.func.vmap(self.second)(x).tanh().flatten(1))


class LowRank(nn.Linear):
    """W + UV: a linear layer with parameters beside weight and bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.u, self.v = nn.Parameter(torch.randn(outputs, 1)), nn.Parameter(torch.randn(1, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ (self.u @ self.v).T


sequences = pair(real(4, 2), classes())
LENGTHS = torch.tensor([3, 3, 4, 2, 1, 5])  # the first two say that every row has three steps, and so does the sum


def packed() -> tuple[PackedSequence, Tensor]:
    return pack_padded_sequence(torch.randn(ROWS, 5, 2), LENGTHS, batch_first=True, enforce_sorted=False), classes()()


def two_sequences() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    return (torch.randn(ROWS, 2, 4), torch.randn(ROWS, 5, 3), torch.arange(5) >= LENGTHS[:, None]), classes()()


def packed_steps() -> tuple[PackedSequence, Tensor]:
    """A class per step; padding has none."""
    return packed()[0], classes(3, 5)().masked_fill(torch.arange(5) >= LENGTHS[:, None], -100)


def trees() -> tuple[list[Tree], Tensor]:
    """Of different shapes: 1 to 5 leaves, the first two alike."""

    def grown(leaves: int, symbol: int) -> Tree:
        if leaves == 1:
            return Tree(symbol % 4)
        return Tree(4 + symbol % 2, (grown(leaves // 2, symbol + 1), grown(leaves - leaves // 2, symbol + 2)))

    return [grown(leaves, k) for k, leaves in enumerate(LENGTHS.tolist())], classes()()


CE, BCE, MSE = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()
vectors = pair(real(4), classes())
images = pair(real(2, 4, 4), classes())
series = pair(real(5, 2), classes())
steps = pair(real(5, 2), classes(3, 5))


def logistic_by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    """A plain callable: torch knows nothing of it but its derivatives."""
    return (F.softplus(outputs) - outputs * targets).sum(1).mean()


@contextmanager
def without_convexity(case: Case) -> Iterator[None]:
    """Around steps of a case: that something stands for L'' is said of those that declare it, and of no others."""
    with warnings.catch_warnings():
        if case.stands_in is not None:
            warnings.simplefilter("ignore", shf.NonConvexLossWarning)
        yield


def positive(H: Tensor, _: Tensor) -> Tensor:
    """The positive part of a matrix, whatever blocks it has."""
    values, vectors = torch.linalg.eigh(H)
    return vectors * values.clamp_min(0) @ vectors.T


def fisher_of_log_variance(_: Tensor, z: Tensor) -> Tensor:
    """Of N(μ, e^s) by μ and s: e^-s and ½, over the rows."""
    return torch.stack([(-z[:, 1]).exp(), torch.full_like(z[:, 1], 0.5)], 1).reshape(-1).diag() / len(z)


def fisher_of_variance(_: Tensor, z: Tensor) -> Tensor:
    """Of N(μ, v) by μ and u with v = softplus(u) + 0.1, summed over rows."""
    v, slope = F.softplus(z[:, 1]) + 0.1, z[:, 1].sigmoid()
    return torch.stack([1 / v, 0.5 * (slope / v).square()], 1).reshape(-1).diag()


def gaussian(z: Tensor, t: Tensor) -> Tensor:
    """Negative log-likelihood of means and log-variances that lie behind each other."""
    mean, s = z.chunk(2, 1)
    return 0.5 * (s + (t - mean).square() * (-s).exp()).mean()


def gaussian_sum(z: Tensor, t: Tensor) -> Tensor:
    return F.gaussian_nll_loss(z[:, 0], t[:, 0], F.softplus(z[:, 1]) + 0.1, reduction="sum")


gaussian_sum.reduction = "sum"


def focal(z: Tensor, t: Tensor) -> Tensor:
    log_p = z.log_softmax(1).gather(1, t[:, None])
    return -((1 - log_p.exp()).square() * log_p).mean()


def cosine(z: Tensor, t: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(z, t, dim=1).mean()


def evidential(z: Tensor, t: Tensor) -> Tensor:
    """Student's t from an evidential network: γ, ν, α, β."""
    n, a, b = (F.softplus(z[:, k : k + 1]) + least for k, least in ((1, 0.1), (2, 1.1), (3, 0.1)))
    omega = 2 * b * (1 + n)
    far = (a + 0.5) * (n * (t - z[:, :1]).square() + omega).log()
    return (far - 0.5 * n.log() - a * omega.log() + a.lgamma() - (a + 0.5).lgamma()).mean()


def mixture(z: Tensor, t: Tensor) -> Tensor:
    """Of two Gaussians: logits, means, logarithms of widths."""
    logits, mean, s = z.chunk(3, 1)
    return -(logits.log_softmax(1) - 0.5 * ((t - mean) * (-s).exp()).square() - s).logsumexp(1).mean()


def cauchy(z: Tensor, t: Tensor) -> Tensor:
    return (z - t).square().log1p().mean()


def contrastive(z: Tensor, t: Tensor) -> Tensor:
    """InfoNCE of two views, the second given: every row is compared with every other."""
    first, second = F.normalize(z, dim=1), F.normalize(z.roll(1, 0) + t, dim=1)
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(z)))


def activation_case(kind: type[nn.Module]) -> Case:
    return Case(f"MLP, {kind.__name__}", "feed-forward", mlp(kind), vectors, CE)


CASES = [
    *(activation_case(kind) for kind in (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU)),
    Case("cross-entropy, probabilities", "losses", mlp(), pair(real(4), lambda: torch.rand(ROWS, 3).softmax(1)), CE),
    Case("cross-entropy, class weights", "losses", mlp(), vectors, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]).double())),
    Case("cross-entropy, label smoothing", "losses", mlp(), vectors, nn.CrossEntropyLoss(label_smoothing=0.1)),
    Case("cross-entropy, ignore_index", "losses", mlp(), vectors, nn.CrossEntropyLoss(ignore_index=0)),
    Case("cross-entropy, sum", "losses", mlp(), vectors, nn.CrossEntropyLoss(reduction="sum")),
    Case("cross-entropy, sequences", "losses", lambda: Recurrent(nn.RNN, batch_first=True, every=True),
         pair(real(5, 2), classes(3, 5)), CE, layers=False),
    Case("binary cross-entropy", "losses", mlp(), pair(real(4), unit(3)), BCE),
    Case("binary cross-entropy, pos_weight", "losses", mlp(), pair(real(4), unit(3)),
         nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double())),
    Case("binary cross-entropy, per case", "losses", mlp(), pair(real(4), unit(3)), shf.losses.per_case(BCE)),
    Case("cross-entropy, per case", "losses", mlp(), vectors, shf.losses.per_case(CE)),
    Case("squared error", "losses", mlp(), pair(real(4), real(3)), MSE),
    Case("squared error, sum", "losses", mlp(), pair(real(4), real(3)), nn.MSELoss(reduction="sum")),
    Case("Poisson", "losses", mlp(), pair(real(4), unit(3)), nn.PoissonNLLLoss()),
    Case("Huber", "losses", mlp(), pair(real(4), real(3)), nn.HuberLoss()),
    Case("a plain callable", "losses", mlp(), pair(real(4), unit(3)), logistic_by_hand),
    Case("Gaussian, F.gaussian_nll_loss of mean and log-variance", "losses that are convex in places", mlp(out=2), pair(real(4), real(1)),
         lambda z, t: F.gaussian_nll_loss(z[:, :1], t, z[:, 1:].exp()), stands_in=fisher_of_log_variance),
    Case("Gaussian, F.gaussian_nll_loss of mean and variance, sum", "losses that are convex in places", mlp(out=2), pair(real(4), real(1)),
         gaussian_sum, stands_in=fisher_of_variance),
    *(Case(name, "losses that are convex in places", mlp(out=out), pair(real(4), targets), loss, stands_in=positive)
      for name, out, targets, loss in (
          ("Gaussian by hand, three means and log-variances", 6, real(3), gaussian),
          ("focal", 3, classes(), focal),
          ("cosine", 3, real(3), cosine),
          ("evidential regression", 4, real(1), evidential),
          ("mixture of Gaussians", 6, real(1), mixture),
          ("Cauchy", 3, real(3), cauchy),
          ("InfoNCE, all rows one block", 3, real(3), contrastive),
      )),
    Case("dropout", "randomness", mlp(dropout=0.5), vectors, CE),
    Case("noise", "randomness", lambda: nn.Sequential(nn.Linear(4, 5), Noise(), nn.Tanh(), nn.Linear(5, 3)), vectors, CE),
    Case("stochastic depth", "randomness", lambda: nn.Sequential(StochasticDepth(), nn.Linear(4, 3)), vectors, CE),
    Case("alpha dropout", "randomness", lambda: nn.Sequential(nn.Linear(4, 5), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(5, 3)),
         vectors, CE),
    Case("RReLU", "randomness", mlp(nn.RReLU), vectors, CE),
    Case("checkpointing with dropout inside", "randomness", Checkpointed, vectors, CE),
    Case("derivatives by the inputs inside forward", "sharing", Slope, pair(real(4), real(4)), MSE, layers=False),
    Case("tied weights", "sharing", Tied, pair(real(4), real(4)), MSE, layers=False),
    Case("a layer used twice", "sharing", TwiceUsed, vectors, CE),
    Case("no influence, ParameterList", "sharing", Idle, vectors, CE, layers=False),
    Case("weight_norm", "sharing",
         lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)), vectors, CE, layers=False),
    Case("spectral_norm", "sharing",
         lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)).eval(), nn.Tanh(), nn.Linear(5, 3)), vectors, CE, layers=False),
    Case("low-rank addition to a linear layer, sequences", "sharing", one_layer(lambda: LowRank(2, 3), 12), sequences, CE, layers=False),
    Case("Conv2d, weight_norm", "sharing", one_layer(lambda: parametrizations.weight_norm(nn.Conv2d(2, 2, 3)), 8), images, CE, layers=False),
    Case("Conv2d, pooling", "convolutional", cnn(), images, CE),
    Case("Conv2d, in-place activation", "convolutional", cnn(inplace=True), images, CE, layers=False),
    Case("Conv2d, groups", "convolutional", cnn(groups=2), images, CE),
    Case("Conv2d, GroupNorm", "convolutional", cnn(lambda: nn.GroupNorm(2, 4)), images, CE),
    Case("Conv2d, BatchNorm", "convolutional", cnn(lambda: nn.BatchNorm2d(4)), images, CE, layers=False, separable=False),
    Case("Conv2d, Dropout2d", "convolutional", cnn(nn.Dropout2d), images, CE),
    Case("Conv1d", "convolutional", lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)),
         pair(real(2, 5), classes()), CE),
    Case("Conv3d", "convolutional", lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
         pair(real(1, 3, 3, 3), classes()), CE),
    Case("Conv2d, stride, dilation, padding by reflection", "convolutional",
         lambda: nn.Sequential(nn.Conv2d(2, 3, (2, 3), (2, 1), 1, (1, 2), padding_mode="reflect"), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)),
         images, CE),
    Case("Conv2d, padding same", "convolutional",
         lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding="same", bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)), images, CE),
    Case("ConvTranspose2d", "convolutional",
         lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Tanh(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, 3)),
         images, CE),
    Case("ConvTranspose2d, groups, output padding", "convolutional",
         one_layer(lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2, output_padding=1), 400), images, CE),
    Case("ConvTranspose1d", "convolutional", one_layer(lambda: nn.ConvTranspose1d(2, 2, 3, stride=2), 22), pair(real(2, 5), classes()), CE),
    Case("ConvTranspose3d", "convolutional", one_layer(lambda: nn.ConvTranspose3d(1, 2, 2), 128), pair(real(1, 3, 3, 3), classes()), CE),
    Case("Conv1d, groups, circular padding", "convolutional",
         one_layer(lambda: nn.Conv1d(2, 4, 3, padding=1, groups=2, padding_mode="circular"), 20), pair(real(2, 5), classes()), CE),
    Case("Conv3d, groups", "convolutional", one_layer(lambda: nn.Conv3d(2, 2, 2, groups=2), 16), pair(real(2, 3, 3, 3), classes()), CE),
    Case("Conv1d, two layers, stride, dilation", "convolutional",
         lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=2, dilation=2), nn.Tanh(), nn.Conv1d(3, 4, 2, stride=2, bias=False), nn.Tanh(),
                               nn.Flatten(), nn.Linear(8, 3)), pair(real(2, 5), classes()), CE),
    Case("Conv2d, depthwise and pointwise", "convolutional",
         lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh(), nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Conv2d(4, 2, 1), nn.Tanh(),
                               nn.Flatten(), nn.Linear(32, 3)), images, CE),
    Case("Conv2d, depthwise, stride, dilation, beyond the padding", "convolutional",
         lambda: nn.Sequential(nn.Conv2d(2, 4, (1, 3), stride=2, padding=(0, 2), dilation=2, groups=2, bias=False), nn.Tanh(),
                               nn.Conv2d(4, 4, 5, padding=2, groups=4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)), images, CE),
    Case("Conv2d, even kernel, padding same, dilation", "convolutional",
         lambda: nn.Sequential(nn.Conv2d(2, 2, 2, padding="same"), nn.Tanh(), nn.Conv2d(2, 2, (2, 3), dilation=(3, 1), padding="same"), nn.Tanh(),
                               nn.Flatten(), nn.Linear(32, 3)), images, CE),
    Case("Conv3d, two layers, stride, padding by repetition", "convolutional",
         lambda: nn.Sequential(nn.Conv3d(1, 2, 2, stride=2, padding=1, padding_mode="replicate"), nn.Tanh(), nn.Conv3d(2, 3, 2, padding="valid"),
                               nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)), pair(real(1, 3, 3, 3), classes()), CE),
    Case("ConvTranspose2d, two layers, stride, dilation, padding", "convolutional",
         lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 2, stride=2, padding=1), nn.Tanh(),
                               nn.ConvTranspose2d(4, 2, 3, dilation=2, groups=2, padding=3, bias=False), nn.Tanh(),
                               nn.Flatten(), nn.Linear(32, 3)), images, CE),
    Case("convolutions outside of modules", "convolutional", Functional, images, CE, layers=False),
    Case("convolutions, checkpointed", "convolutional", lambda: Again(cnn()()), images, CE),
    Case("convolutions, image by image", "convolutional", Mapped, images, CE, layers=False),
    Case("Conv2d, pooling of all kinds", "convolutional",
         lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2, 1), nn.LPPool2d(2, 2, 1), nn.AdaptiveMaxPool2d(2),
                               nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)), images, CE),
    Case("residual connections", "convolutional",
         lambda: nn.Sequential(Residual(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())), nn.Flatten(), nn.Linear(32, 3)),
         images, CE),
    Case("residual connections, BatchNorm", "convolutional",
         lambda: nn.Sequential(Residual(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())), nn.Flatten(),
                               nn.Linear(32, 3)), images, CE, layers=False, separable=False),
    Case("BatchNorm1d", "normalisation", lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)),
         vectors, CE, layers=False, separable=False),
    Case("LayerNorm", "normalisation", lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)),
         vectors, CE),
    Case("RMSNorm", "normalisation", lambda: nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5), nn.Tanh(), nn.Linear(5, 3)), vectors, CE),
    Case("BatchNorm1d in evaluation mode", "normalisation",
         lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5).eval(), nn.Tanh(), nn.Linear(5, 3)), vectors, CE),
    Case("BatchNorm3d", "normalisation",
         lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
         pair(real(1, 3, 3, 3), classes()), CE, layers=False, separable=False),
    Case("InstanceNorm2d", "normalisation", cnn(lambda: nn.InstanceNorm2d(4, affine=True)), images, CE),
    Case("cell written by hand", "recurrent", Cell, series, CE),
    Case("RNNCell in a loop, an output per step", "recurrent", lambda: LoopOverCell(nn.RNNCell), steps, CE, layers=False),
    Case("LSTMCell in a loop, an output per step", "recurrent", lambda: LoopOverCell(nn.LSTMCell), steps, CE, layers=False),
    Case("GRUCell in a loop, an output per step", "recurrent", lambda: LoopOverCell(nn.GRUCell), steps, CE, layers=False),
    Case("RNN", "recurrent", lambda: Recurrent(nn.RNN, batch_first=True), series, CE, layers=False),
    Case("GRU", "recurrent", lambda: Recurrent(nn.GRU, batch_first=True), series, CE, layers=False),
    Case("LSTM, time first, dropout, T = rows", "recurrent",
         lambda: Recurrent(nn.LSTM, batch_first=False, num_layers=2, dropout=0.5), pair(real(ROWS, 2), classes()), CE, layers=False),
    Case("LSTM, bidirectional", "recurrent",
         lambda: nn.Sequential(nn.LSTM(2, 3, batch_first=True, bidirectional=True), _Last(), nn.Linear(6, 3)), series, CE, layers=False),
    Case("LSTM, an output per step", "recurrent", lambda: Recurrent(nn.LSTM, batch_first=True, every=True), steps, CE, layers=False),
    Case("GRU, time first, an output per step", "recurrent", lambda: Recurrent(nn.GRU, batch_first=False, every=True), steps, CE,
         layers=False),
    Case("LSTM, projection", "recurrent",
         lambda: nn.Sequential(nn.LSTM(2, 4, batch_first=True, proj_size=2), _Last(), nn.Linear(2, 3)), series, CE, layers=False),
    Case("RNN, packed sequences", "recurrent", lambda: Packed(nn.RNN), packed, CE, layers=False),
    Case("LSTM, packed sequences", "recurrent", lambda: Packed(nn.LSTM), packed, CE, layers=False),
    Case("GRU, packed sequences", "recurrent", Packed, packed, CE, layers=False),
    Case("GRU, packed sequences, an output per step", "recurrent", lambda: Packed(steps=5), packed_steps, CE, layers=False),
    Case("Tree-LSTM, trees of different shapes", "recursive", lambda: TreeLSTM(6, 3, 3), trees, CE, layers=False,
         select=select_trees, count=len),
    Case("MultiheadAttention, LayerNorm", "attention", Attention, pair(real(5, 4), classes()), CE, layers=False),
    Case("MultiheadAttention, dropout", "attention", lambda: Attention(0.5), pair(real(5, 4), classes()), CE, layers=False),
    Case("MultiheadAttention, dropout, weights", "attention", lambda: Attention(0.5, weights=True), pair(real(5, 4), classes()),
         CE, layers=False),
    Case("MultiheadAttention, causal", "attention", lambda: Attention(causal=True), pair(real(5, 4), classes()), CE, layers=False),
    Case("scaled_dot_product_attention", "attention", FusedAttention, pair(real(5, 4), classes()), CE),
    Case("scaled_dot_product_attention, mask, dropout", "attention", lambda: FusedAttention(0.5, mask=True), pair(real(5, 4), classes()), CE),
    Case("MultiheadAttention, two sequences, padding", "attention", CrossAttention, two_sequences, CE, layers=False),
    Case("TransformerEncoderLayer", "attention",
         lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True), _Last(), nn.Linear(4, 3)),
         pair(real(5, 4), classes()), CE, layers=False),
    Case("Embedding", "attention", lambda: TinyLanguageModel(tied=False), pair(tokens(5, 4), classes(5, 4)), CE),
    Case("Embedding, padding_idx", "attention", lambda: TinyLanguageModel(tied=False, padding_idx=0), pair(tokens(5, 4), classes(5, 4)), CE),
    Case("Embedding, sparse gradients", "attention", lambda: TinyLanguageModel(tied=False, sparse=True),
         pair(tokens(5, 4), classes(5, 4)), CE),
    Case("Embedding used twice, time first, T = rows", "attention", Siamese,
         pair(lambda: (tokens(5, ROWS)(), tokens(5, 3)()), classes()), CE),
    Case("Embedding tied to the output", "attention", lambda: TinyLanguageModel(tied=True), pair(tokens(5, 4), classes(5, 4)), CE,
         layers=False),
]  # fmt: skip


class _Last(nn.Module):
    """The last step of a sequence (of a recurrent layer's first output)."""

    def forward(self, x: Any) -> Tensor:
        return (x[0] if isinstance(x, tuple) else x)[:, -1]
