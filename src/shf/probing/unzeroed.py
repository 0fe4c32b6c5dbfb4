"""A network at parameters that are nowhere zero, for finding out what it does with rows.

A head or a gate that begins at zero (policies, ReZero, DiT, LoRA), or close to it (LayerScale), hides all that lies before
it: outputs agree whatever the rows, the draws and their order, until the first steps have moved it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shf.data.batches import Batch
from shf.data.draws import Draws, generator
from shf.data.tree import leaves
from shf.model.network import REFUSALS, Network
from shf.runtime.memory import is_out_of_memory

_SIZE = 0.1
"""Of what stands for zeros, per root of what a unit adds up: enough to be seen, too little to make a network chaotic."""
_FAINT = 1e-3
"""A parameter without a larger entry is as good as zero: rounding would hide what it lets through."""


@torch.no_grad()
def without_zeros(network: Network, batch: Batch, seed: int) -> Network:
    """The network with small numbers for the zeros of its parameters, trained and frozen ones; the network as it is where
    there are none, or where it does not give finite outputs like that."""
    values = _values(network.model, seed)
    if not values:
        return network
    awake = network.at(values)
    try:
        with Draws(seed, batch.rows).over():
            outputs = leaves(awake(awake.leaves(), batch.inputs))
    except REFUSALS as error:
        if is_out_of_memory(error):
            raise
        return network
    finite = all(bool(z.isfinite().all()) for z in outputs if z.is_floating_point() and z.layout == torch.strided)
    return awake if finite else network


def _values(model: nn.Module, seed: int) -> dict[nn.Parameter, Tensor]:
    """New values for the parameters that have zeros."""
    padding = {id(m.weight): m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    found = {}
    for number, p in enumerate(model.parameters()):
        if not p.is_floating_point() or p.layout != torch.strided or not p.numel():
            continue
        asleep = p.eq(0) if p.abs().max() > _FAINT else torch.ones_like(p, dtype=torch.bool)
        if (row := padding.get(id(p))) is not None:
            asleep[row] = False  # it stays zero in training, and a row's result may rest on that
        if asleep.any():
            found[p] = torch.where(asleep, _noise(p, seed, number), p.detach())
    return found


def _noise(p: Tensor, *numbers: int) -> Tensor:
    """Numbers of either sign, none of them near zero."""
    source = generator(torch.device("cpu"), *numbers)
    uniform = torch.rand(p.shape, generator=source) - 0.5
    noise = (uniform + torch.where(uniform < 0, -0.5, 0.5)) * (_SIZE / math.sqrt(_summands(p.shape)))
    return noise.to(p)


def _summands(shape: Sequence[int]) -> int:
    """How many terms a unit of a layer with such weights adds up; 1 for biases, scales and gates."""
    return math.prod(shape[1:]) if len(shape) > 1 else 1
