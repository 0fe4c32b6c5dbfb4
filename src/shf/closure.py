"""`step(closure)`: what a closure returns, the rows inside it, and the one answer to calls that give no batch.

Loops and frameworks that know torch's L-BFGS call `step(closure)`. A closure that returns outputs and targets in place of
the loss is a forward pass over rows that it has inside: it is run as often as a step needs it, at any θ, with the step's
draws.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shf.data.batches import Batch, count_rows
from shf.data.draws import Draws, mix
from shf.data.tree import leaves
from shf.errors import AmbiguousRowsError
from shf.groups import page, trainable
from shf.model.network import Network
from shf.model.percase import CallAxes
from shf.probing.layout import Layout, batch_statistics, calls_along_rows
from shf.state import step_seed
from shf.subject import Groups, Subject

STEP = "optimizer.step(inputs, targets)"
"""How a batch is given."""


@dataclass(frozen=True)
class Evaluated:
    """Outputs of a model and what the loss compares them with; of each term, by name, where the objective is a sum."""

    outputs: Any
    targets: Any


@dataclass(frozen=True)
class Given:
    """A batch in a closure's place."""

    inputs: Any
    targets: Any

    def __call__(self) -> "Given":
        return self


def evaluate(outputs: Any, targets: Any = None) -> Evaluated:
    """What a closure returns: the model's outputs, and the targets that the optimizer's loss takes with them.

    Args:
        outputs: as the loss takes them, rows along axis 0; for an objective of terms a mapping, name → outputs.
        targets: likewise.

    Example:
        >>> model, x, t = nn.Linear(4, 3), torch.randn(50, 4), torch.randint(3, (50,))
        >>> optimizer = shf.SHF(model, nn.CrossEntropyLoss())
        >>> info = optimizer.step(lambda: shf.evaluate(model(x), t))
        >>> info.loss_after < info.loss_before
        True
    """
    return Evaluated(outputs, targets)


def batch(inputs: Any, targets: Any = None) -> Given:
    """A batch for wrappers of optimizers that pass on closures alone: `wrapped.step(shf.batch(inputs, targets))` is
    `optimizer.step(inputs, targets)`."""
    return Given(inputs, targets)


@dataclass(frozen=True)
class Run:
    """A closure as the inputs of a batch, and the rows of its outputs."""

    closure: Callable[[], Any]
    rows: int


def tried(closure: Callable[[], Any], subject: Subject, groups: Groups, number: int | None = None) -> Evaluated | Given:
    """What a closure returns at the present parameters, with the draws that the step's passes will have.

    Args:
        closure: it is run once.
        subject: the model.
        groups: its parameters.
        number: of the term that the passes are for, where there are several.
    """
    network = Network(subject.model, trainable(subject.model, groups), lambda _, run: run())
    seed = step_seed(groups[0]["shf"])
    with torch.enable_grad(), Draws(mix(seed if number is None else mix(seed, 0, number), 0), 1).over():
        found = network(network.leaves(), closure)
    return found if isinstance(found, Given) else _checked(found)


def of_closure(subject: Subject, name: str | None = None) -> Subject:
    """The model, or one term of it, as closures evaluate it: their rows cannot be taken apart."""
    loss = subject.loss

    def forward(model: nn.Module, run: Run) -> Any:
        return outcome_of(_checked(run.closure()), name)[0]

    return _OfClosures(subject.model, loss.function, loss.reduction.value, forward, _take_apart, lambda run: run.rows)


class _OfClosures(Subject):
    """For layers' formulas the first batch says where rows lie: there is no other that says it better."""

    _calls: CallAxes | None = None

    def layout(self, network: Network, batch: Batch, seed: int) -> Layout:
        found = super().layout(network, batch, seed)
        if self._calls is None:
            mixed = batch_statistics(network.model)
            self._calls = {} if mixed else calls_along_rows(network, batch, seed)
        return replace(found, calls=self._calls)


