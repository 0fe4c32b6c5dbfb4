"""The zeros of the second graph, which is made at a zero cotangent: a shape says as much as they do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shf.model.secondgraph import without_cotangents

FEW = 2**18
"""Zeros that may be kept, where looking for them in every graph and handing them out in every product costs more."""


class Zeros:
    """How many zeros the second graph of a network has, as far as that is known."""

    def __init__(self) -> None:
        self._size, self._count = -1, 0  # of inputs that were seen, and zeros in their graph

    def are_few(self, size: int) -> bool:
        """Whether a graph of inputs with so many entries is known to have few: one of inputs that were no smaller had."""
        return size <= self._size and self._count <= FEW

    @contextmanager
    def left_out(self, size: int, ends: Sequence[Tensor] = ()) -> Iterator[None]:
        """Around the making of a graph from inputs with so many entries: tensors that are zero everywhere are kept as shapes
        alone, unless they are known to be few. With `ends` the graph is made from
        cotangents of these that are not zero, and what nodes are handed is left out."""
        if self.are_few(size):
            yield
            return
        self._size, self._count = -1, 0
        with without_cotangents(ends, self._add) if ends else saved_tensors_hooks(self._pack, lambda saved: saved):
            yield
        self._size = size

    def _add(self, tensor: Tensor) -> None:
        self._count += tensor.numel()

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel():
            least, most = torch.stack(torch.aminmax(tensor.detach())).tolist()  # the device is asked once
            if least == most == 0:
                self._count += tensor.numel()
                return tensor.new_zeros(()).expand(tensor.shape)
        return tensor.detach()
