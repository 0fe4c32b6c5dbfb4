"""Where training starts: sparse (Martens 2010), normalised (Glorot & Bengio 2010) or torch's own."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shf.lab.models import incoming_weights, weight_layers

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
        n_out, n_in = layer.out_features, layer.in_features
        incoming_weights(layer).copy_(SCHEMES[scheme](n_out, n_in, generator))
        layer.weight.mul_(scale)
        if layer.bias is not None and scheme == "torch":
            layer.bias.copy_(torch.empty(n_out).uniform_(-(n_in**-0.5), n_in**-0.5, generator=generator))
        elif layer.bias is not None:
            layer.bias.fill_(bias)


def _sparse(n_out: int, n_in: int, generator: torch.Generator) -> Tensor:
    weights = torch.zeros(n_out, n_in)
    chosen = torch.rand(weights.shape, generator=generator).topk(min(INCOMING, n_in), dim=1).indices
    return weights.scatter_(1, chosen, torch.randn(chosen.shape, generator=generator))


def _uniform(bound: float, n_out: int, n_in: int, generator: torch.Generator) -> Tensor:
    return torch.empty(n_out, n_in).uniform_(-bound, bound, generator=generator)


SCHEMES: Mapping[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "sparse": _sparse,
    "normalised": lambda n_out, n_in, g: _uniform(math.sqrt(6.0 / (n_in + n_out + 1)), n_out, n_in, g),
    "torch": lambda n_out, n_in, g: _uniform(n_in**-0.5, n_out, n_in, g),
}
