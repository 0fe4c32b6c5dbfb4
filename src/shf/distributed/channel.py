"""Messages between processes, through torch.distributed: the only module that uses it.

What is summed and what is said is decided elsewhere (`shf.distributed.replicated`); here a message gets through, or an error
names the process that is missing.
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shf.distributed.failure import GRACE_SECONDS, FailureReports
from shf.distributed.rendezvous import agree_on_start
from shf.errors import RankError


def find_group(choice: Any) -> Any:
    """The process group that `process_group=` stands for now: "auto" is the default group once it is initialised.

    Returns:
        None for a process alone.
    """
    available = dist.is_available()
    if choice is None:
        return None
    if choice == "auto":
        return dist.group.WORLD if available and dist.is_initialized() else None
    if available and choice is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this process is not one of the group's ranks")
    if not available or not isinstance(choice, dist.ProcessGroup):
        raise ValueError(f"process_group={choice!r}: expected a torch.distributed process group, 'auto' or None")
    return choice


def join(timeout: float = 3600.0) -> Channel | None:
    """Joins the processes that torchrun started, if it did; their default group is then initialised.

    Args:
        timeout: seconds that one of them may wait for another in this channel, while rank 0 does other things.

    Returns:
        A channel apart from the default group, which is left to optimizers; None in a process alone.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return None
    if not dist.is_initialized():
        store, rank, size = next(_rendezvous("env://"))
        start = _PrefixStore(agree_on_start(store, rank, size, timeout), store)
        dist.init_process_group("gloo", store=start, rank=rank, world_size=size)
    return Channel(dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout)))


def leave() -> None:
    """Ends what `join` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Traffic:
    """What this rank has handed to the network so far, and the seconds it has waited for it (and for slower ranks)."""

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Channel:
    """Messages among the ranks of a group. Every method that sends is called by all of them.

    Args:
        group: the process group.
        timeout: seconds until a rank that does not answer is given up, set on the group; None for the group's own.

    Attributes:
        rank: this process's number in the group.
        size: how many there are.
        traffic: messages and bytes so far.
        exchange: number of the exchange in progress (a step): what an error reports, and what testimonies are about.
    """

    def __init__(self, group: Any, timeout: float | None = None) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.traffic = Traffic()
        self.exchange = 0
        self._device = torch.device("cpu" if "gloo" in str(dist.get_backend_config(group)) else "cuda")
        self._reports = FailureReports(group.get_group_store(), self.rank, self.size, GRACE_SECONDS)
        if timeout is not None:
            self.wait_at_most(timeout)

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size} on {dist.get_backend(self.group)}"

    def wait_at_most(self, seconds: float) -> None:
        """How long this rank (each has its own limit) waits for the others in one message, and for their testimony."""
        self.group.set_timeout(datetime.timedelta(seconds=seconds))
        self._reports = FailureReports(self.group.get_group_store(), self.rank, self.size, min(GRACE_SECONDS, seconds))

    def all_reduce_(self, vector: Tensor) -> Tensor:
        """The sum over ranks, in place; bitwise the same everywhere."""
        self._send(vector, lambda: dist.all_reduce(vector, group=self.group, async_op=True))
        return vector

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Row number `rank` of the sum over ranks of (size, n) matrices."""
        own = torch.empty_like(rows[0])
        self._send(rows, lambda: _reduce_scatter(own, rows.view(-1), group=self.group, async_op=True))
        return own

    def all_gather(self, own: Tensor) -> Tensor:
        """Everyone's vector, all of one length, end to end."""
        whole = own.new_empty(self.size * len(own))
        self._send(own, lambda: _all_gather(whole, own, group=self.group, async_op=True))
        return whole

    def broadcast_(self, vector: Tensor, source: int) -> Tensor:
        """The vector of rank `source`, in place."""
        origin = dist.get_global_rank(self.group, source)
        self._send(vector, lambda: dist.broadcast(vector, origin, group=self.group, async_op=True))
        return vector

    def add_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Sums in float64."""
        return self.all_reduce_(torch.tensor(numbers, dtype=torch.float64, device=self._device)).tolist()

    def gather_integers(self, own: Sequence[int]) -> list[list[int]]:
        """Everyone's row of integers, in rank order."""
        row = torch.tensor(own, dtype=torch.int64, device=self._device)
        return self.all_gather(row).view(self.size, -1).tolist()

    def gather_text(self, own: str) -> list[str]:
        """Everyone's text, in rank order."""
        content = own.encode()
        lengths = [row[0] for row in self.gather_integers([len(content)])]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(content)] = as_bytes(content)
        rows = self.all_gather(padded.to(self._device)).view(self.size, -1)
        return [to_bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]

    def broadcast_bytes(self, content: bytes | None) -> bytes:
        """What rank 0 says; the others give None."""
        length = torch.tensor([len(content or b"")], device=self._device)
        size = int(self.broadcast_(length, 0))
        said = as_bytes(content) if content is not None else torch.empty(size, dtype=torch.uint8)
        return to_bytes(self.broadcast_(said.to(self._device), 0))

    def report_failure(self, words: str) -> None:
        """Lets the others know, when they miss this rank, that it left the exchange by an error of its own."""
        self._reports.report_failure(self.exchange, words, raised=True)

    def _send(self, payload: Tensor, start: Callable[[], Any]) -> None:
        """One message; if it fails, the ranks that are missing are named."""
        self.traffic.messages += 1
        self.traffic.bytes += payload.numel() * payload.element_size()
        begin = time.perf_counter()
        try:
            start().wait()
        except RuntimeError as error:
            self._reports.report_failure(self.exchange, f"{type(error).__name__}: {error}")
            finding = self._reports.hear(self.exchange)
            message = f"step {self.exchange} of this connection ended: {finding.words} (on rank {self.rank}: {error})"
            raise RankError(message, finding.ranks) from error
        self.traffic.seconds += time.perf_counter() - begin


# torch.distributed has these two where it is available, without declaring that it exports them
_rendezvous: Any = getattr(dist, "rendezvous", None)
_PrefixStore: Any = getattr(dist, "PrefixStore", None)

# torch 2.13 has new names for these two, and warns at the old ones
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def to_bytes(tensor: Tensor) -> bytes:
    """The content of a vector of bytes (without numpy, which torch does not require)."""
    own = tensor.cpu().contiguous()
    return ctypes.string_at(own.data_ptr(), own.numel())


def as_bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
