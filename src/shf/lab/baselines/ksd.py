"""Krylov subspace descent (Vinyals & Povey 2012): a small subspace from curvature, BFGS inside it, no damping.

One iteration, over three sets of cases: the gradient g and the diagonal D of the empirical Fisher matrix over all of the
data; the subspace spanned by D⁻¹g, (D⁻¹B)D⁻¹g, … with products on one batch, and by the previous direction; and BFGS over
its coefficients on another batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.optimize
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

import shf
from shf.component import Component, number, option, whole
from shf.data.batches import Batch
from shf.data.draws import mix, preserved_global_state
from shf.lab.baselines.objective import OnObjective, TrainingObjective
from shf.lab.baselines.protocol import MethodSpec, costs, defaults_of
from shf.linear.cg import LinearMap
from shf.losses import Loss as CoreLoss
from shf.model.network import Network
from shf.preconditioners import EmpiricalFisher
from shf.probing.layout import find_layout
from shf.problems.batch import BatchProblem
from shf.runtime.context import twice_differentiable_kernels

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class KSDSettings(Component):
    """What KSD leaves to choose."""

    dimensions: int = option(20, whole(least=1), "K, of the Krylov subspace; the previous direction comes on top.")
    floor: float = option(
        1e-4,
        number(above=0, below=1),
        "ε: entries of D and eigenvalues of the subspace's curvature are at least ε times the largest.",
    )
    bfgs_iterations: int = option(20, whole(least=1), "at most so many in one step.")


@dataclass(frozen=True)
class Subspace:
    """An orthonormal basis V, (k, n), and the curvature V B V' in it, (k, k)."""

    basis: Tensor
    curvature: Tensor

    @property
    def products(self) -> int:
        return len(self.basis)


@torch.no_grad()
def krylov_subspace(
    product: LinearMap, gradient: Tensor, diagonal: Tensor, dimensions: int, previous: Tensor | None
) -> Subspace:
    """The span of (D⁻¹B)^i D⁻¹g for i < K and of the previous direction, orthonormalised in this order.

    It is smaller where a vector depends on those before it: the Krylov space is exhausted then.

    Args:
        product: v ↦ Bv.
        gradient: g.
        diagonal: D.
        dimensions: K.
        previous: the direction of the last step, None before the first.
    """
    basis: list[Tensor] = []
    images: list[Tensor] = []
    candidate: Tensor | None = gradient / diagonal
    while candidate is not None:
        v = _orthonormal(candidate, basis)
        if v is not None:
            basis.append(v)
            images.append(product(v))
        if v is not None and len(basis) < dimensions:
            candidate = images[-1] / diagonal
        else:
            candidate, previous = previous, None
    V, W = torch.stack(basis), torch.stack(images)
    H = (V @ W.T).double()
    return Subspace(V, 0.5 * (H + H.T))


def _orthonormal(u: Tensor, basis: list[Tensor]) -> Tensor | None:
    """u without its components along the basis, with length 1; None if nothing but rounding is left of it.

    Projected twice: once is not enough in float32 for nearly dependent vectors.
    """
    size = torch.linalg.vector_norm(u)
    for _ in range(2):
        for v in basis:
            u = u - torch.dot(u, v) * v
    left = torch.linalg.vector_norm(u)
    return None if left <= 1e-4 * size else u / left


def minimise(
    function: Callable[[Vector], tuple[float, Vector]], curvature: Tensor, *, floor: float, iterations: int
) -> Vector:
    """Coefficients a that (nearly) minimise a function of few variables, by BFGS from a = 0.

    The coordinates are t = C'a with CC' = H, the curvature with its eigenvalues floored, so that BFGS starts with a matrix
    that is right if H is: its first step is Newton's. If BFGS does not get below f(0), a = 0.
    """
    eigenvalues, U = np.linalg.eigh(curvature.numpy())
    top = eigenvalues[-1]
    scales = np.sqrt(np.maximum(eigenvalues, floor * top)) if top > 0 else np.ones_like(eigenvalues)
    to_a = U / scales  # a = U diag(λ)^(-1/2) t: a square root of H⁻¹ serves as well as Cholesky's

    def scaled(t: Vector) -> tuple[float, Vector]:
        f, gradient = function(to_a @ t)
        return (f, to_a.T @ gradient) if np.isfinite(f) else (np.inf, np.zeros_like(t))

    start = np.zeros(len(curvature))
    found = scipy.optimize.minimize(scaled, start, jac=True, method="BFGS", options={"maxiter": iterations})
    better = np.isfinite(found.x).all() and found.fun < function(start)[0]
    best: Vector = to_a @ found.x if better else start
    return best


