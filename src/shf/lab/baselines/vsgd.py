"""vSGD-fd: learning rates per parameter that set themselves (Schaul & LeCun 2013, after Schaul, Zhang & LeCun 2013).

The rate that minimises the expected loss of one noisy quadratic is η = E[∇]² / (h E[∇²]). Every parameter keeps running
averages of ∇, ∇², h and h², over a memory of τ updates that shrinks while the gradient is consistent and grows when it is
noise. h is the difference of two gradients on the same batch, the second with all parameters shifted by the averaged
gradient, so no second backward pass is needed and any network will do.

The published algorithm averages over the n cases of a batch. Here a whole batch is one draw (n = 1): the variance of its
gradient is the variance that the update has, and per-case gradients are not needed.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shf.component import Component, number, option, whole
from shf.lab.baselines.objective import OnObjective, TrainingObjective
from shf.lab.baselines.protocol import MethodSpec, State, costs, defaults_of


@dataclass(frozen=True, kw_only=True)
class VSGDSettings(Component):
    """What vSGD leaves to choose."""

    slow_start: float = option(
        10.0,
        number(least=1),
        "C, the factor by which the first averages of ∇², h and h² are overestimated, so that rates begin small.",
    )
    first_samples: int = option(10, whole(least=2), "batches that are averaged before the first update.")
    outlier: float = option(
        2.0,
        number(above=0),
        "standard deviations beyond which a gradient or curvature makes its parameter's memory longer.",
    )
    epsilon: float = option(1e-12, number(above=0), "keeps divisions finite where a parameter has no gradient.")


@dataclass
class Averages:
    """Running averages, flat over all parameters.

    Attributes:
        g: of the gradient.
        v: of its square.
        h: of the curvature.
        u: of its square.
        tau: the memory, in updates.
    """

    g: Tensor
    v: Tensor
    h: Tensor
    u: Tensor
    tau: Tensor

    def update_(self, gradient: Tensor, curvature: Tensor, settings: VSGDSettings) -> None:
        """Takes in one sample; where it is an outlier the memory is lengthened first."""
        k = settings.outlier**2
        odd = (gradient - self.g).square() > k * (self.v - self.g.square())
        odd |= (curvature - self.h).square() > k * (self.u - self.h.square())
        self.tau += odd
        self.take_(gradient, curvature, 1.0 / self.tau)

    def take_(self, gradient: Tensor, curvature: Tensor, weight: Tensor | float) -> None:
        """Moves every average towards the sample by a share of the way."""
        for mean, sample in ((self.g, gradient), (self.h, curvature)):
            mean.lerp_(sample, weight)
        for mean, sample in ((self.v, gradient), (self.u, curvature)):
            mean.lerp_(sample.square(), weight)

    def consistency(self, epsilon: float) -> Tensor:
        """g²/v in [0, 1]: 1 where all gradients agree, 0 where they are noise."""
        return self.g.square() / (self.v + epsilon)

    def rates(self, epsilon: float) -> Tensor:
        """η = (h/u) · g²/v."""
        return self.h / (self.u + epsilon) * self.consistency(epsilon)

    def forget_(self, epsilon: float) -> None:
        """τ ← (1 - g²/v) τ + 1."""
        self.tau.mul_(1.0 - self.consistency(epsilon)).add_(1.0)


class VSGD(OnObjective):
    """θ ← θ - η ∇f with η from the running averages; two gradients per step, on the same batch and masks."""

    def __init__(self, objective: TrainingObjective, settings: VSGDSettings) -> None:
        super().__init__(objective)
        self.settings = settings
        zero = torch.zeros_like(parameters_to_vector(objective.parameters).detach())
        self.averages = Averages(zero, zero.clone(), zero.clone(), zero.clone(), torch.ones_like(zero))
        self.samples = 0

    @torch.no_grad()
    def step(self, inputs: Any, targets: Any) -> dict[str, float]:
        f, gradient = self.objective.flat_gradient(inputs, targets)
        shift = self.averages.g if self.samples else gradient
        curvature = self._curvature(inputs, targets, gradient, shift)
        self.samples += 1
        if self.samples <= self.settings.first_samples:
            self._begin(gradient, curvature)
            return {"objective": f, "learning_rate": 0.0, **costs(gradients=2)}
        averages, epsilon = self.averages, self.settings.epsilon
        averages.update_(gradient, curvature, self.settings)
        rates = averages.rates(epsilon)
        averages.forget_(epsilon)
        theta = parameters_to_vector(self.objective.parameters)
        vector_to_parameters(theta - rates * gradient, self.objective.parameters)
        return {"objective": f, "learning_rate": rates.mean().item(), **costs(gradients=2)}

    def _begin(self, gradient: Tensor, curvature: Tensor) -> None:
        """Plain means over the first samples; the last of them turns on the overestimate."""
        n, averages = self.samples, self.averages
        averages.take_(gradient, curvature, 1.0 / n)
        if n == self.settings.first_samples:
            averages.v.mul_(self.settings.slow_start)
            averages.h.mul_(self.settings.slow_start)
            averages.u.mul_(self.settings.slow_start**2)
            averages.tau.fill_(n)

    def _curvature(self, inputs: Any, targets: Any, gradient: Tensor, shift: Tensor) -> Tensor:
        """|∇f(θ + shift) - ∇f(θ)| / |shift|, elementwise."""
        theta = parameters_to_vector(self.objective.parameters)
        vector_to_parameters(theta + shift, self.objective.parameters)
        try:
            _, shifted = self.objective.flat_gradient(inputs, targets, replay=True)
        finally:
            vector_to_parameters(theta, self.objective.parameters)
        return (shifted - gradient).abs() / shift.abs().clamp_min(self.settings.epsilon)

    def state_dict(self) -> State:
        return copy.deepcopy({**vars(self.averages), "samples": self.samples, "stream": self.objective.stream})

    def load_state_dict(self, state: State) -> None:
        state = copy.deepcopy(state)
        self.samples, self.objective.stream = state.pop("samples"), state.pop("stream")
        self.averages = Averages(**state)


SPECS: tuple[MethodSpec, ...] = (
    MethodSpec(
        "vsgd",
        "vSGD-fd, learning rates that set themselves (Schaul & LeCun)",
        lambda model, loss, s: VSGD(TrainingObjective.of(model, loss, s), VSGDSettings.from_flat("vsgd", s)),
        defaults_of(VSGDSettings),
        {"slow_start": (2.0, 10.0, 100.0)},
        batch=200,
        checks_itself=True,
    ),
)
