"""What the parts of an optimizer have in common: options that are declared once and check themselves, and what they
remember.

A part is a frozen dataclass. Each of its fields is one option, with a default, a check, and a sentence:

    @dataclass(frozen=True, kw_only=True)
    class LevenbergMarquardt(Damping):
        factor: float = option(0.99, number(above=0, most=1), "λ is multiplied or divided by this", name="damping_factor")

The flat options of an optimizer (`damping_factor=0.9`), their documentation, their types for completion, and the errors
about them all follow from the fields.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Self

Check = Callable[[Any], str | None]
"""From a value to what was expected, in words; None where the value is fine."""


@dataclass(frozen=True)
class Option:
    """How a field is known outside of its component: the flat name, what it may be, and a sentence about it."""

    check: Check
    text: str
    name: str | None


def option(default: Any, check: Check, text: str, *, name: str | None = None) -> Any:
    """A field that is an option; `name` is its flat name where that is not the field's own."""
    return dataclasses.field(default=default, metadata={"option": Option(check, " ".join(text.split()), name)})


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of an optimizer: its options are its fields, and it says what it remembers.

    What it remembers has a name of its own among all parts.
    """

    incidental: ClassVar[bool] = False
    """Whether a run goes on alike whatever its options say."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of what it remembers of each parameter, in the optimizer's state."""
        return ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the numbers that it remembers besides those of `first`."""
        return ()

    def __post_init__(self) -> None:
        self._refuse(type(self).__name__, {})

    def check(self, say: Callable[[str], str]) -> None:
        """Refuses values that do not go together, by a ValueError. `say` puts a field in the user's words, name=value."""

    def first(self) -> dict[str, Any]:
        """The numbers that it remembers, before the first step."""
        return {}

    def next_epoch(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """What an epoch's end makes of them."""
        return {}

    @classmethod
    def options(cls) -> dict[str, str]:
        """Its fields by their flat names."""
        found = {}
        for field in dataclasses.fields(cls):
            own: Option | None = field.metadata.get("option")
            found[(own.name if own is not None else None) or field.name] = field.name
        return found

    @classmethod
    def from_flat(cls, owner: str, values: Mapping[str, Any]) -> Self:
        """Made from flat options, those that are its own; what is wrong with them is said in these words."""
        own = {field: plain(values[name]) for name, field in cls.options().items() if name in values}
        part = cls.__new__(cls)
        for field in dataclasses.fields(cls):
            object.__setattr__(part, field.name, own.get(field.name, field.default))
        part._refuse(owner, {field: name for name, field in cls.options().items()})
        return part

    def _refuse(self, owner: str, names: Mapping[str, str]) -> None:
        def say(field: str) -> str:
            return f"{names.get(field, field)}={getattr(self, field)!r}"

        for field in dataclasses.fields(self):
            own: Option | None = field.metadata.get("option")
            expected = None if own is None else own.check(getattr(self, field.name))
            if expected is not None:
                raise ValueError(f"{owner}({say(field.name)}): must be {expected}")
        try:
            self.check(say)
        except ValueError as error:
            raise ValueError(f"{owner}({error.args[0]}") from None


def plain(value: Any) -> Any:
    """Numbers as Python's own: numpy's would go into the optimizer's state, which must load with weights_only=True."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def number(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    words: tuple[Any, ...] = (),
) -> Check:
    """A finite number within bounds, or one of some words."""
    bounds = (("at least", least), ("greater than", above), ("at most", most), ("below", below))
    limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    expected = f"a number {limits}".rstrip()
    if words:
        expected = ", ".join([expected, *map(repr, words[:-1]), f"or {words[-1]!r}"])

    def check(value: Any) -> str | None:
        if any(value is word or (isinstance(word, str) and value == word) for word in words):
            return None
        real = isinstance(value, Real) and not isinstance(value, bool)
        fine = real and abs(value) < math.inf  # `math.isfinite` cannot take every whole number
        within = (
            fine
            and (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
            and (below is None or value < below)
        )
        return None if within else expected

    return check


def whole(*, least: int, optional: bool = False) -> Check:
    """A whole number that is at least this; or None."""
    otherwise = " or None" if optional else ""

    def check(value: Any) -> str | None:
        if optional and value is None:
            return None
        if not isinstance(value, Integral) or isinstance(value, bool):
            return f"a whole number{otherwise}"
        return None if int(value) >= least else f"at least {least}{otherwise}"

    return check


def flag(value: Any) -> str | None:
    """True or False."""
    return None if isinstance(value, bool) else "True or False"


def one_of(*values: Any) -> Check:
    """One of these."""
    expected = "one of " + ", ".join(map(repr, values))

    def check(value: Any) -> str | None:
        return (
            None
            if any(value is known or (type(value) is type(known) and value == known) for known in values)
            else expected
        )

    return check


@dataclass(frozen=True)
class Role:
    """A place in the composition, and what may stand there.

    Attributes:
        kinds: classes, by what their selector says; where there is but one, nothing selects it.
        selector: the flat option that selects, and a sentence about it.
        takes: the base class of objects that may be given instead, under the name `given`.
        defaults: of flat options, where this optimizer's are not the component's own.
    """

    kinds: Mapping[Any, type[Component]]
    selector: tuple[str, str] | None = None
    takes: type[Component] | None = None
    given: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, kind: type[Component], **defaults: Any) -> "Role":
        """A role with one kind."""
        return cls({None: kind}, defaults=defaults)

    def options(self) -> dict[str, dataclasses.Field[Any]]:
        """The fields of all kinds by their flat names."""
        found: dict[str, dataclasses.Field[Any]] = {}
        for kind in self.kinds.values():
            fields = {f.name: f for f in dataclasses.fields(kind)}
            found |= {name: fields[own] for name, own in kind.options().items() if name not in found}
        return found

    def flat(self) -> dict[str, tuple[Any, Check, str]]:
        """Default, check and sentence of each flat option, the selector's included."""
        found = {}
        for name, f in self.options().items():
            own = f.metadata["option"]
            found[name] = (self.defaults.get(name, f.default), own.check, own.text)
        if self.selector is not None:
            name, text = self.selector
            kinds = list(self.kinds)
            found[name] = (self.defaults.get(name, kinds[0]), one_of(*kinds), " ".join(text.split()))
        return found

    def build(self, owner: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> Component:
        """The part: the object that was given, or one made from flat options."""
        value = values.get(self.given)
        if self.takes is not None and isinstance(value, self.takes):
            _refuse_beside(
                owner, self.given, value, [name for name in given if name in self.flat() and name != self.given]
            )
            return value
        kind = self.kinds[None if self.selector is None else values[self.selector[0]]]
        return kind.from_flat(owner, values)


def _refuse_beside(owner: str, name: str, part: Component, others: Sequence[str]) -> None:
    """Refuses flat options of a part that was given as an object: its own fields are what counts."""
    if others:
        raise TypeError(
            f"{owner}({name}={part!r}, {others[0]}=...): {others[0]} belongs to the {name} that is made from options; leave "
            f"it out, and give {type(part).__name__} its own"
        )
