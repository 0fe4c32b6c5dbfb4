"""What the laboratory asks of an optimizer, whatever its kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from shf.component import Component
from shf.lab.experiments import ExperimentError
from shf.linear.stopping import EVALUATION, PRODUCT

Loss = Callable[[Any, Any], Tensor]
Settings = Mapping[str, Any]
State = dict[str, Any]

COMMON: Settings = MappingProxyType({"weight_decay": 0.0, "seed": 0})
"""The settings that every method has, with their defaults."""


def defaults_of(options: type[Component]) -> Settings:
    """Those of a method whose own settings are the options of this component, and the common ones."""
    return {**{f.name: f.default for f in fields(options)}, **COMMON}


class Method(Protocol):
    """An optimizer at work on one model.

    `step` reports "objective" (the training objective on what the step saw, before its update) and what it cost, each
    counted in passes over one batch: "gradients", "evaluations" (objective alone) and curvature "products".
    The state is plain data: it survives ``torch.save`` and ``torch.load(weights_only=True)`` and goes on exactly where
    it was, random draws included. The model's parameters are not part of it.
    """

    def step(self, inputs: Any, targets: Any) -> dict[str, float]:
        """One update from a batch. Methods that read batches (`MethodSpec.reads_batches`) are given a re-iterable of
        (inputs, targets) pairs in place of `inputs`, and may be given the curvature batch, such a pair or None, in place
        of `targets`."""
        ...

    def next_epoch(self) -> None:
        """An epoch has ended: schedules advance."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


@dataclass(frozen=True)
class MethodSpec:
    """A method of the registry.

    Attributes:
        name: what a user types.
        summary: one line.
        factory: builds it from a model, a loss and complete settings.
        defaults: every setting it knows, with its value unless chosen otherwise.
        grid: the values that tuning tries, by setting; empty where there is nothing to tune.
        batch: rows of the batch it wants: "experiment" (the experiment's gradient batch) or a number.
        reads_batches: whether one step sees all batches of the training data.
        initialisation: the initialisation that is part of the method's definition, if one is.
        dropout: where it drops hidden units ("last" or "all"), if that is part of its definition.
        checks_itself: whether it refuses values of a wrong kind in its own words.
    """

    name: str
    summary: str
    factory: Callable[[nn.Module, Loss, Settings], Method]
    defaults: Settings
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    batch: str | int = "experiment"
    reads_batches: bool = False
    initialisation: str | None = None
    dropout: str | None = None
    checks_itself: bool = False

    def complete(self, settings: Settings) -> dict[str, Any]:
        """The defaults with some settings replaced.

        Raises:
            ExperimentError: if the method has no setting of that name, or one is not of its default's kind.
        """
        unknown = sorted(set(settings) - set(self.defaults))
        if unknown:
            known = ", ".join(sorted(self.defaults))
            raise ExperimentError(
                f"{self.name} has no setting {', '.join(map(repr, unknown))}; its settings are: {known}"
            )
        for name, value in settings.items():
            own = self.checks_itself and name not in COMMON
            if not own and not _is_like(value, self.defaults[name]):
                raise ExperimentError(
                    f"{self.name}: {name}={value!r}: expected a value like {self.defaults[name]!r}, its default"
                )
        return {**self.defaults, **settings}

    def build(self, model: nn.Module, loss: Loss, settings: Settings | None = None) -> Method:
        """The method at work on `model`, with these settings in place of its defaults."""
        return self.factory(model, loss, self.complete(settings or {}))


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value is of a default's kind: a whole number is a number too, and None as a default stands for any."""
    if default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, int | float if isinstance(default, float) else type(default))


def costs(*, gradients: float = 0, evaluations: float = 0, products: float = 0) -> dict[str, float]:
    """The cost account of a step, in passes over one batch."""
    return {"gradients": float(gradients), "evaluations": float(evaluations), "products": float(products)}


def gradient_equivalents(report: Mapping[str, float]) -> float:
    """What a step costs, in gradients, so that methods of different kinds share an axis.

    By the matrix products of a layer: a forward pass is one, a gradient three (forward, and two backward), a Gauss-Newton
    product four (Jv and J'u, two each). Hence an evaluation counts 1/3 and a product 4/3 of a gradient; CG's last,
    which makes no J'u, is counted as a whole one.
    """
    account = {"gradients": 1.0, "evaluations": EVALUATION, "products": PRODUCT}
    return sum(weight * report.get(kind, 0.0) for kind, weight in account.items())
