"""What a step on R ranks costs: a model in seven constants, for fitting and for predicting. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Shape:
    """A step's size.

    Attributes:
        parameters: N.
        rows: B, the gradient batch over all ranks.
        curvature_rows: C, over all ranks.
        iterations: ζ, CG iterations; with a warm start they take ζ + 1 products.
        ranks: R.
        width: bytes of a number in messages.
        split: whether vectors are split over ranks.
    """

    parameters: float
    rows: int
    curvature_rows: int
    iterations: int
    ranks: int
    width: int = 4
    split: bool = False

    @property
    def products(self) -> int:
        return self.iterations + 1

    @property
    def evaluations(self) -> int:
        """One per CG iterate; the line search nearly always takes the first."""
        return self.iterations

    def flops(self) -> float:
        """Of one rank with its fair share of rows, for layers whose work is 2 flops per weight and row.

        Objective and gradient are 3 passes of 2N per row, the preconditioner a fourth; the curvature's graphs are 3, each
        product 4; an evaluation is one.
        """
        N, gradient_rows = self.parameters, self.rows / self.ranks
        curvature_rows = self.curvature_rows / self.ranks
        passes = gradient_rows * (4 + self.evaluations) + curvature_rows * (3 + 4 * self.products)
        return 2 * N * passes

    def vector_numbers(self) -> float:
        """Numbers read or written by arithmetic on vectors of θ's size: CG has about 15 per iteration, the rest is 40."""
        held = self.parameters / (self.ranks if self.split else 1)
        return held * (15 * self.iterations + 40)

    def hops(self, *, trees: bool) -> float:
        """Hops that follow one another, all messages together: R - 1 along a ring, ⌈log₂ R⌉ in a tree."""
        if self.ranks == 1:
            return 0.0
        hops = math.ceil(math.log2(self.ranks)) if trees else self.ranks - 1
        return hops * (2 * self._all_reduces() + self._halves() + 2 * self._numbers())

    def bytes_sent(self) -> float:
        """By each rank: a ring all-reduce sends 2 (R-1)/R of the vector, a reduce-scatter or all-gather half of that."""
        share = (self.ranks - 1) / self.ranks
        return share * self.parameters * self.width * (2 * self._all_reduces() + self._halves())

    def _all_reduces(self) -> int:
        return 0 if self.split else 2 + self.products

    def _halves(self) -> int:
        """Reduce-scatters, and all-gathers for products, evaluations and the new θ."""
        return 2 + self.products + self.products + self.evaluations + 1 if self.split else 0

    def _numbers(self) -> int:
        """Messages of a few numbers: the agreement, the objective, evaluations; split, also inner products."""
        return 2 + self.evaluations + (2 * self.iterations + 7 if self.split else 0)


@dataclass(frozen=True)
class Machine:
    """Ranks and what joins them.

    Attributes:
        name: what it is.
        flops: per second and rank, in matrix products.
        numbers: per second and rank, in arithmetic on vectors.
        bandwidth: bytes per second that a rank sends while it receives.
        latency: seconds per hop.
        overhead: seconds per step that do not depend on its size.
        memory: bytes per rank.
        trees: whether messages go along trees (NCCL) or rings (gloo).
    """

    name: str
    flops: float
    numbers: float
    bandwidth: float
    latency: float
    overhead: float = 0.0
    memory: float = math.inf
    trees: bool = False

    def compute_seconds(self, shape: Shape) -> float:
        return self.overhead + shape.flops() / self.flops + shape.vector_numbers() / self.numbers

    def message_seconds(self, shape: Shape) -> float:
        return shape.hops(trees=self.trees) * self.latency + shape.bytes_sent() / self.bandwidth

    def seconds(self, shape: Shape) -> float:
        return self.compute_seconds(shape) + self.message_seconds(shape)

    def efficiency(self, shape: Shape) -> float:
        """Of R ranks against one that does all of the work, were its memory large enough: T(1) / (R T(R))."""
        alone = Shape(shape.parameters, shape.rows, shape.curvature_rows, shape.iterations, 1, shape.width)
        return self.seconds(alone) / (shape.ranks * self.seconds(shape))


def bytes_held(shape: Shape, width: int = 4) -> float:
    """Memory of θ and of the optimizer's vectors on one rank; activations come on top.

    Three vectors are always whole: θ, the vector of a product (or the trial θ), and what the product left. Twelve can be
    split, CG's and what it is given: θ's copy, δ, the start, the gradient and its negative, P⁻¹, x, r, p, Ap, P⁻¹r, and the
    best iterate.
    """
    return shape.parameters * width * (3 + 12 / (shape.ranks if shape.split else 1))


def fit_positive(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative coefficients of seconds ≈ Σ_k c_k columns_k, errors relative to each measurement."""
    measured = np.asarray(seconds, dtype=float)
    table = np.asarray(columns, dtype=float).T / measured[:, None]
    found, _ = nnls(table, np.ones_like(measured))
    return [float(c) for c in found]


def rate(coefficient: float) -> float:
    """Per second, from seconds per unit; no cost is an infinite rate."""
    return 1 / coefficient if coefficient else math.inf
