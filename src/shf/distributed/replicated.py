"""The processes of a step over a channel: sums over rows, the same on every rank, and one end for all where one fails.

Each rank holds some rows of the gradient batch. Sums over rows become all-reduces over one flat buffer, whose result is
bitwise the same on every rank; whatever is decided from it is decided alike everywhere, so parameters stay equal without
being sent. Every message has a place for a failure: a rank that raises still sends, and all ranks end the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from shf.component import Component, flag, number, one_of, option, whole
from shf.data.draws import mix
from shf.data.repeatable import checksum
from shf.distributed.agreement import differences, to_text
from shf.distributed.channel import Channel, Traffic, find_group
from shf.distributed.collective import SINGLE, Agreement, Collective, Share
from shf.distributed.contribution import Contribution
from shf.errors import RankError
from shf.linear.flat import inner_products

T = TypeVar("T")

_COUNTS = 3
"""Counts in the first message of a step, which has one size, whoever takes part; where there are more, all follow in a
second one, once it is clear that everybody has as many."""
_NAMED = 5
"""How many differing tensors an error describes."""


@dataclass(frozen=True, kw_only=True)
class Communication(Component):
    """How ranks talk."""

    incidental: ClassVar[bool] = True

    split: bool = option(
        False,
        flag,
        """with several processes, split CG's vectors, preconditioner and δ over them, so that the optimizer's memory falls
        with their number; `state_dict` is then to be called on all of them.""",
        name="split_vectors",
    )
    message_dtype: str | None = option(
        None,
        one_of(None, "bfloat16"),
        """"bfloat16" to halve or quarter the messages between processes; None for the parameters' own dtype.""",
    )
    check_every: int = option(
        100, whole(least=1), "steps between two comparisons, bit by bit, of the parameters on all processes."
    )
    timeout: float | None = option(
        None,
        number(above=0.0, most=1e9, words=(None,)),
        """seconds until a process that does not answer is given up, set on the process group; None leaves the group's
        own.""",
        name="rank_timeout",
    )

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the vectors in messages; None for their own."""
        return torch.bfloat16 if self.message_dtype == "bfloat16" else None


class Connection:
    """`process_group=` of an optimizer, and the ranks behind it once they are there.

    Args:
        choice: a process group; "auto" for the default group once it is initialised; None for this process alone.
        communication: how ranks talk.
    """

    def __init__(self, choice: Any, communication: Communication) -> None:
        find_group(choice)
        self._choice = choice
        self._communication = communication
        self._ranks: Replicated | None = None

    def __repr__(self) -> str:
        return "alone" if self._choice is None else repr(self.ranks())

    def __deepcopy__(self, memo: dict[int, Any]) -> Connection:
        return Connection(self._choice, self._communication)

    def ranks(self) -> Collective:
        """The ranks as they are now: an "auto" connection follows the default group as it comes and goes."""
        group = find_group(self._choice)
        if group is None:
            return SINGLE
        if self._ranks is None or self._ranks.channel.group is not group:
            kind = Sharded if self._communication.split else Replicated
            self._ranks = kind(Channel(group, self._communication.timeout), self._communication)
        return self._ranks


class _Presence:
    """What this rank tells the others before a step, and what stays behind the numbers it sends."""

    def __init__(self, participant: Contribution, *, with_seed: bool, with_tensors: bool) -> None:
        self.participant = participant
        seed = {"seed": participant.seed} if with_seed else {}  # at first rank 0's is adopted, later they must agree
        self.facts = to_text({**seed, **participant.facts()})
        self.checksums = {n: checksum(t) for n, t in participant.tensors().items()} if with_tensors else {}

    def row(self) -> list[int]:
        counts = list(self.participant.counts)
        padding = [0] * (_COUNTS - len(counts))
        return [1, mix(self.facts), mix(*self.checksums.values()), *counts[:_COUNTS], *padding]


class Replicated(Collective):
    """The ranks of a process group, each with all of every vector."""

    def __init__(self, channel: Channel, communication: Communication) -> None:
        self.channel = channel
        self._communication = communication
        self._told: BaseException | None = None
        self._source = 0
        self._met = False  # whether an agreement has succeeded: rank 0's seed is everyone's from then on
        self.several = channel.size > 1

    @property
    def traffic(self) -> Traffic:
        return self.channel.traffic

    def __repr__(self) -> str:
        return repr(self.channel)

    @contextmanager
    def step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if error is not self._told and not isinstance(error, RankError):
                self.channel.report_failure(_describe(error))
            raise

    def agree(self, prepare: Callable[[], Contribution]) -> tuple[Contribution, Agreement]:
        channel = self.channel
        first = not self._met
        due = first or channel.exchange % self._communication.check_every == 0
        channel.exchange += 1
        own, error = _attempt(lambda: _Presence(prepare(), with_seed=not first, with_tensors=due))
        table = channel.gather_integers([0] * (3 + _COUNTS) if own is None else own.row())
        self._end_together(any(row[0] == 0 for row in table), error)
        assert own is not None
        if _vary(row[1] for row in table):
            words, ranks = differences(channel.gather_text(own.facts))
            raise RankError(f"the ranks are not about to do the same thing: {words}", ranks)
        if _vary(row[2] for row in table):
            self._refuse_drift(own.participant.tensors(), own.checksums)
        counts = own.participant.counts
        rows = channel.gather_integers(counts) if len(counts) > _COUNTS else [row[3:] for row in table]
        columns = [[row[k] for row in rows] for k in range(len(counts))]
        for what, column in zip(own.participant.required, columns, strict=False):
            if not any(column):
                raise ValueError(f"{what} is empty: none of the {channel.size} ranks has a row")
        self._source = next(rank for rank, rows in enumerate(columns[0]) if rows)
        seed = own.participant.seed
        seed = int(channel.gather_text(str(seed))[0]) if first else seed
        self._met = True
        return own.participant, Agreement([_share(column, channel.rank) for column in columns], seed)

    def add(self, numbers: Callable[[], Sequence[float]], count: int) -> list[float]:
        own, error = _attempt(numbers)
        *total, failures = self.channel.add_numbers([*(own or [0.0] * count), float(error is not None)])
        self._end_together(failures != 0, error)
        return total

    def sum(self, vector: Callable[[], Tensor], like: Tensor) -> Tensor:
        own, error = _attempt(vector)
        size = like.numel()
        packed = torch.empty(size + 1, dtype=self._communication.dtype or like.dtype, device=like.device)
        packed[:size] = 0 if own is None else own
        packed[size] = error is not None
        self.channel.all_reduce_(packed)
        self._end_together(packed[size].item() != 0, error)
        return packed[:size].to(like.dtype)

    def mine(self, number: int) -> bool:
        return number % self.channel.size == self.channel.rank

    def common(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dense = {n: t for n, t in tensors.items() if t.layout == torch.strided}  # sparse ones stay each rank's own
        if not dense:
            return dict(tensors)
        flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in dense.values()])
        self.channel.broadcast_(flat, self._source)
        pieces = flat.split([t.numel() * t.element_size() for t in dense.values()])
        found = {n: p.clone().view(t.dtype).view(t.shape) for (n, t), p in zip(dense.items(), pieces, strict=True)}
        return {**tensors, **found}

    def _end_together(self, failed: bool, error: BaseException | None) -> None:
        """Ends the step on all ranks if one of them failed: there with its own error, elsewhere with its name."""
        if not failed:
            return
        words = self.channel.gather_text("" if error is None else _describe(error))
        if error is not None:
            self._told = error
            raise error
        ranks = [rank for rank, text in enumerate(words) if text]
        raise RankError("; ".join(f"rank {r} raised {words[r]}" for r in ranks), ranks)

    def _refuse_drift(self, tensors: Mapping[str, Tensor], own: Mapping[str, int]) -> None:
        """Says which tensors differ from rank 0's, on which ranks, and by how much."""
        table = self.channel.gather_integers(list(own.values()))
        ranks = [rank for rank, row in enumerate(table) if row != table[0]]
        names = [name for k, name in enumerate(own) if _vary(row[k] for row in table)]
        found = []
        for name in names[:_NAMED]:
            theirs = self.channel.all_gather(tensors[name].detach().reshape(-1)).view(len(table), -1)
            gaps = {r: (theirs[r] - theirs[0]).abs().max().item() for r in ranks}
            found.append(f"{name} (by up to {', '.join(f'{gap:.3g} on rank {r}' for r, gap in gaps.items() if gap)})")
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise RankError(
            f"the ranks are not at the same point: {', '.join(found)}{more} differ from rank 0's. Begin with the same "
            "values everywhere (one seed before the model is built, or one checkpoint), change them nowhere else, and use "
            "the same kind of machine and number of threads",
            ranks,
        )


