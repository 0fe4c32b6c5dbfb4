"""What the pretend accelerator (tests/pretend.py) runs on the CPU by another name, and kernels that the CPU lacks: the fused
cells of recurrent layers, which torch takes on devices alone."""

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_Maybe = Tensor | None


def _gates(gates: Tensor, bias: _Maybe) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm(x: Tensor, h: Tensor, cx: Tensor, bias_x: _Maybe = None, bias_h: _Maybe = None) -> tuple[Tensor, ...]:
    """A cell of an LSTM; what its backward pass needs are the gates before their functions."""
    gates = _gates(x, bias_x) + _gates(h, bias_h)
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy, gates


def _lstm_backward(hy: _Maybe, cy: _Maybe, cx: Tensor, c: Tensor, gates: Tensor, bias: bool) -> tuple[Any, ...]:
    zeros = torch.zeros_like(gates)
    found = _aten._thnn_differentiable_lstm_cell_backward(hy, cy, gates, zeros, None, None, cx, c)
    return found[0], found[2], found[0].sum(0) if bias else None


def _gru(x: Tensor, h: Tensor, hx: Tensor, bias_x: _Maybe = None, bias_h: _Maybe = None) -> tuple[Tensor, Tensor]:
    x, h = _gates(x, bias_x), _gates(h, bias_h)
    (xr, xi, xn), (hr, hi, hn) = x.chunk(3, 1), h.chunk(3, 1)
    n, i = (xn + (xr + hr).sigmoid() * hn).tanh(), (xi + hi).sigmoid()
    return (hx - n) * i + n, torch.cat([x, h, hx], 1)


def _gru_backward(hy: Tensor, kept: Tensor, bias: bool) -> tuple[Any, ...]:
    width = kept.shape[1] // 7
    x, h, hx = kept.split([3 * width, 3 * width, width], 1)
    found = _aten._thnn_differentiable_gru_cell_backward(hy, x, h, hx, None, None)[:3]
    return (*found, *((found[0].sum(0), found[1].sum(0)) if bias else (None, None)))


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    *settings, (by_x, by_weight, by_bias) = rest
    found = _aten.convolution_backward(grad, x, weight, None, *settings, [by_x, by_weight, False])
    return *found[:2], grad.sum((0, *range(2, grad.ndim))) if by_bias else None


INSTEAD = {
    _aten.mse_loss.default: _aten.mse_loss.default,  # with an output of its own, which has the right shape
    _aten.remainder.Tensor: torch.remainder,  # which takes the number that torch hands over for a tensor
    _aten.convolution_overrideable.default: _aten.convolution.default,
    _aten.convolution_backward_overrideable.default: _convolution_backward,
    _aten._thnn_fused_lstm_cell.default: _lstm,
    _aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    _aten._thnn_fused_gru_cell.default: _gru,
    _aten._thnn_fused_gru_cell_backward.default: _gru_backward,
}
