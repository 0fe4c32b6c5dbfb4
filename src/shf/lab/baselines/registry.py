"""All methods by name."""

from collections.abc import Mapping
from types import MappingProxyType

from shf.lab.baselines import borrowed, dropout_sgd, ksd, second_order, torch_methods, vsgd
from shf.lab.baselines.protocol import MethodSpec
from shf.lab.experiments import ExperimentError
from shf.lab.words import suggest

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
    raise ExperimentError(f"no optimizer is called {name!r}; {suggest(name, METHODS)}")
