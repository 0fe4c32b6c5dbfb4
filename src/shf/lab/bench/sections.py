"""The sections of the benchmark and their cases by name, and the run over them that collects everything in one record."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from shf.lab import machine
from shf.lab.bench import anatomy, memory, peers, speed
from shf.lab.bench.cases import FEED_FORWARD, PRODUCTS, FeedForward
from shf.lab.bench.measure import QUICK, Pace
from shf.lab.clock import wall
from shf.lab.experiments import ExperimentError

Entry = dict[str, Any]

Measure = Callable[[str, Pace], Entry]


def _memory(name: str, pace: Pace) -> Entry:
    if name == "growth":
        return memory.growth(quick=pace.quick)
    if name == "microbatch":
        return memory.bounded_by_microbatch("curves", quick=pace.quick)
    return memory.step_against_gradient(name, quick=pace.quick)


def _sparse(name: str, pace: Pace) -> Entry:
    return {**speed.sparse_against_dense(pace), **memory.sparse_against_dense(quick=pace.quick)}


def _on(measure: Callable[[FeedForward, Pace], Entry]) -> Measure:
    """What measures a feed-forward network, by the network's name."""
    return lambda name, pace: measure(FEED_FORWARD[name], pace)


SECTIONS: dict[str, tuple[Sequence[str], Measure, Pace]] = {
    "step": (tuple(FEED_FORWARD), _on(speed.step_against_floor), Pace(3, 20.0)),
    "anatomy": (tuple(FEED_FORWARD), _on(anatomy.shares_of_a_step), Pace()),
    "product": (tuple(PRODUCTS), lambda n, pace: speed.product_against_gradient(PRODUCTS[n], pace), Pace(5, 8.0)),
    "scaling": (tuple(speed.SWEEPS), speed.cost_against_size, Pace(3, 3.0)),
    "memory": ((*FEED_FORWARD, "microbatch", "growth"), _memory, Pace()),
    "sparse": (("reuters",), _sparse, Pace(5, 10.0)),
    "compiled": (("usps", "mnist", "curves"), _on(anatomy.compiled_evaluation), Pace(5, 4.0)),
    "peers": (tuple(peers.PEERS), lambda n, pace: peers.seconds_per_epoch([n], pace)[n], Pace(2, 0.0)),
}
"""For each section the names of its cases, what measures one of them, and how thoroughly."""

CASES = tuple(f"{section}/{name}" for section, (names, *_) in SECTIONS.items() for name in names)


def select(names: Sequence[str] | None) -> list[str]:
    """The cases that were asked for, in their order: by name, or a whole section by its name.

    Raises:
        ExperimentError: if there is no such case.
    """
    if not names:
        return list(CASES)
    unknown = [name for name in names if name not in CASES and name not in SECTIONS]
    if unknown:
        known = f"cases are {', '.join(CASES)}, or a section: {', '.join(SECTIONS)}"
        raise ExperimentError(f"no case {unknown[0]!r}; {known}")
    return [case for case in CASES if case in names or case.partition("/")[0] in names]


def measure_cases(cases: Sequence[str], *, quick: bool = False, progress: Callable[[str], object] = print) -> Entry:
    """Runs the cases one after the other; `progress` is told each name before it begins."""
    begun = wall()
    machine.keep_freed_memory()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    found: dict[str, dict[str, Entry]] = {}
    for section, (_, measure, full) in SECTIONS.items():
        names = [case.partition("/")[2] for case in cases if case.startswith(f"{section}/")]
        pace = QUICK if quick else full
        if section == "peers" and names:  # together, because they take turns
            progress(f"{section}/{', '.join(names)}")
            found[section] = peers.seconds_per_epoch(names, pace)
            continue
        for name in names:
            progress(f"{section}/{name}")
            found.setdefault(section, {})[name] = measure(name, pace)
    return {
        "format": 1,
        "started": started,
        "seconds": round(wall() - begun, 1),
        "quick": quick,
        "machine": {**machine.description(), "threads": torch.get_num_threads()},
        "versions": machine.versions(),
        "sections": found,
    }
