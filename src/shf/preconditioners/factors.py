"""The Kronecker-factored preconditioner: P = (A + π√λ I) ⊗ (G + √λ/π I), layer by layer. No passes, no state here.

A linear layer s = W a has the Gauss-Newton block Σ_j (a_j a_j') ⊗ (g_j g_j') in expectation over root samples u = Sξ of L''
(SS' = L'', ξ = ±1), where g_j is the gradient of u'z by s_j: E[uu'] = L''. Taking inputs and gradients as independent leaves
A ⊗ G with A the mean of aa' and G the sum of gg' (Martens & Grosse, 2015). A bias is a weight whose input is 1. In a
convolution, and in a linear layer on sequences, every position counts as a case (Grosse & Martens, 2016).

λ is spread over both factors in proportion to their mean eigenvalues: π² = (tr A / dim A) / (tr G / dim G). Weight decay w
of the layer's weight is damping like λ. What no factors cover has a diagonal: P = D + λ + w.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shf.errors import NonFiniteError
from shf.linear.cg import LinearMap
from shf.linear.decay import Decay
from shf.linear.flat import read
from shf.model.network import Network

_LARGEST = 4096
"""Rows of the largest factor: beyond it, inverting costs more than any number of CG iterations that it saves."""


@dataclass(frozen=True)
class Block:
    """A layer that may be preconditioned by two factors.

    Attributes:
        module: a linear or convolution layer.
        weight: number of its weight among the parameters.
        bias: number of its bias, or None where it has none that is trained.
        inputs: rows of A: what one output sees, and the 1 that stands for the bias.
        outputs: rows of G.
    """

    module: nn.Module
    weight: int
    bias: int | None
    inputs: int
    outputs: int

    @property
    def members(self) -> list[int]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def find_blocks(network: Network) -> list[Block]:
    """The layers of a kind and size that factors fit; whether they really explain a layer's gradient is seen in a pass."""
    numbers = {id(p): i for i, p in enumerate(network.parameters)}
    blocks = []
    for module in network.modules:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not _fits(module) or not isinstance(weight, Tensor) or id(weight) not in numbers or not weight.numel():
            continue
        trained = numbers.get(id(bias))
        outputs, inputs = len(weight), weight[0].numel() + (trained is not None)
        if max(inputs, outputs) <= _LARGEST and all(map(network.is_held_once, module.parameters())):
            blocks.append(Block(module, numbers[id(weight)], trained, inputs, outputs))
    return blocks


