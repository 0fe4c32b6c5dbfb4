"""Convolutions with a second graph of their own.

autograd's rule for differentiating a convolution's backward pass computes up to four more convolutions; of these Jv needs
two: from a tangent (ẋ, Ẇ, ḃ) of the layer's arguments ż = ẋ * W + x * Ẇ + ḃ. Inside the mode every convolution that a model
asks torch for, in a module or in a function, is one whose rules compute what is asked for and nothing else. Scripted
parts of a model, and what runs inside of torch.func's transformations, keep autograd's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
Several = int | Sequence[int]


class Shape(NamedTuple):
    """How a convolution moves over its input, as `torch.convolution` takes it."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


class OwnConvolutions(TorchFunctionMode):
    """Inside, `torch.conv1d` and its kind take the rules of this module."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = _OWN.get(func)
        return func(*args, **(kwargs or {})) if own is None else own(func, *args, **(kwargs or {}))


def is_convolution(node: torch.autograd.graph.Node) -> bool:
    """Whether a node of a graph is a convolution, by torch's rules or by these."""
    return node.name() in ("ConvolutionBackward0", _Convolution._backward_cls.__name__)


def is_own(node: torch.autograd.graph.Node) -> bool:
    """Whether a node of a graph is one of these rules'."""
    return isinstance(node, _Convolution._backward_cls)


def _convolution(dimensions: int, *, transposed: bool) -> Callable[..., Tensor]:
    """`torch.conv2d(...)` and its kind, for this number of dimensions."""

    def call(
        func: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Several = 1,
        padding: Several | str = 0,
        dilation: Several = 1,
        groups: int = 1,
        output_padding: Several = 0,
    ) -> Tensor:
        strides, dilations, others = (_each(value, dimensions) for value in (stride, dilation, output_padding))
        if not _plain(input, weight, bias) or input.ndim != dimensions + 2:
            last = (output_padding, groups, dilation) if transposed else (dilation, groups)
            return func(input, weight, bias, stride, padding, *last)  # type: ignore[no-any-return]
        if isinstance(padding, str):
            input, padding = _named_padding(input, weight, padding, dilations)
        shape = Shape(strides, _each(padding, dimensions), dilations, transposed, others, groups)
        return _Convolution.apply(input, weight, bias, shape)  # type: ignore[no-any-return, no-untyped-call]

    if not transposed:
        return call
    return lambda func, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1: call(
        func, input, weight, bias, stride, padding, dilation, groups, output_padding
    )


_OWN: dict[Any, Callable[..., Tensor]] = {
    torch.conv1d: _convolution(1, transposed=False),
    torch.conv2d: _convolution(2, transposed=False),
    torch.conv3d: _convolution(3, transposed=False),
    torch.conv_transpose1d: _convolution(1, transposed=True),
    torch.conv_transpose2d: _convolution(2, transposed=True),
    torch.conv_transpose3d: _convolution(3, transposed=True),
}


def _plain(*tensors: Tensor | None) -> bool:
    return not any(
        t is not None and (is_functorch_wrapped_tensor(t) or not t.is_floating_point() or t.layout != torch.strided)
        for t in tensors
    )


def _each(value: Several, dimensions: int) -> Sequence[int]:
    several = [value] if isinstance(value, int) else list(value)
    return several * dimensions if len(several) == 1 else several


def _named_padding(
    input: Tensor, weight: Tensor, padding: str, dilation: Sequence[int]
) -> tuple[Tensor, Sequence[int]]:
    """The input and the padding of both its ends that "valid" and "same" stand for; where "same" is odd, the one more is
    at the far end."""
    if padding != "same":
        return input, (0,) * len(dilation)
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    odd = [number for both in reversed(total) for number in (0, both % 2)]
    return F.pad(input, odd) if any(odd) else input, [both // 2 for both in total]


def _wanted(ctx: Any, number: int) -> bool:
    """Whether the backward pass that runs now needs the gradient by a function's n-th tensor."""
    node, _ = ctx.next_functions[number]
    if node is None or not ctx.needs_input_grad[number]:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is an end of this pass
        return True


class _Convolution(torch.autograd.Function):
    """(x, W, b) ↦ x * W + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_shape, ctx.shape = None if bias is None else list(bias.shape), shape
        return torch.convolution(x, weight, bias, *shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mask = [_wanted(ctx, 0), _wanted(ctx, 1), ctx.bias_shape is not None and _wanted(ctx, 2)]
        if torch.is_grad_enabled():
            found = _Pullback.apply(g, x, weight, ctx.bias_shape, ctx.shape, mask)  # type: ignore[no-untyped-call]
        else:
            found = _pull(g, x, weight, ctx.bias_shape, ctx.shape, mask)
        return *found, None


class _Pullback(torch.autograd.Function):
    """(g, x, W) ↦ the gradients by x, W and b of what `mask` says."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, bias_shape: list[int] | None, shape: Shape, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight)
        ctx.shape = shape
        return _pull(g, x, weight, bias_shape, shape, mask)

    @staticmethod
    def backward(
        ctx: Any, by_x: Tensor | None, by_weight: Tensor | None, by_bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        g, x, weight = ctx.saved_tensors
        mask = [_wanted(ctx, number) for number in range(3)]
        if mask[1] or mask[2]:  # the model itself differentiates twice
            terms = (by_x, by_weight, by_bias, g, weight, x, *ctx.shape, mask)
            return *_aten._convolution_double_backward(*terms), None, None, None
        return _tangent(x, weight, by_x, by_weight, by_bias, ctx.shape), None, None, None, None, None


def _pull(
    g: Tensor, x: Tensor, weight: Tensor, bias_shape: list[int] | None, shape: Shape, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    found = _aten.convolution_backward(g, x, weight, bias_shape, *shape, mask)
    return tuple(t if wanted else None for t, wanted in zip(found, mask, strict=True))


def _tangent(
    x: Tensor, weight: Tensor, by_x: Tensor | None, by_weight: Tensor | None, by_bias: Tensor | None, shape: Shape
) -> Tensor | None:
    """ż = ẋ * W + x * Ẇ + ḃ."""
    if by_weight is None and by_bias is not None:
        by_weight = torch.zeros_like(weight)
    if by_weight is None:
        return None if by_x is None else torch.convolution(by_x, weight, None, *shape)
    z = torch.convolution(x, by_weight, by_bias, *shape)
    return z if by_x is None else z.add_(torch.convolution(by_x, weight, None, *shape))
