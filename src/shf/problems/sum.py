"""f, ∇f, B and a diagonal P as weighted sums over terms, each with a batch, a loss and a forward of its own."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shf.errors import NonFiniteError
from shf.losses import Reduction
from shf.model.gaussnewton import GaussNewton
from shf.preconditioners.base import Preparation
from shf.problems.batch import BatchProblem
from shf.problems.part import Parts, Roots


@dataclass(frozen=True)
class SumOfProducts:
    """v ↦ Σ_k w_k (B_k + λμS_k)v. The result is overwritten by the next call."""

    terms: Sequence[tuple[GaussNewton, float]]

    def __call__(self, vector: Tensor) -> Tensor:
        (first, scale), *others = self.terms
        total = first(vector)
        if scale != 1:
            total.mul_(scale)
        for B, weight in others:
            total.add_(B(vector), alpha=weight)
        return total

    def quadratic(self, vector: Tensor) -> float:
        """Σ_k w_k v'(B_k + λμS_k)v."""
        return sum(weight * B.quadratic(vector) for B, weight in self.terms)

    def structural(self, vector: Tensor) -> float:
        """½ λμ Σ_k w_k v'S_k v."""
        return sum(weight * B.structural(vector) for B, weight in self.terms)


class TermsProblem:
    """One process's part of Σ_k w_k L_k(F_k(x_k), t_k).

    A parameter that a term does not use has zeros in that term's gradient, products and diagonal. Buffers are those that
    the first term's pass leaves.

    Args:
        terms: by name, the problem of each term's batch and w_k.

    Attributes:
        parts: the problems and their weights.
        names: of the terms.
        outputs: entries of all terms' outputs on the rows here, once `linearise` has seen them.
    """

    def __init__(self, terms: Mapping[str, tuple[BatchProblem, float]]) -> None:
        self.names: Sequence[str] = tuple(terms)
        self.parts = list(terms.values())
        problems = [part for part, _ in self.parts]
        self.network, self.outputs = problems[0].network, 0
        self.rows, self._total = sum(p.rows for p in problems), sum(p.total for p in problems)
        self.scale = self._total if all(p.loss.reduction is Reduction.SUM for p in problems) else 1
        self.structural = any(p.structural for p in problems)
        self._spare: Tensor | None = None  # for the products of all terms but the first

    @property
    def curvature_share(self) -> float:
        """Curvature rows among all rows of all terms."""
        return sum(part.curvature_share * part.total for part, _ in self.parts) / self._total

    def linearise(self, preparation: Preparation) -> Parts:
        """f, ∇f and the diagonal; what each term has in f."""
        total, values = None, []
        for name, (part, weight) in zip(self.names, self.parts, strict=True):
            with in_term(name):
                found = _scaled(part.linearise(preparation), weight)
            values.append(found.value)
            total = found if total is None else _added(total, found)
        assert total is not None
        self.outputs = sum(part.outputs for part, _ in self.parts)
        return replace(total, value=sum(values), terms=values)

    def curvature(self, damping: float, out: Tensor | None = None) -> SumOfProducts | None:
        """None where no term has curvature rows here."""
        if self._spare is None:
            self._spare = torch.empty_like(self.network.theta())
        found: list[tuple[GaussNewton, float]] = []
        for name, (part, weight) in zip(self.names, self.parts, strict=True):
            with in_term(name):
                B = part.curvature(damping, self._spare if found else out)
            found += [] if B is None else [(B, weight)]
        return SumOfProducts(found) if found else None

    @property
    def size(self) -> tuple[int, int]:
        """Rows of R in `roots`, and parameters."""
        return sum(part.size[0] for part, _ in self.parts), self.network.shapes.total

    @property
    def can_be_written_out(self) -> bool:
        return all(part.can_be_written_out for part, _ in self.parts)

    def roots(self, most: int) -> Roots:
        """B = R'R with the terms' R, each times √w_k, one below the other."""
        found, beside = [], []
        for name, (part, weight) in zip(self.names, self.parts, strict=True):
            with in_term(name):
                roots = part.roots(most)
            found.append((roots, math.sqrt(weight)))
            beside += [] if roots.penalty is None else [weight * roots.penalty]

        def change(delta: Tensor) -> Tensor:
            return torch.cat([root * roots.change(delta) for roots, root in found])

        rows = torch.cat([roots.rows.mul_(root) for roots, root in found])
        residual = torch.cat([root * roots.residual for roots, root in found])
        return Roots(rows, 0.0, residual, torch.stack(beside).sum(0) if beside else None, change)

    def value(self, values: Sequence[Tensor]) -> float:
        return sum(weight * part.value(values) for part, weight in self.parts)


@contextmanager
def in_term(name: str) -> Iterator[None]:
    """Errors say which term they are from."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"term {name!r}: {error}") from error
    except Exception as error:
        error.add_note(f"in term {name!r}")
        raise


def _scaled(parts: Parts, weight: float) -> Parts:
    """Times a term's weight, in place."""
    if weight == 1:
        return parts
    for tensor in (parts.gradient, parts.diagonal, parts.noise):
        if tensor is not None:
            tensor.mul_(weight)
    return replace(parts, value=weight * parts.value)


def _added(total: Parts, other: Parts) -> Parts:
    """In place. A diagonal is there in all or in none; of the noise a term with a single row says nothing."""
    total.gradient.add_(other.gradient)
    if total.diagonal is not None and other.diagonal is not None:
        total.diagonal.add_(other.diagonal)
    if total.noise is None or other.noise is None:
        return replace(total, noise=other.noise if total.noise is None else total.noise)
    total.noise.add_(other.noise)
    return total