def _fits(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.groups == 1
    return isinstance(module, nn.Linear)


@dataclass(frozen=True)
class Factors:
    """What P is made of, before damping.

    Attributes:
        blocks: the layers with factors.
        pairs: A and G of each.
        diagonals: D of every parameter that belongs to no block, by its number.
    """

    blocks: Sequence[Block]
    pairs: Sequence[tuple[Tensor, Tensor]]
    diagonals: Mapping[int, Tensor]

    def tensors(self) -> list[Tensor]:
        return [t for pair in self.pairs for t in pair] + list(self.diagonals.values())


@dataclass(frozen=True)
class Inverse:
    """P⁻¹ of one step: the inverses of the damped factors, and of the diagonals."""

    blocks: Sequence[Block]
    pairs: Sequence[tuple[Tensor, Tensor]]
    diagonals: Mapping[int, Tensor]

    def solver(self, network: Network) -> LinearMap:
        """r ↦ P⁻¹r on flat vectors: G⁻¹ R A⁻¹ for the matrix R of a layer. The result is overwritten by the next call."""
        shapes = network.shapes
        out = network.parameters[0].new_empty(shapes.total)
        results = shapes.split(out)

        def solve(r: Tensor) -> Tensor:
            pieces = shapes.split(r)
            for block, (a, g) in zip(self.blocks, self.pairs, strict=True):
                solved = g @ _matrix(block, pieces) @ a
                if block.bias is not None:
                    results[block.bias].copy_(solved[:, -1])
                    solved = solved[:, :-1]
                results[block.weight].copy_(solved.reshape(results[block.weight].shape))
            for i, inverse in self.diagonals.items():
                torch.mul(pieces[i], inverse, out=results[i])
            return out

        return solve


def _matrix(block: Block, pieces: Sequence[Tensor]) -> Tensor:
    """A layer's part of a vector as (outputs, inputs), the bias its last column."""
    weight = pieces[block.weight].reshape(block.outputs, -1)
    if block.bias is None:
        return weight
    return torch.cat([weight, pieces[block.bias].reshape(-1, 1)], 1)


def invert(
    factors: Factors, damping: float, decay: Decay, mine: Callable[[int], bool] = lambda number: True
) -> Inverse:
    """The inverses of the damped factors; where block number i is not `mine`, zeros stand for them."""
    pairs, known = [], iter(_diagonals([pair for number, pair in enumerate(factors.pairs) if mine(number)]))
    for number, (block, (a, g)) in enumerate(zip(factors.blocks, factors.pairs, strict=True)):
        if not mine(number):
            pairs.append((torch.zeros_like(a), torch.zeros_like(g)))
            continue
        means, largest = next(known)
        root = math.sqrt(damping + decay.weights[block.weight])
        most = math.sqrt(torch.finfo(a.dtype).max)  # neither factor's share of the damping may overflow
        pi = min(max(balance(*means), root / most), most / root)
        pairs.append(_inverses((a, g), (pi * root, root / pi), largest))
    diagonals = {i: (d + (damping + decay.weights[i])).reciprocal_() for i, d in factors.diagonals.items()}
    return Inverse(factors.blocks, pairs, diagonals)


def invert_undamped(factors: Factors, decay: Decay) -> Inverse:
    """The inverses of factors that weight decay alone damps; zero for weights without any."""
    diagonals = {i: d if decay.weights[i] else torch.full_like(d, math.inf) for i, d in factors.diagonals.items()}
    decayed = [decay.weights[b.weight] > 0 for b in factors.blocks]
    return invert(replace(factors, diagonals=diagonals), 0.0, decay, decayed.__getitem__)


def balance(mean_a: float, mean_g: float) -> float:
    """π: how much more of the damping the input factor takes than the output factor, from the means of their diagonals; 1
    where one of them is zero."""
    return math.sqrt(mean_a / mean_g) if mean_a > 0 and mean_g > 0 else 1.0


_Pair = tuple[float, float]


def _diagonals(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[_Pair, _Pair]]:
    """Mean and largest entry of the diagonal of both factors of each pair; the device is asked once."""
    numbers = [number for a, g in pairs for number in (a.trace(), g.trace(), a.diagonal().max(), g.diagonal().max())]
    found = iter(read(*numbers))
    return [
        ((trace_a / len(a), trace_g / len(g)), (most_a, most_g))
        for (a, g), trace_a, trace_g, most_a, most_g in zip(pairs, found, found, found, found, strict=True)
    ]


def _inverses(factors: tuple[Tensor, Tensor], dampings: _Pair, largest: _Pair) -> tuple[Tensor, Tensor]:
    """(F + dI)⁻¹ of both factors by Cholesky, d of each and the largest entry of its diagonal given."""
    damped = [factor.clone() for factor in factors]
    for matrix, d in zip(damped, dampings, strict=True):
        matrix.diagonal().add_(d)
    (root_a, info_a), (root_g, info_g) = map(torch.linalg.cholesky_ex, damped)
    failed_a, failed_g = read(info_a, info_g)
    if failed_a:
        root_a = _definite_again(damped[0], dampings[0], largest[0])
    if failed_g:
        root_g = _definite_again(damped[1], dampings[1], largest[1])
    return torch.cholesky_inverse(root_a), torch.cholesky_inverse(root_g)


def _definite_again(damped: Tensor, damping: float, largest: float) -> Tensor:
    """The root of F + dI, which rounding has cost its definiteness: d grows until it is back."""
    numbers = torch.finfo(damped.dtype)
    scale = max(damping, numbers.tiny, numbers.eps * largest)
    while True:
        damped.diagonal().add_(scale)
        scale *= 10.0
        if not math.isfinite(scale):
            raise NonFiniteError("a factor of the Kronecker preconditioner is not finite at the present parameters")
        root: Tensor
        root, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return root
