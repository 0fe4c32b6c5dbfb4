"""Writes src/shf/options.py and docs/options.md anew: the flat options of the optimizers, from the fields of their parts."""

import types
from collections.abc import Mapping
from inspect import get_annotations
from pathlib import Path
from typing import Any, get_type_hints

from shf.component import Role
from shf.composition import Config, HFConfig

ROOT = Path(__file__).parents[1]
TYPES, PAGE = ROOT / "src" / "shf" / "options.py", ROOT / "docs" / "options.md"
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


INTRODUCTION = """# Options

Every option of `shf.SHF` and `shf.HF`, flat as they are given: `shf.SHF(model, loss, damping=0.1, cg_iterations=5)`. Each
is a field of one part of the optimizer, which checks it: `damping_factor=0.9` is
`damping=shf.damping.LevenbergMarquardt(factor=0.9)`. The paper's symbols are in brackets. What an optimizer
takes besides (`weight_decay`, `reduction`, `seed`, ...) is described [with the optimizer](reference.md).
`python tools/options.py` makes this page.

The `damping`, the `preconditioner` and the `solver` may be given as an object instead: one of `shf.damping`,
`shf.preconditioners`, `shf.solvers`, or [one of your own](extending.md).

## Of SHF

"""
OF_HF = """
## Of HF

What it has in common with SHF, with the same default, is not repeated. It has no {missing}, and no "kronecker".

"""
COLUMNS = "| option | default | belongs to | |\n|---|---|---|---|\n"


def owners(role: Role) -> dict[str, str]:
    """The part and field that each of a role's options is; of the one that selects, what it selects among."""
    kinds = " or ".join(kind.__name__ for kind in role.kinds.values())
    found = {} if role.selector is None else {role.selector[0]: f"selects {kinds}"}
    for kind in role.kinds.values():
        for name, field in kind.options().items():
            declares = next(base.__name__ for base in kind.__mro__ if field in get_annotations(base))
            found[name] = f"`{declares}.{field}`"
    return found


def row(name: str, default: Any, owner: str, text: str) -> str:
    shown = f"{default:.4g}" if isinstance(default, float) else repr(default)
    return f"| `{name}` | `{shown}` | {owner} | {text.replace('|', chr(92) + '|')} |\n"


def table(config: type[Config], known: Mapping[str, Any]) -> str:
    """An optimizer's options, but for those that are known with the same default."""
    belongs = {name: owner for role in config.roles.values() for name, owner in owners(role).items()}
    return COLUMNS + "".join(
        row(name, default, belongs[name], text)
        for name, (default, _, text) in config.flat().items()
        if name not in known or known[name] != default
    )


def page() -> str:
    """The whole page."""
    missing = ", ".join(f"`{name}`" for name in Config.names() if name not in HFConfig.names())
    return INTRODUCTION + table(Config, {}) + OF_HF.format(missing=missing) + table(HFConfig, Config.defaults())


if __name__ == "__main__":
    TYPES.write_text(source(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
