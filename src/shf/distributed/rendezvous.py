"""A name for one start of the processes, on which they agree in a store that outlives them.

torchrun starts its processes anew after a fault, but may keep the store of the start before: what a process left there,
its address above all, would be taken for that of its successor. So the processes agree on a name before they connect, and
keep everything that follows under a name that only this start has.

    rank 0       writes its name, waits until every rank has answered to it, and closes it with the answers
    rank r > 0   answers to the name it finds, until one is closed that holds its own answer
"""

import json
import time
import uuid

from shf.distributed.failure import Store

PAUSE_SECONDS = 0.02


def agree_on_start(store: Store, rank: int, size: int, timeout: float) -> str:
    """Waits for all processes of this start, at most `timeout` seconds. Those of earlier starts shared the same store.

    Returns:
        The name of this start, the same for every process of it and for no other.

    Raises:
        TimeoutError: not all processes came.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set("shf/start", own)
    while time.monotonic() < deadline:
        name = _close(store, own, size) if rank == 0 else _answer(store, own, rank)
        if name:
            return name
        time.sleep(PAUSE_SECONDS)
    raise TimeoutError(f"rank {rank}: not all of the {size} processes came within {timeout:g} s")


def _close(store: Store, own: str, size: int) -> str:
    """Rank 0: the name once every rank has answered, else ""."""
    answers = [_read(store, f"shf/start/{own}/{rank}") for rank in range(1, size)]
    if not all(answers):
        return ""
    store.set(f"shf/start/{own}/closed", json.dumps(answers))
    return own


def _answer(store: Store, own: str, rank: int) -> str:
    """Another rank: the name once it was closed with this very answer, else ""; the name found may be an old one."""
    name = _read(store, "shf/start")
    store.set(f"shf/start/{name}/{rank}", own)
    return name if own in json.loads(_read(store, f"shf/start/{name}/closed") or "[]") else ""


def _read(store: Store, key: str) -> str:
    """What the store has under this key, "" for nothing; never waits."""
    return store.get(key).decode() if store.check([key]) else ""
