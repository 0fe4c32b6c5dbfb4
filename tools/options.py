"""Writes src/shf/options.py anew: the flat options of the optimizers as types, from the fields of their parts."""

import types
from pathlib import Path
from typing import Any, get_type_hints

from shf.composition import Config, HFConfig, Role

TARGET = Path(__file__).parents[1] / "src" / "shf" / "options.py"
HEAD = '''"""The options of the optimizers as keyword arguments, for type checkers and completion.

Made by tools/options.py from the fields of their parts, which declare them.
"""

from typing import TypedDict

from shf.damping.rule import Damping
from shf.linear.solver import LinearSolver
from shf.preconditioners.base import Preconditioner
'''


def words(hint: Any) -> str:
    """A type as it is written."""
    if isinstance(hint, types.UnionType):
        return " | ".join(words(part) for part in hint.__args__)
    return "None" if hint is type(None) else hint.__name__


def fields_of(role: Role) -> dict[str, str]:
    """The types of a role's options; where an object may be given instead, that too."""
    found = {}
    if role.selector is not None:
        found[role.selector[0]] = "str | None" if None in role.kinds else "str"
    for kind in role.kinds.values():
        hints = get_type_hints(kind)
        found |= {name: words(hints[own]) for name, own in kind.options().items()}
    if role.takes is not None:
        plain = found[role.given].removesuffix(" | None")
        found[role.given] = f"{plain} | {role.takes.__name__}" + (" | None" if plain != found[role.given] else "")
    return found


def source() -> str:
    """The whole file."""
    found = {n: t for kind in (Config, HFConfig) for role in kind.roles.values() for n, t in fields_of(role).items()}
    lines = "".join(f"    {option}: {hint}\n" for option, hint in found.items())
    about = "Those of `shf.SHF`, and at the end what only `shf.HF` has."
    return f'{HEAD}\n\nclass Options(TypedDict, total=False):\n    """{about}"""\n\n{lines}'


if __name__ == "__main__":
    TARGET.write_text(source(), encoding="utf-8")
