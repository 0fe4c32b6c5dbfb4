"""Where training starts: sparse (Martens 2010), normalised (Glorot & Bengio 2010) or torch's own."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from shf.lab.models import WeightLayer, incoming_weights, weight_layers

INCOMING = 15
"""How many incoming weights of a unit are not zero in the sparse initialisation."""


@torch.no_grad()
def initialise_(
    model: nn.Module,
    scheme: str = "sparse",
    *,
    generator: torch.Generator,
    bias: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Draws every linear layer's parameters anew, in place.

    - "sparse": every unit gets 15 incoming weights ~ N(0, 1) (all, where it has fewer), the rest 0;
    - "normalised": weights uniform in ±√6 / √(n_in + n_out + 1);
    - "torch": `nn.Linear`'s own, weights and biases uniform in ±1/√n_in.

    Args:
        model: a model with linear layers.
        scheme: one of the three.
        generator: the source of every draw.
        bias: the value of all biases in the first two schemes (the paper's rectifiers: 0.1); "torch" draws its own.
        scale: a factor on the weights drawn.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"initialise_(scheme={scheme!r}): must be one of {', '.join(SCHEMES)}")
    layers = list(weight_layers(model))
    if not layers:
        raise ValueError(f"initialise_: {type(model).__name__} has no linear layer to initialise")
    for layer in layers:
        SCHEMES[scheme](layer, generator, bias)
        layer.weight.mul_(scale)


def _sparse(layer: WeightLayer, generator: torch.Generator, bias: float) -> None:
    weights = torch.zeros(layer.out_features, layer.in_features)
    count = min(INCOMING, layer.in_features)
    chosen = torch.rand(weights.shape, generator=generator).topk(count, dim=1).indices
    weights.scatter_(1, chosen, torch.randn(chosen.shape, generator=generator))
    incoming_weights(layer).copy_(weights)
    _set_bias(layer, bias)


def _normalised(layer: WeightLayer, generator: torch.Generator, bias: float) -> None:
    bound = math.sqrt(6.0 / (layer.in_features + layer.out_features + 1))
    incoming_weights(layer).copy_(_uniform((layer.out_features, layer.in_features), bound, generator))
    _set_bias(layer, bias)


def _torch(layer: WeightLayer, generator: torch.Generator, bias: float) -> None:
    bound = layer.in_features**-0.5
    incoming_weights(layer).copy_(_uniform((layer.out_features, layer.in_features), bound, generator))
    if layer.bias is not None:
        layer.bias.copy_(_uniform((layer.out_features,), bound, generator))


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _set_bias(layer: WeightLayer, bias: float) -> None:
    if layer.bias is not None:
        layer.bias.fill_(bias)


SCHEMES: Mapping[str, Callable[[WeightLayer, torch.Generator, float], None]] = MappingProxyType(
    {"sparse": _sparse, "normalised": _normalised, "torch": _torch}
)
