"""The loss L of f(θ) = L(F(θ)): any callable `loss(outputs, targets)` that returns one number. f is exactly that number."""

import copy
import enum
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shf.errors import NonConvexLossWarning
from shf.runtime.context import warn


class Reduction(enum.Enum):
    """Whether the loss is a mean or a sum over the rows of a batch."""

    MEAN = "mean"
    SUM = "sum"


class PerCase(nn.Module):
    """Sum over a case's outputs, mean over cases: the scale on which the paper's autoencoder settings live."""

    reduction = "mean"

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        if getattr(loss, "reduction", None) not in ("mean", "sum", "none"):
            raise TypeError(
                f"per_case({loss!r}): expected a torch loss with a `reduction`, such as nn.BCEWithLogitsLoss(); "
                "sum over outputs and average over rows inside your own callable instead"
            )
        self.total = copy.copy(loss)
        self.total.reduction = "sum"  # type: ignore[assignment]

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.total(outputs, targets) / len(outputs)  # type: ignore[no-any-return]


def per_case(loss: nn.Module) -> PerCase:
    """The same loss, summed over each case's outputs and averaged over cases.

    torch's default averages over all elements: for 784 pixels that is 784 times smaller, and a damping of λ = 10, chosen
    for the summed loss, would freeze the network.

    Example:
        >>> loss = per_case(nn.BCEWithLogitsLoss())
        >>> loss(torch.zeros(5, 784), torch.zeros(5, 784))  # 784 log 2
        tensor(543.4274)
    """
    return PerCase(loss)


class Loss:
    """A loss callable with the derivatives that the method needs."""

    def __init__(self, function: Callable[[Any, Any], Tensor], reduction: str | None = None) -> None:
        if not callable(function):
            raise TypeError(f"loss={function!r}: expected a callable loss(outputs, targets)")
        function = _uncompiled(function)
        if isinstance(function, type):
            raise TypeError(f"loss={function.__name__} is a class: expected one of its objects, {function.__name__}()")
        self.name: str = getattr(function, "__name__", None) or type(function).__name__
        found = getattr(function, "reduction", None)
        if not found:  # a partial has it among its keywords
            found = getattr(function, "keywords", {}).get("reduction")
        if found == "batchmean":  # KLDivLoss: a sum over outputs, a mean over rows
            found = "mean"
        chosen = reduction if reduction is not None else (found if isinstance(found, str) else "mean")
        if reduction is not None and isinstance(found, str) and found != reduction:
            raise ValueError(f"reduction={reduction!r} contradicts the loss object's own reduction={found!r}")
        if chosen not in ("mean", "sum"):
            raise ValueError(
                f"loss {self.name} has reduction={chosen!r}: expected 'mean' or 'sum' (one number per batch)"
            )
        self.function = function
        self.reduction = Reduction(chosen)
        self._told = False

    @property
    def takes_one_tensor(self) -> bool:
        """Whether it is one of torch's losses, which take nothing else for outputs."""
        function = self.function
        own = isinstance(function, nn.modules.loss._Loss | PerCase) and not isinstance(function, nn.GaussianNLLLoss)
        return own or any(function is known for known, _ in KNOWN_FUNCTIONS)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        arguments: tuple[Any, ...] = (outputs, targets)
        if isinstance(self.function, nn.GaussianNLLLoss):
            mean, variance = _mean_and_variance(outputs)
            arguments = (mean, targets, variance)
        try:
            value = self.function(*arguments)
        except TypeError as error:
            given = "outputs and no targets" if targets is None else "outputs and targets"
            right = "optimizer.step(inputs, targets)" if targets is None else "a callable loss(outputs, targets)"
            raise TypeError(f"loss {self.name} cannot be called with {given} ({error}): expected {right}") from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"loss {self.name} returned {found}: expected a tensor of one number (reduction 'mean' or 'sum')"
            )
        return value.reshape(())

    def tell(self, instead: str) -> None:
        """Says once what stands for L'' where L is not convex."""
        if not self._told:
            self._told = True
            warn(
                f"loss {self.name} is not convex in the outputs: in the Gauss-Newton matrix {instead} stands for L''; value "
                "and gradient are the loss's own. To silence this: "
                "warnings.simplefilter('ignore', shf.NonConvexLossWarning)",
                NonConvexLossWarning,
            )


def _mean_and_variance(outputs: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(outputs, tuple | list) or len(outputs) != 2:
        raise TypeError(
            f"loss GaussianNLLLoss got a {type(outputs).__name__} for outputs: expected a model that returns the pair "
            "(mean, variance), or a function of yours, loss(outputs, targets), that calls it"
        )
    return outputs[0], outputs[1]


def _uncompiled(function: Any) -> Any:
    """The function or module inside torch.compile: a compiled graph cannot be differentiated twice."""
    return getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", function)


KNOWN_FUNCTIONS: tuple[tuple[Any, type[nn.Module]], ...] = (
    (F.cross_entropy, nn.CrossEntropyLoss),
    (F.mse_loss, nn.MSELoss),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
)
"""Functions, and the modules that compute the same."""
