"""Preconditioned conjugate gradients over callables; knows nothing of networks.

Minimises q(x) = ½ x'Ax - b'x for symmetric positive definite A, given only v ↦ Av (§3 of the paper; Martens 2010).
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shf.linear.flat import Dots, inner_products

LinearMap = Callable[[Tensor], Tensor]
"""A map of flat vectors. It may hand out the same buffer at every call, and product and preconditioner may share one: CG
reads a result before it asks either for the next."""


class Visit(Protocol):
    """Sees an iterate: its number, x, q(x), and f there where it is known. The next iteration overwrites x. The maps'
    results are not needed then: a visit may overwrite them."""

    def __call__(self, number: int, x: Tensor, q: float, value: float | None = None, /) -> None: ...


class CGStop(enum.Enum):
    """Why conjugate gradients ended."""

    ITERATIONS = "all iterations done"
    """The usual end."""
    PROGRESS = "a further iteration would gain too little"
    """By the rule of `HF`, or by `cg_worth`."""
    ZERO_RESIDUAL = "the residual is zero: the system is solved"
    """There is nothing left to gain."""
    NON_POSITIVE_CURVATURE = "p'Ap is not positive"
    """By rounding; the iterates so far count."""
    NON_FINITE = "a number was not finite"
    """An overflow; the iterates before it count."""


@dataclass(frozen=True)
class CGResult:
    """What a run of CG leaves behind.

    Attributes:
        iterates: the iterates that were kept, oldest first, each a flat vector of its own; none if they were handed to
            a visitor instead.
        numbers: for each kept iterate its 1-based iteration number.
        values: for each kept iterate q(x) = ½ x'Ax - b'x, from CG's own scalars: it costs no product.
        last: the final x, also where nothing was kept (then it is the start).
        steps: iterations completed.
        products: applications of A, the one for a non-zero start included.
        stop: why it ended.
    """

    iterates: Sequence[Tensor]
    numbers: Sequence[int]
    values: Sequence[float]
    last: Tensor
    steps: int
    products: int
    stop: CGStop


def identity(vector: Tensor) -> Tensor:
    """The preconditioner that does nothing."""
    return vector


def keep_all(number: int) -> bool:
    """Keep every iterate (§4.1: runs are short, so all of them take part in backtracking)."""
    return True


def keep_last(number: int) -> bool:
    """Keep none but the final one, which always is."""
    return False


def never(values: Sequence[float]) -> bool:
    """Run to the iteration limit."""
    return False


@torch.no_grad()
def conjugate_gradient(
    product: LinearMap,
    rhs: Tensor,
    *,
    iterations: int,
    start: Tensor | None = None,
    out: Tensor | None = None,
    precondition: LinearMap = identity,
    keep: Callable[[int], bool] = keep_all,
    visit: Visit | None = None,
    stop: Callable[[Sequence[float]], bool] = never,
    dots: Dots = inner_products,
    quadratic: Callable[[Tensor], float] | None = None,
) -> CGResult:
    """Solves A x = b by preconditioned conjugate gradients.

    With r = Ax - b and y = P⁻¹r, each iteration does

        α = r'y / p'Ap,   x ← x - αp,   r ← r - αAp,   β = r₊'y₊ / r'y,   p ← y₊ + βp,

    and q falls by ½ α r'y. No vector is made in the loop but the iterates that are kept.

    Args:
        product: v ↦ Av, A symmetric positive (semi)definite.
        rhs: b, a flat vector.
        iterations: the most iterations to do (the paper's ζ).
        start: x at the beginning; zero by default, which also saves a product.
        out: where x is kept; it may be `start` itself, which saves a vector.
        precondition: r ↦ P⁻¹r, P symmetric positive definite.
        keep: which iterates to keep, by 1-based number. The final one is always kept.
        visit: is handed the iterates to keep as they are made, instead of their being copied.
        stop: sees q at the start and after every iteration; true ends the run.
        dots: the inner products of pairs of vectors, where each is but a part of a longer one.
        quadratic: v ↦ v'Av where that is cheaper than a product: the last iteration needs no more.

    Returns:
        The kept iterates with their q, and why the run ended. A scalar that is not finite or p'Ap ≤ 0 ends it *before*
        x is touched; an iterate has infinite entries only where x itself is beyond the largest number.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
        >>> conjugate_gradient(A.mv, torch.ones(3), iterations=3).last
        tensor([1.0000, 0.5000, 0.2500])
    """
    largest = torch.finfo(rhs.dtype).max  # CG's scalars are doubles; beyond it torch raises
    x = torch.empty_like(rhs) if out is None else out
    if start is None:
        x.zero_()
        r, products = rhs.neg(), 0
    else:
        r, products = product(start) - rhs, 1
        x.copy_(start)

    iterates: list[Tensor] = []
    numbers: list[int] = []
    values: list[float] = []
    y = precondition(r)
    if start is None:
        q, (ry,) = 0.0, dots((r, y))
    else:
        xr, xb, ry = dots((x, r), (x, rhs), (r, y))
        q = 0.5 * (xr - xb)  # ½ x'Ax - b'x = ½ x'(r - b), since Ax = r + b
    history = [q]

    def take(number: int, *, final: bool = False) -> None:
        numbers.append(number)
        values.append(history[-1])
        if visit is None:
            iterates.append(x if final else x.clone())
        else:
            visit(number, x, history[-1])

    def finish(steps: int, reason: CGStop) -> CGResult:
        if steps and (not numbers or numbers[-1] != steps):
            take(steps, final=True)
        return CGResult(iterates, numbers, values, x, steps, products, reason)

    p = y.clone()
    zero = torch.finfo(rhs.dtype).tiny / torch.finfo(rhs.dtype).eps  # where scalars lose their digits x would run away
    for number in range(1, iterations + 1):
        if abs(ry) <= zero:
            return finish(number - 1, CGStop.ZERO_RESIDUAL)
        last = number == iterations  # r, y and p are for an iteration that follows
        if last and quadratic is not None:
            pAp = quadratic(p)
        else:
            Ap = product(p)
            (pAp,) = dots((p, Ap))
        products += 1
        if not math.isfinite(pAp) or not math.isfinite(ry):
            return finish(number - 1, CGStop.NON_FINITE)
        if pAp <= 0:
            return finish(number - 1, CGStop.NON_POSITIVE_CURVATURE)
        alpha = ry / pAp
        if abs(alpha) > largest:
            return finish(number - 1, CGStop.NON_FINITE)
        ry_next = 0.0
        if not last:
            r.sub_(Ap, alpha=alpha)
            y = precondition(r)
            (ry_next,) = dots((r, y))
        value = history[-1] - 0.5 * alpha * ry
        if not (math.isfinite(ry_next) and math.isfinite(value)):
            return finish(number - 1, CGStop.NON_FINITE)
        x.sub_(p, alpha=alpha)
        history.append(value)
        beta = ry_next / ry
        if not last and abs(beta) <= largest:
            torch.add(y, p, alpha=beta, out=p)
        if keep(number):
            take(number)
        if stop(history):
            return finish(number, CGStop.PROGRESS)
        if abs(beta) > largest:
            return finish(number, CGStop.NON_FINITE)
        ry = ry_next
    return finish(iterations, CGStop.ITERATIONS)
