"""Formulas of layers for Σ_j (J_j'u_j)², from a layer's inputs and the gradients by its outputs.

A linear layer that is used once has J_j'u_j = g_j a_j' with its input a and output gradient g, so that the sum of squares
is (g²)'(a²): one matrix product. An embedding's per-case gradients are zero but for the rows that the case looks up, and
only these are made. A convolution of each channel by itself takes a product over the positions for each place of its
kernel. Other layers that keep cases apart get their own small per-case pullback, all cases at once.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.linalg import vector_norm

from shf.linear.flat import read
from shf.model.network import plain_gradients

MOST_NUMBERS = 2**24
"""How many numbers the per-case gradients of one chunk may have."""
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_FORWARDS = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


class Use(NamedTuple):
    """One use of a layer: its input and the gradient by its output, both with the rows in front."""

    a: Tensor
    g: Tensor


@runtime_checkable
class HasPerCaseSquares(Protocol):
    """A module with a formula of its own, such as a layer on sparse inputs."""

    def per_case_squares(self, inputs: Tensor, output_gradients: Tensor) -> dict[str, Tensor]:
        """Σ_j g_j² of each of its parameters, for one call on rows `inputs` with these gradients by its output."""


Comparison = tuple[Tensor, Tensor, Tensor]
"""Two numbers that should be equal, and the size of what they were added up from: each a tensor, so that the device need not
be asked for every one."""


def holds(found: float, expected: float, size: float, eps: float) -> bool:
    """Whether a comparison does, but for rounding."""
    return abs(found - expected) <= math.sqrt(eps) * (size + abs(expected))


def agree(compared: Sequence[Comparison]) -> list[bool]:
    """Whether each comparison holds; the device is asked once."""
    if not compared:
        return []
    eps, numbers = torch.finfo(compared[0][0].dtype).eps, read(*chain.from_iterable(compared))
    return [holds(*three, eps) for three in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)]


class Squares(NamedTuple):
    """Σ_j g_j² of one parameter, and a comparison of Σ_j g_j with the gradient that the backward pass found for it.

    It does not hold where the parameter was also used outside of its module's calls; then the squares are not right either.
    """

    total: Tensor
    compared: Callable[[Tensor], Comparison]


def formula(module: nn.Module, values: dict[str, Tensor], uses: list[Use]) -> dict[str, Squares]:
    """Of those of a layer's parameters, by name, that there is a formula for; from all calls of the layer, which treats
    cases apart."""
    if isinstance(module, nn.Linear) and len(uses) == 1 and uses[0].a.ndim == 2:
        return _linear(uses[0], values)
    if isinstance(module, HasPerCaseSquares) and len(uses) == 1:
        return _own_formula(module, values, uses[0])
    if any(use.a.layout != torch.strided for use in uses):
        return {}
    if isinstance(module, nn.Linear):
        return _summed(values, uses, _linear_per_case)
    if type(module).forward is nn.Embedding.forward and values.keys() == {"weight"}:
        return _embedding(uses, values["weight"], module.padding_idx)  # type: ignore[arg-type]
    if _is_depthwise(module):
        return _summed(values, uses, lambda some: _depthwise_per_case(module, some))  # type: ignore[arg-type]
    return _summed(values, uses, lambda some: _pullback_per_case(module, values, some))


def _own_formula(module: "HasPerCaseSquares", values: dict[str, Tensor], use: Use) -> dict[str, Squares]:
    """A layer that brings its own formula; its own gradient is the test of whether it was used once only."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        z = apart(module, leaves, use.a)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(z, list(leaves.values()), use.g)
    squares = module.per_case_squares(use.a, use.g)
    return {
        name: Squares(squares[name], equals(gradient, gradient.abs()))
        for name, gradient in zip(leaves, gradients, strict=True)
    }


def _linear(use: Use, values: dict[str, Tensor]) -> dict[str, Squares]:
    """A linear layer used once on (rows, features): per-case gradients g_j a_j', sum of squares (g²)'(a²)."""
    a, g = use
    found: dict[str, Squares] = {}
    g_squared, left = g.square(), probe(g.shape[1], g)
    projected = g @ left
    if "weight" in values:
        right = probe(a.shape[1], g)
        total = _products_of_squares(g_squared, a)
        found["weight"] = Squares(total, projects_to(projected * (a @ right), lambda G: left @ (G @ right)))
    if "bias" in values:
        found["bias"] = Squares(g_squared.sum(0), projects_to(projected, lambda G: left @ G))
    return found


