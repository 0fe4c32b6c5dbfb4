"""What the positions of a convolution see, its patches p, without writing them out: projections of them, and Σ pp'.

The patch of position (y, x) has rows sy + dk of the input for k below the kernel's height (stride s, dilation d). Two
positions share most of their rows, so Σ pp' is made of products of two rows, summed over everything else: each pair is
multiplied once, whatever the number of positions that see it, and then counted for all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_AT_ONCE = 2**21
"""Numbers of the rows that are written out at once: larger ones would not stay in the processor's cache."""

Convolution = nn.Conv1d | nn.Conv2d


class Patches(NamedTuple):
    """Σ pp', Σ p, and the number of positions."""

    outer: Tensor
    total: Tensor
    positions: int


def project_patches(layer: Convolution, a: Tensor, direction: Tensor) -> Tensor:
    """direction'p of every position, (rows, positions)."""
    a, padding = _padded(layer, a)
    weight, zeros = direction.reshape(1, -1, *layer.kernel_size), (0,) * len(padding)
    return torch.convolution(a, weight, None, layer.stride, padding, layer.dilation, False, zeros, 1).flatten(1)


def sum_patches(layer: Convolution, a: Tensor) -> Patches:
    """Sums over all positions of all rows; a sequence is an image of width 1."""
    a, padding = _padded(layer, a)
    if any(padding):
        a = F.pad(a, [n for n in reversed(padding) for _ in range(2)])
    if isinstance(layer, nn.Conv1d):
        a = a.unsqueeze(-1)
    (height, width), stride, dilation = (_pair(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    lines, columns = (
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(a.shape[2:], (height, width), stride, dilation, strict=True)
    )
    channels = a.shape[1]
    outer = a.new_zeros(channels, height, width, channels, height, width)
    total = a.new_zeros(channels, height, width)
    for part in a.split(max(1, _AT_ONCE // max(1, a.shape[2] * channels * width * columns))):
        rows = _rows(part, width, columns, stride[1], dilation[1])
        sums = rows.sum(-1).view(-1, channels, width)
        for k in range(height):
            total[:, k] += sums[_span(k * dilation[0], stride[0], lines)].sum(0)
        for apart in range(height):
            ends = (lines - 1) * stride[0] + (height - 1 - apart) * dilation[0] + 1
            lower = rows[apart * dilation[0] :][:ends]
            pairs = torch.bmm(rows[:ends], lower.mT).view(-1, channels, width, channels, width)
            for k in range(height - apart):
                outer[:, k, :, :, k + apart] += pairs[_span(k * dilation[0], stride[0], lines)].sum(0)
    for k in range(height):
        for above in range(k):
            outer[:, k, :, :, above] = outer[:, above, :, :, k].permute(2, 3, 0, 1)
    size = total.numel()
    return Patches(outer.view(size, size), total.view(size), len(a) * lines * columns)


def _rows(a: Tensor, width: int, columns: int, stride: int, dilation: int) -> Tensor:
    """(height, channels · width, rows · columns): each row of the images, as a kernel of that width sees it."""
    n, c, h, w = a.stride()
    shape = (a.shape[2], a.shape[1], width, a.shape[0], columns)
    seen = a.as_strided(shape, (h, c, dilation * w, n, stride * w), a.storage_offset())
    return seen.reshape(a.shape[2], a.shape[1] * width, -1)


def _span(begin: int, step: int, count: int) -> slice:
    return slice(begin, begin + (count - 1) * step + 1, step)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return (values[0], 1) if len(values) == 1 else (values[0], values[1])


def _padded(layer: Convolution, a: Tensor) -> tuple[Tensor, Sequence[int]]:
    """A convolution's input, and how many zeros still go on both ends of each axis; padding of another kind, or of two ends
    that differ, is added here as the layer itself does it."""
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return a, layer.padding
    ends = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(a, ends, mode=mode), (0,) * len(layer.kernel_size)
