"""Small networks, data and comparisons that several tests share."""

import copy
import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import hypothesis
import torch
from torch import Tensor, nn

import shf
from shf.lab.clock import Clock
from shf.linear.decay import Decay
from shf.linear.system import LinearSystem
from shf.losses import Loss
from shf.preconditioners import EmpiricalFisher
from shf.problems.batch import BatchProblem
from shf.problems.shared import SharedProblem

# The same examples on every machine, and no deadline: on a busy one a slow example is not a failure.
hypothesis.settings.register_profile("shf", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("shf")


def ticking(pace: float = 1.0) -> Clock:
    """A clock that moves so far whenever one looks: a step is timed by two looks, and takes as long as this."""
    return itertools.count(step=pace).__next__


ROWS, FEATURES, CLASSES = 12, 4, 3


def mlp(
    dropout: float = 0.0, activation: type[nn.Module] = nn.Tanh, dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    """4-6-3; `dropout` > 0 adds it after the hidden layer."""
    layers = [nn.Linear(FEATURES, 6), activation(), nn.Linear(6, CLASSES)]
    if dropout:
        layers.insert(2, nn.Dropout(dropout))
    return nn.Sequential(*layers).to(dtype)


def normalised(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A network whose buffers change in training."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)).to(dtype)


def labelled(rows: int = ROWS, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and class indices."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, FEATURES, generator=source, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(CLASSES, (rows,), generator=source)


def valued(rows: int = ROWS, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and real targets."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, FEATURES, generator=source, dtype=torch.float64)
    return inputs.to(dtype), torch.randn(rows, CLASSES, generator=source, dtype=torch.float64).to(dtype)


def theta(model: nn.Module) -> Tensor:
    """A flat copy of the parameters."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def snapshot(optimizer: shf.SHF) -> dict[str, Any]:
    """Everything that a step may change, copied, with what it must not."""
    model = optimizer.model
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "gradients": [p.grad for p in model.parameters()],
            "flags": [p.requires_grad for p in model.parameters()] + [m.training for m in model.modules()],
            "optimizer": optimizer.state_dict(),
            "generator": torch.get_rng_state(),
            "grad_enabled": torch.is_grad_enabled(),
        }
    )


def identical(a: Any, b: Any) -> bool:
    """Bitwise equality of nested data, types included; a NaN that is no tensor's (λ before it is chosen) equals itself."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(identical, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def assert_close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """The largest difference, relative to the largest entry."""
    found, expected = torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-300)


def overshooting_model():
    """Starts where a Poisson likelihood is nearly flat: a Gauss-Newton step goes much too far."""
    model = nn.Linear(FEATURES, 1).double()
    nn.init.constant_(model.bias, -3.0)
    return model


def counts(seed=0):
    inputs, targets = valued(seed=seed)
    return 0.1 * inputs, targets[:, :1].abs()


class Objective:
    """f on one batch as Algorithm 1 meets it, with a preconditioner and a decay; `options` are those of `BatchProblem`."""

    def __init__(
        self,
        network,
        loss: Loss,
        batch,
        layout,
        *,
        decay: Decay | None = None,
        preconditioner: Any = None,
        **options: Any,
    ) -> None:
        self.part = BatchProblem(network, loss, batch, layout, **options)
        self.problem = SharedProblem(self.part, decay)
        self.preconditioner = EmpiricalFisher() if preconditioner is None else preconditioner
        self.value = self.problem.value

    def expand(self, damping: float) -> SimpleNamespace:
        """f, ∇f and r ↦ P⁻¹r for this λ."""
        found = self.problem.linearise(self.preconditioner)
        return SimpleNamespace(
            value=found.value,
            gradient=found.gradient,
            precondition=found.precondition(damping),
            noise=found.noise,
            decay_step=found.decay_step,
        )

    def curvature(self, damping: float = 0.0) -> LinearSystem:
        return self.problem.system(damping)

    def data_terms(self) -> tuple[float, Tensor, Tensor | None]:
        """L, ∇L and the diagonal of P before damping: everything but the decay."""
        parts = self.part.linearise(self.preconditioner)
        return parts.value, parts.gradient, parts.diagonal