class Sharded(Replicated):
    """Ranks that split vectors of N entries among themselves: rank r holds entries rn … (r + 1)n - 1 with n = ⌈N/R⌉, the
    last ones fewer or none.

    A sum is a reduce-scatter and a whole vector an all-gather: together they cost what an all-reduce does.
    """

    split = True

    def __repr__(self) -> str:
        return f"{super().__repr__()}, vectors split"

    def part(self, size: int) -> range:
        n = self._length(size)
        return range(size)[self.channel.rank * n : (self.channel.rank + 1) * n]

    def own(self, vector: Tensor) -> Tensor:
        part = self.part(len(vector))
        return vector[part.start : part.stop].clone()

    def whole(self, part: Tensor, size: int) -> Tensor:
        n = self._length(size)
        padded = part if len(part) == n else torch.cat([part, part.new_zeros(n - len(part))])
        return self.channel.all_gather(padded)[:size]

    def dots(self, *pairs: tuple[Tensor, Tensor]) -> list[float]:
        return self.add(lambda: inner_products(*pairs), len(pairs))

    def sum(self, vector: Callable[[], Tensor], like: Tensor) -> Tensor:
        own, error = _attempt(vector)
        size, n, ranks = like.numel(), self._length(like.numel()), self.channel.size
        # every rank's part is followed by the place for a failure
        packed = torch.zeros(ranks, n + 1, dtype=self._communication.dtype or like.dtype, device=like.device)
        if own is not None:
            full = size // n
            packed[:full, :n] = own[: full * n].view(full, n)
            if full < ranks:
                packed[full, : size - full * n] = own[full * n :]
        packed[:, n] = error is not None
        mine = self.channel.reduce_scatter(packed)
        self._end_together(mine[n].item() != 0, error)
        return mine[: len(self.part(size))].to(like.dtype)

    def _length(self, size: int) -> int:
        return -(-size // self.channel.size)


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
