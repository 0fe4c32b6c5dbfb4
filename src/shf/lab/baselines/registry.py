"""All methods by name."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from shf.lab.baselines import borrowed, dropout_sgd, ksd, second_order, torch_methods, vsgd
from shf.lab.baselines.protocol import MethodSpec

__all__ = ["METHODS", "MethodSpec", "find"]

METHODS: Mapping[str, MethodSpec] = MappingProxyType(
    {
        spec.name: spec
        for family in (second_order, torch_methods, dropout_sgd, ksd, vsgd, borrowed)
        for spec in family.SPECS
    }
)


def find(name: str) -> MethodSpec:
    """The method of that name; an unknown name gets an error that offers the nearest known one."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"no optimizer is called {name!r}; {hint}known: {', '.join(METHODS)}")