def _products_of_squares(g_squared: Tensor, a: Tensor) -> Tensor:
    """(g²)'(a²); a CSR input stays sparse."""
    if a.layout != torch.sparse_csr:
        return g_squared.t() @ a.square()
    squared = torch.sparse_csr_tensor(
        a.crow_indices(), a.col_indices(), a.values().square(), a.shape, check_invariants=False
    )
    return (squared.t() @ g_squared).t()


def _linear_per_case(uses: Sequence[Use]) -> dict[str, Tensor]:
    """A linear layer on sequences, or used several times: the sum over positions and uses comes before the square."""
    a, g = (
        torch.cat([t.flatten(1, -2) if t.ndim > 2 else t[:, None] for t in ts], 1) for ts in zip(*uses, strict=True)
    )
    return {"weight": g.transpose(1, 2) @ a, "bias": g.sum(1)}


def _embedding(uses: Sequence[Use], weight: Tensor, padding: int | None) -> dict[str, Squares]:
    """An embedding: the gradients of a case are summed for each of its words, over positions and uses, then squared; what
    a case does not look up is never made. Words at `padding` have no gradient."""
    if not uses:
        return {}
    words = torch.cat([use.a[:, None].flatten(1) for use in uses], 1)
    g = torch.cat([use.g[:, None].flatten(1, -2) for use in uses], 1)
    if padding is not None:
        g = g.masked_fill((words == padding % len(weight)).unsqueeze(-1), 0.0)
    case = torch.arange(len(words), device=words.device).unsqueeze(1)
    pairs, place = (case * len(weight) + words).reshape(-1).unique(return_inverse=True)
    per_case = g.new_zeros(len(pairs), g.shape[-1]).index_add_(0, place, g.reshape(-1, g.shape[-1]))

    def summed(of_pairs: Tensor) -> Tensor:
        return torch.zeros_like(weight).index_add_(0, pairs % len(weight), of_pairs)

    return {"weight": Squares(summed(per_case.square()), equals(summed(per_case), summed(per_case.abs())))}


def _is_depthwise(module: nn.Module) -> bool:
    """Whether it is a convolution of each channel by itself, padded with zeros."""
    if not isinstance(module, Convolution) or type(module).forward not in _FORWARDS:
        return False
    return (
        module.groups == module.in_channels and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    )


def _depthwise_per_case(layer: Convolution, uses: Sequence[Use]) -> dict[str, Tensor]:
    """A convolution of each channel by itself: at each place of the kernel Σ_p g_p a_q, q being what position p sees there.

    With positions in front, each product runs over all channels and cases at once.
    """
    per_use = [_correlated(layer, *use) for use in uses]
    bias = [use.g.flatten(2).sum(2) for use in uses]
    return {"weight": sum(per_use[1:], per_use[0]), "bias": sum(bias[1:], bias[0])}


def _correlated(layer: Convolution, a: Tensor, g: Tensor) -> Tensor:
    """(cases, outputs, 1, kernel)."""
    axes = range(2, a.ndim)
    a = a.permute(*axes, 1, 0).unsqueeze(-2).contiguous()  # (positions, channels, 1, cases)
    g = g.permute(*axes, 1, 0).unflatten(-2, (layer.in_channels, -1)).contiguous()
    found = g.new_empty(*layer.kernel_size, *g.shape[len(axes) :])
    for place in itertools.product(*map(range, layer.kernel_size)):
        spans = [_seen_at(layer, axis, k, a.shape[axis], g.shape[axis]) for axis, k in enumerate(place)]
        outputs, inputs = zip(*spans, strict=True)
        found[place] = (g[outputs] * a[inputs]).flatten(0, len(axes) - 1).sum(0)
    return found.flatten(-3, -2).permute(-1, -2, *range(len(axes))).unsqueeze(2)


