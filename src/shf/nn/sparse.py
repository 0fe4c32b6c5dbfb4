"""A first layer that takes a sparse CSR batch and never makes it dense: products, gradients, dropout, preconditioner.

Reuters is 0.25 % dense. One kernel does everything, M D for a sparse M and a dense D: every row of the result is a
weighted sum of rows of D. It is linear in D with adjoint Mᵀ, so the same function is its own derivative to any order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag


@dataclass(frozen=True, eq=False)
class CSR:
    """The three arrays of a sparse matrix of shape (m, n)."""

    starts: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Tensor) -> "CSR":
        return cls(matrix.crow_indices(), matrix.col_indices(), matrix.values(), (matrix.shape[0], matrix.shape[1]))

    def to_tensor(self) -> Tensor:
        return torch.sparse_csr_tensor(self.starts, self.columns, self.values, size=self.shape, check_invariants=False)

    @property
    def rows(self) -> Tensor:
        """The row number of every stored value."""
        numbers = torch.arange(self.shape[0], device=self.columns.device)
        return numbers.repeat_interleave(self.starts.diff(), output_size=len(self.columns))

    @cached_property
    def T(self) -> "CSR":
        """The transpose, made once (by the first backward pass) and kept."""
        order = torch.argsort(self.columns, stable=True)
        counts = torch.bincount(self.columns, minlength=self.shape[1])
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(self.starts.dtype)
        rows = self.rows[order].to(self.columns.dtype)
        return CSR(starts, rows, self.values[order], self.shape[::-1])

    def map(self, function: Callable[[Tensor], Tensor]) -> "CSR":
        """The same pattern with other stored values."""
        return CSR(self.starts, self.columns, function(self.values), self.shape)

    def product(self, dense: Tensor) -> Tensor:
        """M D without autograd, D of shape (n, k)."""
        if dense.dtype != self.values.dtype:
            raise TypeError(
                f"sparse inputs are {self.values.dtype} but the layer's weights are {dense.dtype}: convert one of them"
            )
        with torch.no_grad():
            return embedding_bag(
                self.columns,
                dense.contiguous(),
                self.starts,
                mode="sum",
                per_sample_weights=self.values,
                include_last_offset=True,
            )


class _Product(torch.autograd.Function):
    """M D, or Mᵀ D if `adjoint`; backward is the other of the two, so double backward and all beyond come for free."""

    @staticmethod
    def forward(matrix: CSR, adjoint: bool, dense: Tensor) -> Tensor:
        return (matrix.T if adjoint else matrix).product(dense)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[CSR, bool, Tensor], output: Tensor) -> None:
        ctx.matrix, ctx.adjoint, _ = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, multiply(ctx.matrix, gradient, adjoint=not ctx.adjoint)

    @staticmethod
    def jvp(ctx: Any, _matrix: None, _adjoint: None, tangent: Tensor) -> Tensor:
        return multiply(ctx.matrix, tangent, adjoint=ctx.adjoint)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[None, None, int], matrix: CSR, adjoint: bool, dense: Tensor
    ) -> tuple[Tensor, int]:
        """b matrices D at once are one matrix with b times the columns."""
        stacked = dense.movedim(in_dims[2], 1)
        result = multiply(matrix, stacked.flatten(1), adjoint=adjoint)
        return result.view(len(result), *stacked.shape[1:]), 1


def multiply(matrix: CSR, dense: Tensor, *, adjoint: bool = False) -> Tensor:
    """M D (or Mᵀ D), differentiable in D to any order, in reverse and in forward mode, and under `torch.func.vmap`."""
    result: Tensor = _Product.apply(matrix, adjoint, dense)  # type: ignore[no-untyped-call]
    return result


class SparseLinear(nn.Module):
    """z = X W + b for a CSR batch X (a dense one works too).

    The weight is stored input-major, (in_features, out_features) as in `nn.EmbeddingBag` and unlike `nn.Linear`: a
    stored value then reads or writes one contiguous row of W, several times faster than a column of a wide matrix.
    """

    input_major = True  # for `max_norm`: the units are W's columns

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The uniform ±1/√n_in of `nn.Linear`."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.layout == torch.sparse_csr:
            return multiply(CSR.of(inputs), self.weight) + self.bias
        return inputs @ self.weight + self.bias

    def per_case_squares(self, inputs: Tensor, output_gradients: Tensor) -> dict[str, Tensor]:
        """Σ_j (∇L_j)² of weight and bias: (X∘X)ᵀ (G∘G) and the column sums of G∘G, with G = ∂L_j/∂z_j in row j."""
        squares = output_gradients.square()
        if inputs.layout == torch.sparse_csr:
            weight = CSR.of(inputs).map(torch.square).T.product(squares)
        else:
            weight = inputs.square().T @ squares
        return {"weight": weight, "bias": squares.sum(0)}

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class SparseDropout(nn.Module):
    """Dropout of a CSR batch: only stored values are touched, the zeros of the data are zero anyway.

    The random draw is one number per case, and the mask of a case is a hash of that number and the column. So a case
    keeps its mask when rows are selected, which a draw per stored value (not a number of rows) could not promise.

    Args:
        p: the probability of dropping a value.
        training_scale: factor on what is kept in training: 1 in the paper's convention, 1/(1-p) in torch's.
        evaluation_scale: factor in evaluation: 1-p in the paper's convention, 1 in torch's.
    """

    def __init__(self, p: float, *, training_scale: float, evaluation_scale: float) -> None:
        super().__init__()
        self.p, self.training_scale, self.evaluation_scale = p, training_scale, evaluation_scale

    def forward(self, inputs: Tensor) -> Tensor:
        matrix = CSR.of(inputs)
        if not self.training:
            return matrix.map(lambda values: values * self.evaluation_scale).to_tensor()
        draw = torch.empty((matrix.shape[0], 1), dtype=torch.float64, device=inputs.device).uniform_()
        kept = _uniform_hash(draw[:, 0][matrix.rows], matrix.columns) < 1.0 - self.p
        return matrix.map(lambda values: values * kept * self.training_scale).to_tensor()

    def extra_repr(self) -> str:
        return f"p={self.p}, training_scale={self.training_scale}, evaluation_scale={self.evaluation_scale}"


# Odd 64-bit constants of the splitmix64 generator, written as the signed integers that torch multiplies modulo 2^64.
_STEP, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _uniform_hash(seeds: Tensor, columns: Tensor) -> Tensor:
    """A number in [0, 1) for each pair of a seed in [0, 1) and a column: splitmix64 started at the seed's 53 bits."""
    z = (seeds * 2.0**53).long() * _MIX_2 + (columns.long() + 1) * _STEP
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) shift to the right of 64-bit integers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
