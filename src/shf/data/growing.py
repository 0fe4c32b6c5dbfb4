"""Batches that grow as gradients become noisy (Byrd, Chin, Nocedal & Wu, 2012). Beyond the paper; off by default.

A batch S is large enough while tr Σ / |S| ≤ θ² ‖∇f_S‖²: the gradient's expected error is less than θ of its length. Where
it is not, |S| = tr Σ / (θ² ‖∇f_S‖²) would be. Early on gradients are long and small batches do; late, noise dominates.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from shf.data.batches import select_rows
from shf.data.draws import mix
from shf.info import StepInfo


@dataclass(frozen=True)
class BatchSize:
    """The size of batches, and the test that lets it grow.

    Attributes:
        size: rows of a batch now.
        largest: rows of a batch at most.
        tolerance: θ, between 0 and 1.
        fastest: the most by which one measurement may multiply the size.
        needed: tr Σ / ‖∇f‖² in rows, averaged over measurements; None before the first.
    """

    size: int
    largest: int
    tolerance: float = 0.7
    fastest: float = 1.5
    needed: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.largest:
            raise ValueError(f"batch size {self.size}: must be at least 1 and at most {self.largest}, the largest")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance}: must be greater than 0 and below 1")

    def next_of(self, rows: int) -> int:
        """How many of the rows that are left of an epoch to take next: they are cut evenly, into batches as near to the
        size as can be, so that none is a small rest whose step would undo what the others did."""
        batches = max(round(rows / self.size), math.ceil(rows / self.largest))
        return math.ceil(rows / batches)

    def hear(self, noise: float | None, rows: int) -> "BatchSize":
        """After a step on `rows` rows whose gradient had this noise, tr Σ / (|S| ‖∇f_S‖²); None where none was measured.

        The size never falls. A single measurement counts half: the one before it the other half.
        """
        if noise is None or not math.isfinite(noise):
            return self
        needed = noise * rows if self.needed is None else 0.5 * (self.needed + noise * rows)
        wanted = min(needed / self.tolerance**2, self.fastest * self.size, self.largest)
        return replace(self, size=max(self.size, math.floor(wanted)), needed=needed)


class GrowingLoader:
    """Shuffled batches of a dataset, of a size that grows when the steps made from them say so.

    Each epoch is a new order of all rows, cut evenly into batches as near as can be to the size that holds when one is asked
    for. The order depends on seed and epoch alone.

    Args:
        data: a torch Dataset with a length, or tensors that have rows in common, such as (inputs, targets).
        batch_size: rows of the first batch.
        largest: rows of a batch at most; by default a quarter of all, so that an epoch still is several steps.
        tolerance: θ of the test: smaller means larger batches.
        seed: of the order.
        generator: one that the seed is drawn from, in place of `seed`.
        collate_fn: makes a batch of a list of samples, as of torch's DataLoader; sequences of unequal lengths need one.
        num_workers: processes that load samples ahead, as of torch's DataLoader; batches that are under way keep their size.
        pin_memory: likewise.
        num_replicas: processes that share each batch, as of torch's DistributedSampler; `batch_size` counts the rows of all.
        rank: which of them this is. Together the processes take the batches, and the steps, that one alone would.
        **loading: what else torch's DataLoader takes for its workers: prefetch_factor, persistent_workers, worker_init_fn,
            multiprocessing_context, timeout.

    Example:
        >>> loader = GrowingLoader((torch.randn(1000, 4), torch.randint(3, (1000,))), batch_size=100)
        >>> optimizer = shf.SHF(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), noise_every=5)
        >>> for inputs, targets in loader:
        ...     loader.hear(optimizer.step(inputs, targets))
    """

    def __init__(
        self,
        data: Dataset[Any] | Sequence[Tensor],
        batch_size: int,
        *,
        largest: int | None = None,
        tolerance: float = 0.7,
        seed: int = 0,
        generator: torch.Generator | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        num_replicas: int = 1,
        rank: int = 0,
        **loading: Any,
    ) -> None:
        _refuse_loading(loading)
        tensors, samples = _as_tensors(data), data
        if tensors is not None:  # of which whole batches are taken, unless one asks for samples
            samples = _Columns(tensors) if collate_fn is None else TensorDataset(*tensors)
        if generator is not None:
            seed = int(torch.randint(2**62, (), generator=generator).item())
        whole = {"batch_size": batch_size, "seed": seed, "num_replicas": num_replicas, "rank": rank}
        for name, value in (whole if largest is None else {**whole, "largest": largest}).items():
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"GrowingLoader({name}={value!r}): must be a whole number")
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"GrowingLoader(rank={rank}, num_replicas={num_replicas}): ranks count from 0, below num_replicas"
            )
        lengths = {len(t) for t in tensors} if tensors is not None else {len(data)}  # type: ignore[arg-type]
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"data of lengths {sorted(lengths)}: expected one length, at least 1")
        self._rows = lengths.pop()
        most = max(batch_size, self._rows // 4) if largest is None else largest
        self._size = BatchSize(min(int(batch_size), self._rows), min(int(most), self._rows), float(tolerance))
        if num_replicas > 1 and self._size.size < 2 * num_replicas:  # an epoch's even cut may take a quarter off
            raise ValueError(
                f"GrowingLoader(batch_size={batch_size}, num_replicas={num_replicas}) of {self._rows} rows: batches must "
                "have at least two rows for every process"
            )
        self._seed = int(seed)
        self._replicas, self._rank = int(num_replicas), int(rank)
        self._epoch = 0
        self._last, self._ahead = 0, deque[int]()  # rows of the last batch, and of those that were begun after it
        self._source = torch.Generator()  # of what workers draw
        self._loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]
            batch_sampler=_Order(self),
            collate_fn=collate_fn or (_collate if tensors is None else _as_it_is),
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=self._source,
            **loading,
        )

    @property
    def batch_size(self) -> int:
        """Rows of a batch at present; batches are cut as near to it as the rows of an epoch allow."""
        return self._size.size

    def __len__(self) -> int:
        """Batches of an epoch at the present size."""
        left, batches = self._rows, 0
        while left:
            left, batches = left - self._size.next_of(left), batches + 1
        return batches

    def __iter__(self) -> Iterator[Any]:
        self._ahead.clear()
        self._source.manual_seed(mix(self._seed, self._epoch, 1))
        for batch in self._loader:
            self._last = self._ahead.popleft()
            yield batch

    def _rows_of_batches(self) -> Iterator[list[int]]:
        """Those of an epoch that begins: each is cut when it is asked for."""
        source = torch.Generator().manual_seed(mix(self._seed, self._epoch))
        self._epoch += 1
        order, begin = torch.randperm(self._rows, generator=source), 0
        while begin < self._rows:
            rows = order[begin : begin + self._size.next_of(self._rows - begin)]
            begin += len(rows)
            self._ahead.append(len(rows))
            yield rows.tensor_split(self._replicas)[self._rank].tolist()

    def hear(self, info: StepInfo) -> None:
        """Lets the batches grow if the step on the last batch found its gradient too noisy for their size.

        Args:
            info: what the step returned; its `gradient_noise` is measured by an optimizer with `noise_every`.
        """
        if self._last:  # none before the first batch
            self._size = self._size.hear(info.gradient_noise, self._last)

    def state_dict(self) -> dict[str, Any]:
        """What the next epoch begins with."""
        return {"epoch": self._epoch, "size": self._size.size, "needed": self._size.needed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken: with the epoch after the last one begun, at the size reached by then."""
        self._epoch = int(state["epoch"])
        self._size = replace(self._size, size=int(state["size"]), needed=state["needed"])


