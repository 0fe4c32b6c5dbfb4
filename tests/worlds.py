"""Runs a function on several ranks on this machine, each a process with one thread, joined by gloo."""

import datetime
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed", "shf", "shf.lab.clock", "hypothesis", "pytest"]
)
# imported once, and not by every rank: what the tests' files import besides each other
GROUP_TIMEOUT = 1200.0


@dataclass(frozen=True)
class Outcome:
    """What a rank's function returned, or the error it raised, as (type name, text, ranks that it names)."""

    value: Any = None
    error: tuple[str, str, tuple[int, ...]] | None = None
    trace: str = ""


def run(size: int, function: Callable[..., Any], *args: Any, seconds: float = 1200.0) -> list[Any]:
    """The values that `function(rank, *args)` returns on each rank; an error on any rank is an error here."""
    outcomes = attempt(size, function, *args, seconds=seconds)
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None, f"rank {rank} ended without a word"
        assert outcome.error is None, f"rank {rank}:\n{outcome.trace}"
    return [outcome.value for outcome in outcomes if outcome is not None]


def attempt(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 1200.0,
    wait_for: Sequence[int] | None = None,
) -> list[Outcome | None]:
    """What happened on each rank; None for one that ended (was killed) without a word. Ranks that are not waited for are
    killed once the others are done."""
    queue = _CONTEXT.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that nobody else can take
    words = (size, store.port, queue, function, args)
    processes = [_CONTEXT.Process(target=_main, args=(rank, *words)) for rank in range(size)]
    for process in processes:
        process.start()
    outcomes: list[Outcome | None] = [None] * size
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    try:
        missing = set(range(size) if wait_for is None else wait_for)
        while missing and datetime.datetime.now() < deadline:
            try:
                rank, content = queue.get(timeout=0.1)
                outcomes[rank] = pickle.loads(content)  # noqa: S301 - from our own child
                missing.discard(rank)
            except Empty:
                missing -= {r for r in missing if processes[r].exitcode not in (None, 0) and queue.empty()}
        assert not missing, f"ranks {sorted(missing)} still run after {seconds} s"
        return outcomes
    finally:
        for rank, process in enumerate(processes):
            process.join(5 if wait_for is None or rank in wait_for else 0)
            if process.is_alive():
                process.kill()


def _main(rank: int, size: int, port: int, queue: Any, function: Callable[..., Any], args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    store, timeout = dist.TCPStore("127.0.0.1", port), datetime.timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        outcome = Outcome(value=function(rank, *args))
    except BaseException as error:
        outcome = Outcome(
            error=(type(error).__name__, str(error), tuple(getattr(error, "ranks", ()))), trace=traceback.format_exc()
        )
    queue.put((rank, pickle.dumps(outcome)))  # by value: torch's own way needs this process to live on
    queue.close()
    queue.join_thread()
    dist.destroy_process_group()