class KSD(OnObjective):
    """Krylov subspace descent on all batches of a data set.

    The Krylov batch of iteration k is batch k of the data, the BFGS batch the one after it. With dropout each set of cases
    has masks of its own, drawn once per iteration.
    """

    remembered = ("previous", "iteration")

    def __init__(self, objective: TrainingObjective, settings: KSDSettings, *, seed: int) -> None:
        super().__init__(objective)
        self.settings, self.seed = settings, seed
        self.network = Network(objective.model, objective.parameters)
        self.loss = CoreLoss(objective.loss)
        self.previous: Tensor | None = None
        self.iteration = 0

    @torch.no_grad()
    def step(self, inputs: Iterable[tuple[Any, Any]], targets: Any = None) -> dict[str, float]:
        theta = self.network.theta()
        f, g, D, count = self._expand(inputs, theta)
        k, settings = self.iteration, self.settings
        subspace = krylov_subspace(self._product(_nth(inputs, k % count)), g, D, settings.dimensions, self.previous)
        batch, evaluations = _nth(inputs, (k + 1) % count), 0

        def on_batch(a: Vector) -> tuple[float, Vector]:
            nonlocal evaluations
            point = theta + torch.from_numpy(a).to(theta) @ subspace.basis
            self._assign(point)
            value, gradient = self.objective.flat_gradient(*batch, replay=evaluations > 0)
            evaluations += 1
            return value, (subspace.basis @ gradient).double().numpy()

        try:
            a = minimise(on_batch, subspace.curvature, floor=settings.floor, iterations=settings.bfgs_iterations)
        finally:
            self._assign(theta)
        direction = torch.from_numpy(a).to(theta) @ subspace.basis
        self._assign(theta + direction)
        self.previous = direction if bool(direction.any()) else None
        self.iteration += 1
        account = costs(gradients=count + evaluations, products=subspace.products)
        return {"objective": f, "dimensions": float(len(subspace.basis)), **account}

    def _expand(self, batches: Iterable[tuple[Any, Any]], theta: Tensor) -> tuple[float, Tensor, Tensor, int]:
        """f, g and D on all of the data, and the number of batches. Means over cases, decay included."""
        value, rows, count = 0.0, 0, 0
        gradient, diagonal = torch.zeros_like(theta), torch.zeros_like(theta)
        with preserved_global_state(), torch.enable_grad(), twice_differentiable_kernels(theta.device):
            for inputs, targets in batches:
                batch, seed = Batch.of(inputs, targets), mix(self.seed, self.iteration, count)
                layout = find_layout(self.network, batch, seed)
                found = BatchProblem(self.network, self.loss, batch, layout, seed=seed).linearise(EmpiricalFisher())
                f, g, d = found.value, found.gradient, found.diagonal
                assert d is not None
                value, rows, count = value + batch.rows * f, rows + batch.rows, count + 1
                gradient.add_(g, alpha=batch.rows)
                diagonal.add_(d, alpha=batch.rows)
        if not rows:
            raise ValueError("there are no batches: expected a re-iterable of (inputs, targets) with at least one pair")
        decay = self._decay()
        value = value / rows + 0.5 * torch.dot(decay * theta, theta).item()
        diagonal /= rows
        floor = self.settings.floor * diagonal.max().clamp_min(torch.finfo(theta.dtype).tiny)
        return value, gradient / rows + decay * theta, diagonal.clamp_min_(floor), count

    def _product(self, batch: tuple[Any, Any]) -> LinearMap:
        """v ↦ Bv on one batch, decay included."""
        seed, decay = mix(self.seed, self.iteration, -1), self._decay()
        inner = shf.gauss_newton_product(
            self.objective.model, self.objective.loss, *batch, params=self.objective.parameters, seed=seed
        )
        return lambda v: inner(v).addcmul_(decay, v)

    def _decay(self) -> Tensor:
        w = self.objective.weight_decay
        return torch.cat([torch.full_like(p, w if p.ndim >= 2 else 0.0).flatten() for p in self.objective.parameters])

    def _assign(self, theta: Tensor) -> None:
        vector_to_parameters(theta, self.objective.parameters)


def _nth(batches: Iterable[tuple[Any, Any]], n: int) -> tuple[Any, Any]:
    return next(islice(batches, n, None))


SPECS: tuple[MethodSpec, ...] = (
    MethodSpec(
        "ksd",
        "Krylov subspace descent (Vinyals & Povey): BFGS in a subspace from curvature products",
        lambda m, loss, s: KSD(TrainingObjective.of(m, loss, s), KSDSettings.from_flat("ksd", s), seed=s["seed"]),
        defaults_of(KSDSettings),
        reads_batches=True,
        checks_itself=True,
    ),
)
