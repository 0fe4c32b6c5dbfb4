"""(B + λI)⁻¹ b for many λ, from the smaller of R'R + W and RR', and the λ at which it has a given length.

In the space of rows, where w is the same for all parameters, d = λ + w and b = R'r + p, the solution is

    p/d + R'y,   y = (RR' + dI)⁻¹ (r - Rp/d).

Of R'r no number is divided by λ alone, so that λ may be as small as rounding allows.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shf.linear.roots import Roots, cholesky, gram

_LEAST = 1e-17
"""The smallest λ, in largest eigenvalues of B: below it rounding alone decides."""


@dataclass(frozen=True)
class Coordinates:
    """A right-hand side b = R'r + p: by parameters b, by rows r, p and Rp; b, r and Rp in the basis that a side works in."""

    own: Tensor
    penalty: Tensor | None = None
    across: Tensor | None = None

    def right(self, d: float) -> Tensor:
        """Of the system that is solved: b, or r - Rp/d."""
        return self.own if self.across is None else self.own - self.across / d

    @cached_property
    def near(self) -> "Coordinates":
        """Its numbers where the CPU has them, with p'p in place of p: a search asks for many lengths."""
        if self.across is None or self.penalty is None:
            return Coordinates(self.own.cpu())
        return Coordinates(self.own.cpu(), torch.dot(self.penalty, self.penalty).cpu(), self.across.cpu())


class Side(ABC):
    """A matrix of the smaller size.

    Attributes:
        largest: B's largest eigenvalue, or a number from below that is not far from it.
        least: the smallest λ at which a solution means something.
    """

    largest: float
    least: float

    def __init__(self, roots: Roots) -> None:
        self.roots, self.wide = roots, by_rows(roots)
        self.shift = float(roots.weights) if self.wide else 0.0

    def of_rows(self, residual: Tensor, penalty: Tensor | None = None) -> Coordinates:
        """Of R'r + p, for `solve`."""
        if not self.wide:
            b = self.roots.rows.t() @ residual
            return Coordinates(self.into(b if penalty is None else b + penalty))
        own = self.into(residual)
        return Coordinates(own) if penalty is None else Coordinates(own, penalty, self.into(self.roots.rows @ penalty))

    def solve(self, b: Coordinates, damping: float) -> Tensor:
        """(B + λI)⁻¹ b."""
        d = damping + self.shift
        part = self.inverse(b.right(d), d)
        if not self.wide:
            return part
        found = self.roots.rows.t() @ part
        return found if b.penalty is None else found.add_(b.penalty, alpha=1 / d)

    @abstractmethod
    def into(self, vector: Tensor) -> Tensor:
        """A vector in the basis that is worked in."""

    @abstractmethod
    def inverse(self, right: Tensor, d: float) -> Tensor:
        """(matrix + dI)⁻¹ of a vector in that basis, out of it."""

    @abstractmethod
    def damping(self, b: Coordinates, length: float, near: float) -> float:
        """λ with ‖(B + λI)⁻¹ b‖ = length, from one that is near; the least where the whole solution is shorter."""


class Eigenvectors(Side):
    """One decomposition serves every λ: the matrix is V diag(s) V'."""

    def __init__(self, roots: Roots, matrix: Tensor) -> None:
        super().__init__(roots)
        values: Tensor
        self.vectors: Tensor
        values, self.vectors = torch.linalg.eigh(matrix)
        self.values = values.clamp_min_(0)
        self._spectrum = self.values.cpu()
        self.largest = float(self._spectrum[-1]) + self.shift
        self.least = max(_LEAST * self.largest, torch.finfo(values.dtype).tiny)

    def into(self, vector: Tensor) -> Tensor:
        return self.vectors.t() @ vector

    def inverse(self, right: Tensor, d: float) -> Tensor:
        return self.vectors @ (right / (self.values + d))

    def damping(self, b: Coordinates, length: float, near: float) -> float:
        """By bisection of λ's logarithm."""
        low = self.least
        if self._length(b.near, low) <= length:
            return low
        high = 10 * max(self.largest, low)
        while self._length(b.near, high) > length:
            high *= 100
        while high > 1.001 * low:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._length(b.near, middle) > length else (low, middle)
        return high

    def _length(self, b: Coordinates, damping: float) -> float:
        s, d = self._spectrum, damping + self.shift
        y = b.right(d) / (s + d)
        found = torch.linalg.vector_norm(y * s.sqrt() if self.wide else y)
        if b.across is None or b.penalty is None:
            return float(found)
        square = found.square() + 2 / d * torch.dot(b.across, y) + b.penalty / d**2
        return float(square.clamp_min(0).sqrt())


