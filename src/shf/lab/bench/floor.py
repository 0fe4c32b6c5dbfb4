"""The floor: the matrix products that a step of Algorithm 1 cannot do without, and nothing else.

For every layer z = a W' of a feed-forward network: a gradient takes three products (forward, by the weights, by the
inputs; the first layer has no inputs to differentiate by, so two), the diagonal preconditioner one, a Gauss-Newton product
four (Jv: the layer's own direction and what comes from below; J'u: as in the gradient; two in the first layer), in CG's
last iteration without J'u, and an objective evaluation one. The same calls with the same shapes and transposes as
autograd makes, on the same threads, written into memory that is already there.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


class _Layer:
    """The products of one layer, for one number of rows."""

    def __init__(self, rows: int, n_in: int, n_out: int) -> None:
        self.a, self.g = torch.rand(rows, n_in), torch.rand(rows, n_out)
        self.W = torch.rand(n_out, n_in)
        self.z, self.da, self.dW = torch.empty_like(self.g), torch.empty_like(self.a), torch.empty_like(self.W)

    def forward(self) -> Tensor:
        return torch.mm(self.a, self.W.t(), out=self.z)

    def by_weights(self) -> Tensor:
        return torch.mm(self.g.t(), self.a, out=self.dW)

    def by_inputs(self) -> Tensor:
        return torch.mm(self.g, self.W, out=self.da)


class Floor:
    """The products of a network with the given units per layer, from inputs to outputs."""

    def __init__(self, units: Sequence[int], rows: int, curvature_rows: int) -> None:
        self._gradient = [_Layer(rows, *pair) for pair in pairwise(units)]
        same = curvature_rows == rows
        self._curvature = self._gradient if same else [_Layer(curvature_rows, *pair) for pair in pairwise(units)]

    @torch.no_grad()
    def gradient(self) -> None:
        self._forward(self._gradient)
        self._backward(self._gradient)

    @torch.no_grad()
    def preconditioner(self) -> None:
        for layer in self._gradient:
            layer.by_weights()

    @torch.no_grad()
    def along(self) -> None:
        """p'Bp from Jp: all that CG's last iteration needs."""
        for number, layer in enumerate(self._curvature):
            layer.forward()
            if number:
                layer.forward()

    @torch.no_grad()
    def product(self) -> None:
        self.along()
        self._backward(self._curvature)

    @torch.no_grad()
    def evaluation(self) -> None:
        self._forward(self._gradient)

    def step(self, products: int, evaluations: int) -> None:
        """Everything a step needs that makes this many products and evaluations."""
        self.gradient()
        self.preconditioner()
        for _ in range(products - 1):
            self.product()
        self.along()
        for _ in range(evaluations):
            self.evaluation()

    @staticmethod
    def _forward(layers: Sequence[_Layer]) -> None:
        for layer in layers:
            layer.forward()

    @staticmethod
    def _backward(layers: Sequence[_Layer]) -> None:
        for number, layer in reversed(list(enumerate(layers))):
            layer.by_weights()
            if number:
                layer.by_inputs()
