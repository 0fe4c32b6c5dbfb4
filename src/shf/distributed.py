"""SHF on several processes, through torch.distributed: the only module that uses it.

Each process (rank) holds some rows of the gradient batch. Sums over rows become all-reduces over one flat buffer, whose
result is bitwise the same on every rank; whatever is decided from it is decided alike everywhere, so parameters stay equal
without being sent. Every message carries a place for a failure: a rank that raises still sends, and all ranks end the step.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shf.agreement import checksums, differences, to_text
from shf.cg import inner_product
from shf.randomness import mix
from shf.ranks import ALONE, Meeting, P, RankError, Ranks, Share, Whole
from shf.witness import GRACE_SECONDS, Witness

T = TypeVar("T")

_COUNTS = 3
"""How many counts a participant may have at most: messages have one size, whoever takes part."""
_NAMED = 5
"""How many differing tensors an error describes."""


@dataclass(frozen=True)
class Communication:
    """How ranks talk.

    Attributes:
        dtype: of the vectors in messages; None for their own.
        check_every: steps between two comparisons of the parameters' bits.
        timeout: seconds until a rank that does not answer is given up; None for the group's own.
        split: whether vectors of θ's size are split over the ranks.
    """

    dtype: torch.dtype | None = None
    check_every: int = 100
    timeout: float | None = None
    split: bool = False


@dataclass
class Traffic:
    """What this rank has handed to the network so far."""

    messages: int = 0
    bytes: int = 0


class _Presence(Generic[P]):
    """What this rank tells the others before a step, and what stays behind the numbers it sends."""

    def __init__(self, participant: P, *, with_seed: bool, with_tensors: bool) -> None:
        self.participant = participant
        seed = {"seed": participant.seed} if with_seed else {}  # at first rank 0's is adopted, later they must agree
        self.facts = to_text({**seed, **participant.facts()})
        self.checksums = checksums(participant.tensors()) if with_tensors else {}

    def row(self) -> list[int]:
        counts = list(self.participant.counts)
        padding = [0] * (_COUNTS - len(counts))
        return [1, mix(self.facts), mix(*self.checksums.values()), *counts, *padding]


class Connection:
    """`process_group=` of an optimizer, and the ranks behind it once they are there.

    Args:
        choice: a process group; "auto" for the default group once it is initialised; None for this process alone.
        communication: how ranks talk.
    """

    def __init__(self, choice: Any, communication: Communication) -> None:
        available = dist.is_available()
        if available and choice is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("process_group: this process is not one of the group's ranks")
        if choice is not None and choice != "auto" and not (available and isinstance(choice, dist.ProcessGroup)):
            raise ValueError(f"process_group={choice!r}: expected a torch.distributed process group, 'auto' or None")
        self._choice = choice
        self._communication = communication
        self._ranks: Distributed | None = None

    def __repr__(self) -> str:
        return "alone" if self._choice is None else repr(self.ranks())

    def __deepcopy__(self, memo: dict[int, Any]) -> Connection:
        return Connection(self._choice, self._communication)

    def ranks(self) -> Ranks:
        """The ranks as they are now: an "auto" connection follows the default group as it comes and goes."""
        group = self._choice
        if group == "auto":
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None:
            return ALONE
        if self._ranks is None or self._ranks.group is not group:
            kind = Split if self._communication.split else Distributed
            self._ranks = kind(group, self._communication)
        return self._ranks


class Distributed(Whole):
    """The ranks of a process group.

    Attributes:
        group: the process group.
        rank: this process's number in it.
        size: how many there are.
        traffic: messages and bytes so far.
    """

    def __init__(self, group: Any, communication: Communication) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()
        self._communication = communication
        self._device = torch.device("cpu" if "gloo" in str(dist.get_backend_config(group)) else "cuda")
        grace = min(GRACE_SECONDS, communication.timeout or GRACE_SECONDS)
        self._witness = Witness(group.get_group_store(), self.rank, self.size, grace)
        self._meetings = 0
        self._told: BaseException | None = None
        self._source = 0
        if communication.timeout is not None:
            group.set_timeout(datetime.timedelta(seconds=communication.timeout))

    @property
    def several(self) -> bool:
        return self.size > 1

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size} on {dist.get_backend(self.group)}"

    # --- a step ------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if error is not self._told and not isinstance(error, RankError):
                self._witness.testify(self._meetings, _describe(error), raised=True)
            raise

    def meet(self, prepare: Callable[[], P]) -> tuple[P, Meeting]:
        first, due = self._meetings == 0, self._meetings % self._communication.check_every == 0
        self._meetings += 1
        own, error = _attempt(lambda: _Presence(prepare(), with_seed=not first, with_tensors=due))
        table = self._gather_integers([0] * (3 + _COUNTS) if own is None else own.row())
        self._end_together(any(row[0] == 0 for row in table), error)
        assert own is not None
        if _vary(row[1] for row in table):
            words, ranks = differences(self._gather_text(own.facts))
            raise RankError(f"the ranks are not about to do the same thing: {words}", ranks)
        if _vary(row[2] for row in table):
            self._refuse_drift(own.participant.tensors(), own.checksums)
        columns = [[row[3 + k] for row in table] for k in range(len(own.participant.counts))]
        if not any(columns[0]):
            raise ValueError(f"the batch is empty: none of the {self.size} ranks has a row")
        self._source = next(rank for rank, rows in enumerate(columns[0]) if rows)
        seed = own.participant.seed
        seed = int(self._gather_text(str(seed))[0]) if first else seed
        return own.participant, Meeting([_share(column, self.rank) for column in columns], seed)

    def add(self, numbers: Callable[[], Sequence[float]], count: int) -> list[float]:
        own, error = _attempt(numbers)
        packed = torch.zeros(count + 1, dtype=torch.float64)
        packed[:count] = torch.tensor(own if own is not None else [0.0] * count, dtype=torch.float64)
        packed[count] = error is not None
        total = self._all_reduce(packed.to(self._device)).tolist()
        self._end_together(total[count] != 0, error)
        return total[:count]

    def sum(self, vector: Callable[[], Tensor], like: Tensor) -> Tensor:
        own, error = _attempt(vector)
        size = like.numel()
        packed = torch.empty(size + 1, dtype=self._communication.dtype or like.dtype, device=like.device)
        packed[:size] = 0 if own is None else own
        packed[size] = error is not None
        self._all_reduce(packed)
        self._end_together(packed[size].item() != 0, error)
        return packed[:size].to(like.dtype)

    def common(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not tensors:
            return {}
        flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors.values()])
        source = dist.get_global_rank(self.group, self._source)
        self._send(flat, lambda: dist.broadcast(flat, source, group=self.group, async_op=True))
        pieces = flat.split([t.numel() * t.element_size() for t in tensors.values()])
        return {
            name: piece.clone().view(t.dtype).view(t.shape)
            for (name, t), piece in zip(tensors.items(), pieces, strict=True)
        }

    # --- when ranks differ -------------------------------------------------------------------------------------------

    def _end_together(self, failed: bool, error: BaseException | None) -> None:
        """Ends the step on all ranks if one of them failed: there with its own error, elsewhere with its name."""
        if not failed:
            return
        words = self._gather_text("" if error is None else _describe(error))
        if error is not None:
            self._told = error
            raise error
        ranks = [rank for rank, text in enumerate(words) if text]
        raise RankError("; ".join(f"rank {r} raised {words[r]}" for r in ranks), ranks)

    def _refuse_drift(self, tensors: Mapping[str, Tensor], own: Mapping[str, int]) -> None:
        """Says which tensors differ from rank 0's, on which ranks, and by how much."""
        table = self._gather_integers(list(own.values()))
        ranks = [rank for rank, row in enumerate(table) if row != table[0]]
        names = [name for k, name in enumerate(own) if _vary(row[k] for row in table)]
        found = []
        for name in names[:_NAMED]:
            theirs = self._gather(tensors[name].detach().reshape(-1))
            gaps = {r: (theirs[r] - theirs[0]).abs().max().item() for r in ranks}
            found.append(f"{name} (by up to {', '.join(f'{gap:.3g} on rank {r}' for r, gap in gaps.items() if gap)})")
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise RankError(
            f"the ranks are not at the same point: {', '.join(found)}{more} differ from rank 0's. Begin with the same "
            "values everywhere (one seed before the model is built, or one checkpoint), change them nowhere else, and use "
            "the same kind of machine and number of threads",
            ranks,
        )

    # --- messages ----------------------------------------------------------------------------------------------------

    def _all_reduce(self, buffer: Tensor) -> Tensor:
        self._send(buffer, lambda: dist.all_reduce(buffer, group=self.group, async_op=True))
        return buffer

    def _gather(self, own: Tensor) -> list[Tensor]:
        own = own.to(self._device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._send(own, lambda: dist.all_gather(found, own, group=self.group, async_op=True))
        return found

    def _gather_integers(self, own: Sequence[int]) -> list[list[int]]:
        return [row.tolist() for row in self._gather(torch.tensor(own, dtype=torch.int64))]

    def _gather_text(self, own: str) -> list[str]:
        """Everyone's text; only where something is wrong, and once at the beginning."""
        content = own.encode()
        lengths = [row[0] for row in self._gather_integers([len(content)])]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else 0
        found = self._gather(padded)
        return [bytes(row[:n].tolist()).decode() for row, n in zip(found, lengths, strict=True)]

    def _send(self, payload: Tensor, start: Callable[[], Any]) -> None:
        """One message; if it fails, the ranks that are missing are named."""
        self.traffic.messages += 1
        self.traffic.bytes += payload.numel() * payload.element_size()
        try:
            start().wait()
        except RuntimeError as error:
            self._witness.testify(self._meetings, _describe(error))
            finding = self._witness.hear(self._meetings)
            message = f"step {self._meetings} of this connection ended: {finding.words} (on rank {self.rank}: {error})"
            raise RankError(message, finding.ranks) from error


class Split(Distributed):
    """Ranks that split vectors of N entries among themselves: rank r holds entries rn … (r + 1)n - 1 with n = ⌈N/R⌉, the
    last ones fewer or none.

    A sum is a reduce-scatter and a whole vector an all-gather: together they cost what an all-reduce does.
    """

    split = True

    def __repr__(self) -> str:
        return f"{super().__repr__()}, vectors split"

    def part(self, size: int) -> range:
        n = self._length(size)
        return range(size)[self.rank * n : (self.rank + 1) * n]

    def own(self, vector: Tensor) -> Tensor:
        part = self.part(len(vector))
        return vector[part.start : part.stop].clone()

    def whole(self, part: Tensor, size: int) -> Tensor:
        n = self._length(size)
        padded = part if len(part) == n else torch.cat([part, part.new_zeros(n - len(part))])
        found = part.new_empty(n * self.size)
        self._send(padded, lambda: _all_gather(found, padded, group=self.group, async_op=True))
        return found[:size]

    def dot(self, a: Tensor, b: Tensor) -> float:
        return self.add(lambda: [inner_product(a, b)], 1)[0]

    def sum(self, vector: Callable[[], Tensor], like: Tensor) -> Tensor:
        own, error = _attempt(vector)
        size, n = like.numel(), self._length(like.numel())
        # every rank's part is followed by the place for a failure
        packed = torch.zeros(self.size, n + 1, dtype=self._communication.dtype or like.dtype, device=like.device)
        if own is not None:
            full = size // n
            packed[:full, :n] = own[: full * n].view(full, n)
            if full < self.size:
                packed[full, : size - full * n] = own[full * n :]
        packed[:, n] = error is not None
        mine = torch.empty_like(packed[0])
        self._send(packed, lambda: _reduce_scatter(mine, packed.view(-1), group=self.group, async_op=True))
        self._end_together(mine[n].item() != 0, error)
        return mine[: len(self.part(size))].to(like.dtype)

    def _length(self, size: int) -> int:
        return -(-size // self.size)


# torch 2.13 has new names for these two, and warns at the old ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def refuse_unsupported(model: nn.Module, ranks: Ranks) -> None:
    """Refuses modules whose parameters or statistics are spread over processes by others."""
    loaded = sys.modules.get("torch.distributed.tensor")  # no DTensor exists where this was never imported
    for name, p in model.named_parameters():
        if loaded is not None and isinstance(p, loaded.DTensor):
            raise TypeError(
                f"parameter {name} is a DTensor (fully_shard, tensor parallelism): curvature products differentiate twice "
                "by whole parameters, which DTensor does not support; keep the model whole on every rank, and use "
                "split_vectors=True for the optimizer's own"
            )
    for name, m in model.named_modules():
        if isinstance(m, nn.SyncBatchNorm) and m.training and (ranks.several or _on_cpu(m)):
            raise TypeError(
                f"{name or 'the model'} is a SyncBatchNorm in training mode: torch has none on CPU, and none that can be "
                "differentiated twice; use BatchNorm (statistics of each rank's own rows), GroupNorm, or eval mode"
            )


def _on_cpu(module: nn.Module) -> bool:
    return all(t.device.type == "cpu" for t in [*module.parameters(), *module.buffers()])


def _attempt(call: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # sent to the other ranks first, raised afterwards
        return None, error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _vary(values: Iterable[int]) -> bool:
    return len(set(values)) > 1


def _share(counts: Sequence[int], rank: int) -> Share:
    ends = list(accumulate(counts, initial=0))
    return Share(ends[rank], counts[rank], ends[-1])
