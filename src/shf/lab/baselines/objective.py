"""The training objective of the first-order methods: f(θ) = mean loss + ½ w ‖θ_W‖², with random draws of its own."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from shf.data.batches import count_rows
from shf.lab.baselines.protocol import Loss, Settings, State
from shf.model.network import call_model


class TrainingObjective:
    """f on a batch, or on all batches of a data set, at the model's present parameters.

    Dropout draws come from a stream that belongs to the method: torch's global (CPU) generator is neither read nor moved,
    and the stream is part of the method's state.

    Args:
        model: the network, in the mode its owner has set.
        loss: mean over the rows of a batch.
        weight_decay: w, on parameters with two or more axes (weights, not biases).
        seed: of the stream of random draws.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, weight_decay: float = 0.0, seed: int = 0) -> None:
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay={weight_decay}: must be at least 0")
        self.model, self.loss, self.weight_decay = model, loss, weight_decay
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError(f"{type(model).__name__} has no trainable parameters")
        self.stream = self._began = torch.Generator().manual_seed(seed).get_state()

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, settings: Settings) -> Self:
        """With the weight decay and the seed that a method's settings have."""
        return cls(model, loss, weight_decay=settings["weight_decay"], seed=settings["seed"])

    def value(self, inputs: Any, targets: Any) -> Tensor:
        """f on one batch, differentiable. Draws from the global generator: call it inside `draws`."""
        f: Tensor = self.loss(call_model(self.model, inputs), targets)
        return f + self.penalty() if self.weight_decay else f

    def penalty(self) -> Tensor:
        """½ w ‖θ_W‖²."""
        squares = [p.square().sum() for p in self.parameters if p.ndim >= 2]
        return 0.5 * self.weight_decay * torch.stack(squares).sum()

    def gradient(self, inputs: Any, targets: Any, *, replay: bool = False) -> tuple[float, list[Tensor]]:
        """f and ∇f on one batch; with `replay` it sees the same random draws as the call before."""
        with torch.enable_grad(), self.draws(replay=replay):
            f = self.value(inputs, targets)
        return f.item(), _gradients(f, self.parameters)

    def flat_gradient(self, inputs: Any, targets: Any, *, replay: bool = False) -> tuple[float, Tensor]:
        """The same with ∇f as one vector."""
        f, gradients = self.gradient(inputs, targets, replay=replay)
        return f, parameters_to_vector(gradients)

    def backward(self, inputs: Any, targets: Any) -> float:
        """f on one batch, leaving ∇f in the parameters' `.grad`, where torch's optimizers look for it."""
        f, gradients = self.gradient(inputs, targets)
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        return f

    def gradient_over(
        self, batches: Iterable[tuple[Any, Any]], *, replay: bool = False
    ) -> tuple[float, list[Tensor], int]:
        """f and ∇f on all rows of all batches (each counting by its rows), and the number of batches.

        With `replay` the batches see the draws they saw at the last call: f is then one function of θ.
        """
        total, rows, count = 0.0, 0, 0
        sums = [torch.zeros_like(p) for p in self.parameters]
        with self.draws(replay=replay):
            for inputs, targets in batches:
                n = count_rows(inputs)
                f = self.loss(call_model(self.model, inputs), targets) * n
                for s, g in zip(sums, _gradients(f, self.parameters), strict=True):
                    s.add_(g)
                total, rows, count = total + f.item(), rows + n, count + 1
        if not rows:
            raise ValueError("there are no batches: expected a re-iterable of (inputs, targets) with at least one pair")
        for p, s in zip(self.parameters, sums, strict=True):
            s.div_(rows)
            if self.weight_decay and p.ndim >= 2:
                s.add_(p.detach(), alpha=self.weight_decay)
        decay = self.penalty().item() if self.weight_decay else 0.0
        return total / rows + decay, sums, count

    @contextmanager
    def draws(self, *, replay: bool = False) -> Iterator[None]:
        """Random draws inside the block come from the method's stream; with `replay` from where it last began."""
        outside = torch.get_rng_state()
        if not replay:
            self._began = self.stream
        torch.set_rng_state(self._began)
        try:
            yield
            self.stream = torch.get_rng_state()
        finally:
            torch.set_rng_state(outside)


class OnObjective:
    """A method on an objective. Its state is what `remembered` names, and the stream of random draws."""

    remembered: tuple[str, ...] = ()

    def __init__(self, objective: TrainingObjective) -> None:
        self.objective = objective

    def next_epoch(self) -> None:
        """Nothing goes by epochs unless a method says so."""

    def state_dict(self) -> State:
        return copy.deepcopy(
            {**{name: getattr(self, name) for name in self.remembered}, "stream": self.objective.stream}
        )

    def load_state_dict(self, state: State) -> None:
        state = copy.deepcopy(state)
        for name in self.remembered:
            setattr(self, name, state[name])
        self.objective.stream = state["stream"]


def _gradients(f: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(f, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