class Factors(Side):
    """A Cholesky factorisation for each λ that is tried: of a large matrix a small part of what its eigenvectors cost."""

    def __init__(self, roots: Roots, matrix: Tensor) -> None:
        super().__init__(roots)
        self._matrix, self._root, self._known = matrix, matrix, math.nan
        self.largest = _largest(matrix) + self.shift
        self.least = _sound(matrix)

    def into(self, vector: Tensor) -> Tensor:
        return vector

    def inverse(self, right: Tensor, d: float) -> Tensor:
        if d != self._known:
            damped = self._matrix.clone()
            damped.diagonal().add_(d)
            self._root, self._known = cholesky(damped), d
        return torch.cholesky_solve(right[:, None], self._root)[:, 0]

    def damping(self, b: Coordinates, length: float, near: float) -> float:
        """By secants of log ‖δ‖ over log λ, within what is known to be too long and too short, to a tenth of the length."""
        lam, slope, last, low, high = max(near, self.least), -0.5, None, self.least, math.inf
        for _ in range(_SECANTS):
            off = math.log(max(torch.linalg.vector_norm(self.solve(b, lam)).item(), _TINY) / length)
            if abs(off) < _CLOSE or (off < 0 and lam <= self.least):
                break
            low, high = (lam, high) if off > 0 else (low, lam)
            if last is not None:
                slope = min(max((off - last[1]) / math.log(lam / last[0]), -1.0), _FLAT)
            last, lam = (lam, off), lam * math.exp(min(max(-off / slope, -_LEAP), _LEAP))
            if lam >= high or self.least < low >= lam:
                lam = math.sqrt(low * high)
            lam = max(lam, self.least)
        return lam


_SECANTS, _CLOSE, _LEAP = 20, 0.1, 7.0
_FLAT, _TINY = -0.05, 1e-300
"""The least slope that is believed, and a length that is not zero."""


def by_rows(roots: Roots) -> bool:
    """Whether the space of rows is the smaller one, and w is the same for all parameters."""
    return roots.wide and not isinstance(roots.weights, Tensor)


def smaller_side(roots: Roots, near: float = 0.0) -> Side:
    """RR' or R'R + W, ready for solutions with λ that are not far from `near`, 0 if nobody knows: by eigenvectors where the
    matrix is small or λ is near rounding, else by factorisations."""
    wide = by_rows(roots)
    matrix = gram(roots.rows if wide else roots.rows.t())
    if not wide:
        matrix.diagonal().add_(roots.weights)
    if len(matrix) < _LARGE or 0 < near < _ROOM * _sound(matrix):
        return Eigenvectors(roots, matrix)
    return Factors(roots, matrix)


_LARGE = 1536
"""The size from which on eigenvectors take longer than the handful of factorisations of a step."""
_ROOM = 3.0
"""How far above the least λ of a factorisation the last one must have been."""


def _largest(matrix: Tensor) -> float:
    """A bound from below of the largest eigenvalue."""
    return matrix.diagonal().max().item()


def _sound(matrix: Tensor) -> float:
    """The λ from which on a Cholesky factorisation means something beside rounding."""
    return 10 * len(matrix) * torch.finfo(matrix.dtype).eps * _largest(matrix)
