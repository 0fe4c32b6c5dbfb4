"""Every use of the parameters of linear maps in a graph, row by row, also where `forward` differentiates by its inputs.

Inside the mode `F.linear` with trained parameters is x ↦ xW' + b in two functions of our own. The backward pass of the
first is g ↦ gW, the same function with the transpose; so in a derivative by the inputs, of whatever order, W stands in
functions of this kind only. In the backward pass that is recorded each of them says the two factors of its share of W's
gradient: g_i x_i' for row i (x_i g_i' for the transposed one). Neither gives the gradient by its parameter: what
autograd then still finds of it comes from uses of another kind.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_AT_ONCE = 32
"""Rows whose products are made before they are written to their places: the processor's cache holds these."""


class LinearUses(TorchFunctionMode):
    """Records uses of the weights and biases that `F.linear` is called with inside the mode."""

    def __init__(self) -> None:
        super().__init__()
        self._recording = False
        self._factors: dict[int, list[tuple[Tensor, ...]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        z: Tensor = _Product.apply(input, weight, self, False) if _trained(weight) else F.linear(input, weight)  # type: ignore[no-untyped-call]
        if bias is None:
            return z
        return _Shift.apply(z, bias, self) if _trained(bias) else z + bias  # type: ignore[no-untyped-call]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around one backward pass: what was recorded before is forgotten."""
        self._factors.clear()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def add(self, parameter: Tensor, *factors: Tensor) -> None:
        if self._recording:
            self._factors.setdefault(id(parameter), []).append(tuple(f.detach() for f in factors))

    def write_rows(self, parameter: Tensor, out: Tensor) -> bool:
        """Writes the rows' gradients by one parameter into `out`, of shape (rows, *parameter.shape).

        Returns:
            Whether every use has its rows on axis 0; if not, nothing is written.
        """
        rows, uses = len(out), self._factors.get(id(parameter), [])
        if any(factor.ndim < 2 or len(factor) != rows for use in uses for factor in use):
            return False
        if not uses:
            out.zero_()
            return True
        left, *right = (_joined(factors, rows) for factors in zip(*uses, strict=True))
        if not right:
            torch.sum(left, 1, out=out)
        elif left.shape[1] == 1:
            torch.mul(left.mT, right[0], out=out)
        else:
            for block, a, b in zip(*(t.split(_AT_ONCE) for t in (out, left.mT, right[0])), strict=True):
                block.copy_(torch.bmm(a, b))
        return True


def _trained(parameter: Tensor) -> bool:
    return parameter.is_leaf and parameter.requires_grad


def _joined(factors: tuple[Tensor, ...], rows: int) -> Tensor:
    """(rows, uses, features): one factor of all uses; a use along a sequence is one for each of its places."""
    parts = [factor.reshape(rows, -1, factor.shape[-1]) for factor in factors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _Product(torch.autograd.Function):
    """x ↦ xW', or x ↦ xW if `transposed`; its backward pass is the other of the two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, uses: LinearUses, transposed: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.uses, ctx.transposed = weight, uses, transposed
        return x @ (weight if transposed else weight.t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.uses.add(ctx.weight, *((x, g) if ctx.transposed else (g, x)))
        by_input = _Product.apply(g, ctx.weight, ctx.uses, not ctx.transposed) if ctx.needs_input_grad[0] else None  # type: ignore[no-untyped-call]
        return by_input, None, None, None


class _Shift(torch.autograd.Function):
    """z ↦ z + b."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor, uses: LinearUses) -> Tensor:
        ctx.bias, ctx.uses = bias, uses
        return z + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.uses.add(ctx.bias, g)
        return g, None, None
