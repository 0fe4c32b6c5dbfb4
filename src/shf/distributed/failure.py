"""Who is missing, when a message between processes fails.

The failure itself does not say: a broken connection may be that of a process that only gave up earlier. So each process
that gives up writes its own testimony into the group's key-value store and waits a little for those of the others; whoever
says nothing is the one that was killed, hangs, or cannot be reached.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 10.0
"""How long a process waits for the others' testimony: as long as a healthy one may compute before it notices."""


class Store(Protocol):
    """What is needed of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Finding:
    """What the testimonies say: which processes are at fault, and why, in words."""

    ranks: tuple[int, ...]
    words: str


class FailureReports:
    """Testifies for one process, and hears the others through a store that all share; `grace` is how many seconds it waits
    for them."""

    def __init__(self, store: Store, rank: int, size: int, grace: float = GRACE_SECONDS) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._grace = grace

    def report_failure(self, step: int, words: str, *, raised: bool = False) -> None:
        """Writes down that this process ended step number `step`; `raised` if the fault is its own."""
        text = json.dumps({"step": step, "words": words, "raised": raised})
        _within(self._grace, lambda: self._store.set(_key(self._rank), text))

    def hear(self, step: int) -> Finding:
        """Waits for the others' testimony about this step and draws the conclusion."""
        heard = _within(self._grace + 1, lambda: self._collect(step))
        if heard is None:
            return Finding((), "the store that the processes share does not answer: its host or the link to it is gone")
        raised = [rank for rank, said in heard.items() if said["raised"]]
        if raised:
            return Finding(tuple(raised), "; ".join(f"rank {r} raised {heard[r]['words']}" for r in raised))
        silent = tuple(r for r in range(self._size) if r not in heard and r != self._rank)
        if silent:
            names = ", ".join(str(r) for r in silent)
            return Finding(
                silent, f"rank {names} gave no sign within {self._grace:g} s: killed, hanging, or out of reach"
            )
        return Finding((), "every rank is alive: a link between some of them is slow or gone")

    def _collect(self, step: int) -> dict[int, dict[str, Any]]:
        others = [r for r in range(self._size) if r != self._rank]
        heard: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._grace
        while True:
            for rank in others:
                if rank not in heard and self._store.check([_key(rank)]):
                    said = json.loads(self._store.get(_key(rank)))
                    # a neighbour may be a step ahead; older words are about other faults
                    if abs(said["step"] - step) <= 1:
                        heard[rank] = said
            if len(heard) == len(others) or time.monotonic() > deadline or any(s["raised"] for s in heard.values()):
                return heard
            time.sleep(0.05)


def _key(rank: int) -> str:
    return f"shf/testimony/{rank}"


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of a call, or None if it failed or did not return in time: a store behind a cut link blocks."""
    result: list[T] = []

    def run() -> None:
        try:
            result.append(call())
        except (RuntimeError, OSError, ValueError):
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