class _Order:
    """A loader's rows, batch by batch, as torch's DataLoader asks for them."""

    def __init__(self, loader: GrowingLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader._rows_of_batches()

    def __len__(self) -> int:
        return len(self._loader)


class _Columns(Dataset[Any]):
    """Tensors with rows in common, of which a DataLoader takes whole batches."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, ...]:
        return tuple(select_rows(t, torch.tensor(rows)) for t in self._tensors)


_LOADING = ("prefetch_factor", "persistent_workers", "worker_init_fn", "multiprocessing_context", "timeout")


def _refuse_loading(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _LOADING:
            own = name in ("shuffle", "sampler", "batch_sampler", "drop_last")
            why = (
                "it shuffles all rows in every epoch, and drops none"
                if own
                else f"beyond its own it has {', '.join(_LOADING)}"
            )
            raise TypeError(f"GrowingLoader({name}=...): {why}; leave it out")


def _as_it_is(batch: Any) -> Any:
    return batch


def _collate(samples: list[Any]) -> Any:
    return _as_in(samples[0], default_collate(samples))


def _as_in(sample: Any, collated: Any) -> Any:
    """Tuples where the samples have tuples: torch makes lists of them, and a list is one argument to a model."""
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(_as_in, sample, collated))
    if type(sample) in (tuple, list):
        return type(sample)(map(_as_in, sample, collated))
    if isinstance(sample, Mapping) and isinstance(collated, MutableMapping):
        collated.update({key: _as_in(sample[key], value) for key, value in collated.items()})
    return collated


def _as_tensors(data: Any) -> tuple[Tensor, ...] | None:
    """Tensors that have rows in common; None for a dataset of samples, which a list of them is too."""
    if type(data) is TensorDataset:  # whole batches are taken from it, where a loader would collate them row by row
        return data.tensors
    if isinstance(data, list | tuple) and data and all(isinstance(t, Tensor) for t in data):
        if any(t.ndim == 0 for t in data) or (isinstance(data, list) and len({t.shape for t in data}) == 1 < len(data)):
            raise TypeError(
                f"GrowingLoader(data=a {type(data).__name__} of {len(data)} tensors, the first of shape "
                f"{tuple(data[0].shape)}): samples, or columns? Give a tuple of tensors with rows for columns, and "
                "(torch.stack(samples),) for samples"
            )
        return tuple(data)
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if indexed and not isinstance(data, tuple | Mapping | IterableDataset):
        return None
    found = (
        f"({', '.join(sorted({type(t).__name__ for t in data}))})" if isinstance(data, tuple) else type(data).__name__
    )
    raise TypeError(
        f"GrowingLoader(data={found}): expected a Dataset with a length and an "
        "index (an iterable one has no rows to draw from), a list of samples, or a tuple of tensors"
    )
