"""The networks of the paper, with logits out: the loss holds the softmax or the logistic function (a matching loss)."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shf.nn import SparseDropout, SparseLinear

WeightLayer = nn.Linear | SparseLinear


class PaperDropout(nn.Module):
    """Dropout as the paper has it: units are dropped with probability p in training and nothing is scaled up; at test
    time every unit is scaled by 1-p, the mean network. `nn.Dropout` scales the other side, which changes the scale of
    the weights and with it that of the damping λ.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x * (1.0 - self.p)
        return x * torch.empty_like(x).bernoulli_(1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def classifier(
    sizes: Sequence[int],
    *,
    input_dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    dropout: str = "last",
    sparse_input: bool = False,
) -> nn.Sequential:
    """A rectifier network of the given layer sizes; two sizes make softmax regression.

    Args:
        sizes: units from the inputs to the classes, such as (784, 1200, 1200, 10).
        input_dropout: the probability of dropping an input.
        hidden_dropout: the probability of dropping a hidden unit.
        dropout: where hidden units are dropped: in the "last" hidden layer (SHF, dSGD-l) or in "all" of them (dSGD-a).
        sparse_input: take CSR batches and never make them dense.
    """
    _check_sizes("classifier", sizes)
    if dropout not in ("last", "all"):
        raise ValueError(f"classifier(dropout={dropout!r}): must be one of last, all")
    for name, p in (("input_dropout", input_dropout), ("hidden_dropout", hidden_dropout)):
        if not 0.0 <= p < 1.0:
            raise ValueError(f"classifier({name}={p}): must be in [0, 1)")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if input_dropout:
        layers["input_dropout"] = _dropout(input_dropout, sparse_input)
    last = len(sizes) - 1
    for k, (n_in, n_out) in enumerate(pairwise(sizes), start=1):
        layers[f"linear{k}"] = SparseLinear(n_in, n_out) if sparse_input and k == 1 else nn.Linear(n_in, n_out)
        if k == last:
            break
        layers[f"rectifier{k}"] = nn.ReLU()
        if hidden_dropout and (dropout == "all" or k == last - 1):
            layers[f"dropout{k}"] = PaperDropout(hidden_dropout)
    return nn.Sequential(layers)


class Autoencoder(nn.Sequential):
    """An encoder and its mirror image: linear layer k from the front has the transposed shape of layer k from the back."""


def autoencoder(encoder_sizes: Sequence[int]) -> Autoencoder:
    """A deep autoencoder of logistic units around a linear code, the decoder mirroring the encoder.

    Args:
        encoder_sizes: units from the inputs to the code, such as (784, 400, 200, 100, 50, 25, 6).
    """
    _check_sizes("autoencoder", encoder_sizes)
    sizes = [*encoder_sizes, *reversed(encoder_sizes[:-1])]
    code, last = len(encoder_sizes) - 1, len(sizes) - 1
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k, (n_in, n_out) in enumerate(pairwise(sizes), start=1):
        layers[f"linear{k}"] = nn.Linear(n_in, n_out)
        if k not in (code, last):
            layers[f"logistic{k}"] = nn.Sigmoid()
    return Autoencoder(layers)


def regressor(sizes: Sequence[int]) -> nn.Sequential:
    """A network of tanh units of the given layer sizes, with linear outputs."""
    _check_sizes("regressor", sizes)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k, (n_in, n_out) in enumerate(pairwise(sizes), start=1):
        layers[f"linear{k}"] = nn.Linear(n_in, n_out)
        if k < len(sizes) - 1:
            layers[f"tanh{k}"] = nn.Tanh()
    return nn.Sequential(layers)


def weight_layers(model: nn.Module) -> Iterator[WeightLayer]:
    """The linear layers of a model, from the inputs to the outputs."""
    return (layer for layer in model.modules() if isinstance(layer, WeightLayer))


def incoming_weights(layer: WeightLayer) -> Tensor:
    """A view of a layer's weights with one row per unit: its incoming weights."""
    return layer.weight.T if isinstance(layer, SparseLinear) else layer.weight


def _dropout(p: float, sparse: bool) -> nn.Module:
    return SparseDropout(p, training_scale=1.0, evaluation_scale=1.0 - p) if sparse else PaperDropout(p)


def _check_sizes(name: str, sizes: Sequence[int]) -> None:
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"{name}(sizes={tuple(sizes)}): expected two or more layer sizes, each at least 1")
