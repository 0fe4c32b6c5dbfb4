"""An optimizer as a composition of parts, and the flat options that follow from their fields."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from shf import roles
from shf.averaging import Averaging
from shf.component import Check, Component, Role, plain
from shf.damping import Damping
from shf.info import StepInfo
from shf.linear import Caution, DecayStep, LinearSolver, Momentum, Stopping, Survival
from shf.local import Local
from shf.method import Method
from shf.preconditioners import Kronecker, Preconditioner, Work
from shf.selection import Selection
from shf.state import Memory, Move

P = TypeVar("P", bound=Component)

ARGUMENTS = ("weight_decay", "reduction", "forward", "select", "count", "seed", "process_group")
"""What an optimizer takes by name besides its options."""
_OF_RATES = ("lr", "learning_rate", "momentum", "nesterov", "betas")
"""What optimizers with a learning rate take."""


class Config:
    """The options of SHF, flat; the paper's symbols in brackets. Each belongs to a part of the optimizer, which owns it.

    An option is an attribute: `shf.Config(damping=0.1).damping`.
    """

    owner: ClassVar[str] = "SHF"
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """What to do about options of others, that do not exist here."""
    roles: ClassVar[Mapping[str, Role]] = roles.SHF

    parts: Mapping[str, Component]
    values: Mapping[str, Any]
    _of_kind: dict[type[Component], Any]

    def __init__(self, **options: Any) -> None:
        flat = self.flat()
        unknown = sorted(set(options) - set(flat))
        if unknown:
            known = [*ARGUMENTS, *flat]
            advice = self.elsewhere.get(unknown[0]) or _advice(unknown[0], known)
            raise TypeError(f"{self.owner}() has no option {unknown[0]!r}: {advice}options are: {', '.join(known)}")
        values = {name: default for name, (default, _, _) in flat.items()} | {n: plain(v) for n, v in options.items()}
        objects = tuple(role.takes for role in self.roles.values() if role.takes is not None)
        for name, (_, check, _) in flat.items():
            expected = None if isinstance(values[name], objects) else check(values[name])
            if expected is not None:
                raise ValueError(f"{self.owner}({name}={values[name]!r}): must be {expected}")
        parts = {name: role.build(self.owner, values, options) for name, role in self.roles.items()}
        for role in self.roles.values():  # options of a part that was given as an object are not used
            if role.takes is not None and isinstance(values[role.given], role.takes):
                values = {n: v for n, v in values.items() if n == role.given or n not in role.flat()}
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "_of_kind", {})
        self._check()

    def _check(self) -> None:
        """Refuses options of different parts that do not go together."""
        if self.values.get("cg_noise") is not None and self.noise_every is None:
            raise ValueError(
                f"{self.owner}(cg_noise={self.cg_noise!r}): needs a noise that is measured; give noise_every=10"
            )
        if isinstance(self.parts["preconditioner"], Kronecker) and self.message_dtype is not None:
            raise ValueError(
                f"{self.owner}(preconditioner='kronecker', message_dtype={self.message_dtype!r}): factors rounded to that "
                "are not positive definite any more; use message_dtype=None"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.__dict__.get("values", {}):
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        return self.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to option {name!r}: make a new {type(self).__name__}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.values == other.values

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _remake, (type(self), dict(self.values))

    @classmethod
    def flat(cls) -> dict[str, tuple[Any, Check, str]]:
        """Default, check and sentence of every option, in order."""
        return {name: entry for role in cls.roles.values() for name, entry in role.flat().items()}

    @classmethod
    def names(cls) -> list[str]:
        return list(cls.flat())

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {name: default for name, (default, _, _) in cls.flat().items()}

    def in_words(self) -> str:
        """Every option's value, as one text: plain data for a state."""
        return json.dumps({name: repr(value) for name, value in self.values.items()}, ensure_ascii=False)

    def others(self, words: str) -> str:
        """Which options are others than in the words of `in_words`; those apart that no step depends on."""
        saved, own = json.loads(words), json.loads(self.in_words())
        aside = {name for part in self.parts.values() if part.incidental for name in part.options()}
        differ = [name for name in own if name in saved and name not in aside and own[name] != saved[name]]
        return ", ".join(f"{name}={own[name]} (saved with {saved[name]})" for name in differ)

    # --- what an optimizer makes of it -------------------------------------------------------------------------------

    def first(self) -> dict[str, Any]:
        """The numbers that the parts remember, before the first step."""
        return {name: value for part in self.parts.values() for name, value in part.first().items()}

    def next_epoch(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """What an epoch's end makes of the numbers."""
        return {name: value for part in self.parts.values() for name, value in part.next_epoch(numbers).items()}

    @property
    def numbers(self) -> set[str]:
        """The names of all numbers that the parts may remember."""
        return {name for part in self.parts.values() for name in (*part.numbers, *part.first())}

    @property
    def tensors(self) -> set[str]:
        """The names of all tensors that the parts may remember of a parameter."""
        return {name for part in self.parts.values() for name in part.tensors} | {"delta"}

    @property
    def takes_products(self) -> bool:
        """Whether every step asks for products with B."""
        return self.part(LinearSolver).products

    def part(self, kind: type[P]) -> P:
        """The part of this kind; the kind's defaults where the optimizer has none."""
        if kind not in self._of_kind:
            self._of_kind[kind] = next((part for part in self.parts.values() if isinstance(part, kind)), None) or kind()
        return self._of_kind[kind]  # type: ignore[no-any-return]

    def update_scale(self, numbers: Mapping[str, Any]) -> float:
        """β, and of that the share which the average lets be made."""
        return float(numbers["update_scale"]) * self.part(Averaging).share(numbers)

    def finish(self, method: Method, move: Move, info: StepInfo, here: Local, scale: float) -> StepInfo:
        """The step is done: what the parts remember of it, and what they still evaluated. f over `scale` is a mean."""
        numbers, fall = here.memory.numbers, info.loss_before - info.loss_after
        method.damping.moved(move, fall, here)
        looks = self.part(Averaging).update(move.after, here)
        of_mean = [number / scale for number in (info.loss_before, fall, here.noise)]
        here.memory.keep(
            **self.part(Caution).after(numbers, info.reduction_ratio, info.gradient_noise),
            **self.part(Survival).after(numbers, self.update_scale(numbers), *of_mean),
        )
        return dataclasses.replace(info, evaluations=info.evaluations + looks) if looks else info

    def method(self, memory: Memory, curvature_share: float) -> Method:
        """Algorithm 1 of one step."""
        solver, decay = self.part(LinearSolver), self.parts.get("decay")
        most = self.part(Caution).limit(getattr(solver, "iterations", 1), memory.numbers)
        most = self.part(Survival).limit(most, memory.numbers)
        return Method(
            damping=self.part(Damping),
            preparation=self.part(Preconditioner).begin(memory, Work(most, curvature_share)),
            solver=solver,
            stopping=self.part(Stopping),
            momentum=self.part(Momentum),
            selection=self.part(Selection),
            decay=decay if isinstance(decay, DecayStep) else DecayStep(),
            most=most,
        )


class HFConfig(Config):
    """The options of Martens' batch method: other values, and two rules for long CG runs."""

    owner: ClassVar[str] = "HF"
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("curvature_batch", "curvature_rows"), "give the curvature batch to step, step(batches, curvature=...); "
    )
    roles = roles.HF

    def _check(self) -> None:
        super()._check()
        if not self.part(Preconditioner).batches:
            raise ValueError(
                f"HF(preconditioner={self.preconditioner!r}): it is made of a single batch; only shf.SHF has it"
            )


for _config in (Config, HFConfig):
    _config.__doc__ = f"{_config.__doc__}\n\nAttributes:\n" + "\n".join(
        f"    {name}: {text}" for name, (_, _, text) in _config.flat().items()
    )


def _remake(kind: type[Config], values: dict[str, Any]) -> Config:
    return kind(**values)


def _advice(name: str, known: list[str]) -> str:
    """What to do about an option that does not exist, where that can be guessed; ends where the list of options begins."""
    if name in _OF_RATES:
        return (
            "there is no learning rate in this optimizer, the length of a step comes from curvature, damping and a line "
            "search; leave it out; "
        )
    close = difflib.get_close_matches(name, known, cutoff=0.7)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""
