"""What the figures should be, and whether they are. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MIB, GIB = 2**20, 2**30
SPARSE = ("product", "product_few", "step")
"""What is measured with sparse and with dense inputs."""
KINDS = ("matrix products", "passes over vectors", "elementwise work of the network", "all else")
"""Kinds of work in a step."""


@dataclass(frozen=True)
class Target:
    """A figure with the bounds it should keep.

    Attributes:
        name: what was measured.
        value: what was found.
        most: the largest value that is acceptable.
        least: the smallest.
        unit: what the value counts.
    """

    name: str
    value: float
    most: float | None = None
    least: float | None = None
    unit: str = "×"

    @property
    def met(self) -> bool:
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def bound(self) -> str:
        if self.most is not None and self.least is not None:
            return f"{self.least:g} … {self.most:g}"
        return f"≤ {self.most:g}" if self.most is not None else f"≥ {self.least:g}"


def judge(results: dict[str, Any]) -> list[Target]:
    """All targets whose figures are there; none for a quick run, whose figures mean nothing."""
    sections = {} if results["quick"] else results["sections"]
    return [target for section, rule in _RULES.items() if section in sections for target in rule(sections[section])]


def _step(found: dict[str, Any]) -> Iterator[Target]:
    for name, entry in found.items():
        most = 1.6 if name == "usps" else 1.25
        yield Target(f"step / floor, {entry['network']}", entry["step_over_floor"], most)


def _product(found: dict[str, Any]) -> Iterator[Target]:
    for entry in found.values():
        if entry["feed_forward"]:
            yield Target(f"product / gradient, {entry['network']}", entry["product_over_gradient"], 1.4)


def _scaling(found: dict[str, Any]) -> Iterator[Target]:
    for entry in found.values():
        yield Target(f"exponent in {entry['what']}", entry["exponent"], 1.1, 0.9, "")


def _memory(found: dict[str, Any]) -> Iterator[Target]:
    for name, entry in found.items():
        if name == "growth":
            growth = (entry["late"] - entry["early"]) / MIB
            yield Target(f"growth of memory in {entry['steps']} steps", growth, 1.0, None, "MiB")
        elif "step_over_gradient" in entry:
            yield Target(f"peak memory, step / gradient, {entry['network']}", entry["step_over_gradient"], 3.0)


def _sparse(found: dict[str, Any]) -> Iterator[Target]:
    for entry in found.values():
        yield Target("sparse against dense, products", entry["product_speedup"], None, 20.0)
        yield Target("sparse against dense, step", entry["step_speedup"], None, 4.0)
        yield Target("sparse, peak memory of a step", entry["sparse_bytes"] / GIB, 1.0, None, "GiB")


_RULES = {"step": _step, "product": _product, "scaling": _scaling, "memory": _memory, "sparse": _sparse}
