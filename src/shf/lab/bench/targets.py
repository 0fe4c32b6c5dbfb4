"""What the figures should be, and whether they are. No torch here."""

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
    """A figure with the bounds it should keep."""

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
    return [] if results["quick"] else list(_targets(results["sections"]))


def _targets(sections: dict[str, dict[str, Any]]) -> Iterator[Target]:
    for name, e in sections.get("step", {}).items():
        yield Target(f"step / floor, {e['network']}", e["step_over_floor"], 1.6 if name == "usps" else 1.25)
    for e in sections.get("product", {}).values():
        if e["feed_forward"]:
            yield Target(f"product / gradient, {e['network']}", e["product_over_gradient"], 1.4)
    for e in sections.get("scaling", {}).values():
        yield Target(f"exponent in {e['what']}", e["exponent"], 1.1, 0.9, "")
    for name, e in sections.get("memory", {}).items():
        if name == "growth":
            growth = (e["late"] - e["early"]) / MIB
            yield Target(f"growth of memory in {e['steps']} steps", growth, 1.0, None, "MiB")
        elif "step_over_gradient" in e:
            yield Target(f"peak memory, step / gradient, {e['network']}", e["step_over_gradient"], 3.0)
    for e in sections.get("sparse", {}).values():
        yield Target("sparse against dense, products", e["product_speedup"], None, 20.0)
        yield Target("sparse against dense, step", e["step_speedup"], None, 4.0)
        yield Target("sparse, peak memory of a step", e["sparse_bytes"] / GIB, 1.0, None, "GiB")