def outcome_of(found: Evaluated, name: str | None) -> tuple[Any, Any]:
    """Outputs and targets; those of one term, if it has a name."""
    if name is None:
        return found.outputs, found.targets
    for what, given in (("outputs", found.outputs), ("targets", found.targets)):
        if not isinstance(given, Mapping) or name not in given:
            raise ValueError(
                f"a closure of an objective of terms returns shf.evaluate({{name: outputs}}, {{name: targets}}), with every "
                f"term's: its {what} lack {name!r}"
            )
    return found.outputs[name], found.targets[name]


def pair_of(closure: Callable[[], Any], found: Evaluated, name: str | None) -> tuple[Run, Any]:
    """Inputs and targets of a batch."""
    outputs, targets = outcome_of(found, name)
    return Run(closure, _rows(outputs)), targets


def is_closure(inputs: Any, *, rows: bool) -> bool:
    """Whether it is one, where batches are rows of tensors; where they are not, and may be callable, by its kind."""
    return callable(inputs) if rows else isinstance(inputs, FunctionType | MethodType | partial | Given)


def refuse_both(inputs: Any, targets: Any, closure: Any) -> Any:
    """The closure, where there is no batch beside it."""
    if inputs is not None or targets is not None:
        refuse_call("a batch and a closure")
    return closure


def refuse_missing(inputs: Any, expected: str) -> None:
    """Refuses what is given in place of a batch without targets, and is none."""
    if inputs is None:
        refuse_call("no batch", expected)
    if isinstance(inputs, Tensor) and inputs.ndim == 0:
        refuse_call("a number (the batch's loss?)", expected)


def explain_batch(inputs: Any, targets: Any, error: Exception) -> None:
    """Says how a batch is given where a model could do nothing with a list, or with two things without targets."""
    whole = targets is None and isinstance(inputs, tuple | list) and len(inputs) == 2
    if not isinstance(error, TypeError | AttributeError):
        if whole:
            error.add_note("step takes inputs and targets apart: if this is a batch of both, optimizer.step(*batch)")
    elif whole:
        refuse_call("a batch of two and no targets", "optimizer.step(*batch)", error)
    elif isinstance(inputs, list) and inputs and all(isinstance(x, Tensor) for x in inputs):
        right = "inputs[0]" if len(inputs) == 1 else "tuple(inputs)"
        given = f"a list of {len(inputs)} for inputs, which the model got as one argument"
        refuse_call(given, f"optimizer.step({right}, targets)", error)


def refuse_call(given: str, expected: str = STEP, cause: Exception | None = None) -> NoReturn:
    """The answer to every call that gives no batch, with the page of the framework that made it."""
    raise TypeError(
        f"step got {given}: expected the batch, {expected}, of which SHF evaluates model and loss by itself, several times "
        "a step, without backward() and zero_grad(). In a closure leave loss.backward() out, and return "
        f"shf.evaluate(model(inputs), targets) in place of the loss. See {page()}"
    ) from cause


def _checked(found: Any) -> Evaluated:
    if isinstance(found, Evaluated):
        return found
    scalar = isinstance(found, Tensor) and found.numel() == 1
    what = "its loss" if scalar or isinstance(found, float) else "nothing" if found is None else type(found).__name__
    refuse_call(f"a closure that returns {what}")


def _rows(outputs: Any) -> int:
    """Of what a closure returned."""
    tensors = leaves(outputs)
    if not tensors or any(z.ndim == 0 for z in tensors) or len({len(z) for z in tensors}) > 1:
        shapes = [tuple(z.shape) for z in tensors]
        raise ValueError(
            f"shf.evaluate(outputs of the shapes {shapes}): expected the model's outputs, not their loss, with the rows "
            "along axis 0, as many in each; for several terms make the optimizer with a mapping of shf.Term"
        )
    return count_rows(outputs)


def _take_apart(data: Any, rows: Tensor) -> NoReturn:
    raise AmbiguousRowsError(
        "a closure runs all the rows that it has inside, where step(inputs, targets) can take some"
    )