def _seen_at(layer: Convolution, axis: int, k: int, inputs: int, outputs: int) -> tuple[slice, slice]:
    """Along one axis, the positions whose kernel sees the input at its k-th place, not the padding; and where in the input
    that is."""
    stride, before = layer.stride[axis], int(layer.padding[axis]) - k * layer.dilation[axis]
    begin, end = max(0, -(-before // stride)), min(outputs, (inputs - 1 + before) // stride + 1)
    if end <= begin:
        return slice(0), slice(0)
    return slice(begin, end), slice(begin * stride - before, (end - 1) * stride - before + 1, stride)


def _pullback_per_case(module: nn.Module, values: dict[str, Tensor], uses: Sequence[Use]) -> dict[str, Tensor]:
    """Any layer that treats cases apart: its own pullback, mapped over cases.

    For convolutions this is one grouped convolution, and was measured to be faster than products of unfolded inputs.
    """

    def one_case(a: Tensor, g: Tensor) -> dict[str, Tensor]:
        def layer(parameters: dict[str, Tensor]) -> Tensor:
            with plain_gradients(module.modules()):
                return apart(module, parameters, a[None])

        return vjp(layer, values)[1](g[None])[0]  # type: ignore[no-any-return]

    per_use = [vmap(one_case)(use.a, use.g) for use in uses]
    return {name: sum((found[name] for found in per_use[1:]), per_use[0][name]) for name in values}


class _WithoutHooks(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module.forward(inputs)  # type: ignore[no-any-return]


def apart(module: nn.Module, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """The layer's output with these parameters. Its hooks do not hear of it, and its buffers stay as they are."""
    values = {name: buffer.clone() for name, buffer in module.named_buffers()} | parameters
    named = {f"module.{name}": value for name, value in values.items()}
    return functional_call(_WithoutHooks(module), named, (inputs,))  # type: ignore[no-any-return]


def _summed(
    values: dict[str, Tensor], uses: list[Use], per_case: Callable[[Sequence[Use]], dict[str, Tensor]]
) -> dict[str, Squares]:
    """Sums the squares of per-case gradients over chunks of cases; nothing where the layer cannot be mapped."""
    if not uses:
        return {}
    rows = len(uses[0].a)
    size = max(1, MOST_NUMBERS // max(1, sum(v.numel() for v in values.values())))
    totals = {name: torch.zeros_like(v) for name, v in values.items()}
    sizes = {name: torch.zeros_like(v) for name, v in values.items()}
    squares = {name: torch.zeros_like(v) for name, v in values.items()}
    for begin in range(0, rows, size):
        chunk = [Use(u.a[begin : begin + size], u.g[begin : begin + size]) for u in uses]
        try:
            found = per_case(chunk)
        except RuntimeError:  # no batching rule for an operation of this layer, or it does not accept a single case
            return {}
        known = values.keys() & found.keys()  # a layer may have parameters beside those that the formula is for
        for name in known:
            totals[name] += found[name].sum(0)
            sizes[name] += found[name].abs().sum(0)
            squares[name] += found[name].square().sum(0)
    return {name: Squares(squares[name], equals(totals[name], sizes[name])) for name in known}


def projection(of: Tensor) -> Tensor:
    """One number that tells one gradient from another."""
    matrix = of.reshape(len(of), -1) if of.ndim else of.reshape(1, 1)
    return probe(len(matrix), of) @ (matrix @ probe(matrix.shape[1], of))


def probe(size: int, like: Tensor) -> Tensor:
    """A fixed vector without structure, for comparing two matrices through one projection of each."""
    return _probes(size, like.dtype, like.device)


@lru_cache(maxsize=64)
def _probes(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    angles = torch.arange(1, size + 1, dtype=torch.float64) * (math.sqrt(5) - 1) * math.pi
    return angles.cos().to(device, dtype)


def projects_to(terms: Tensor, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Comparison]:
    """Whether a gradient's projection is the sum of the cases' projections, `terms`."""
    return lambda gradient: (terms.sum(), project(gradient), vector_norm(terms, 1))


def equals(total: Tensor, size: Tensor) -> Callable[[Tensor], Comparison]:
    """Whether a gradient is a total, entry by entry."""
    return lambda gradient: (
        (total - gradient).abs().max(),
        total.new_zeros(()),
        size.max() + gradient.abs().max(),
    )
