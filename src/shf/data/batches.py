"""Rows of a batch: counting them, selecting them, and which of them are the curvature batch (§4.4). No model here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shf.component import Component, one_of, option, whole
from shf.data.tree import leaves

Select = Callable[[Any, Tensor], Any]
Count = Callable[[Any], int]


@dataclass(frozen=True, kw_only=True)
class CurvatureBatch(Component):
    """Which rows of a gradient batch are the curvature batch (§4.4)."""

    size: int | None = option(
        None,
        whole(least=1, optional=True),
        "rows of the curvature batch [|X^c|]; None for all rows of the gradient batch.",
        name="curvature_batch",
    )
    order: str = option(
        "block",
        one_of("block", "strided"),
        """which rows of a gradient batch are the curvature batch in epoch e. "block": (eC + i) mod B for i < C, the paper's.
        "strided": (⌊iB/C⌋ + e) mod B, spread evenly over the batch; with several processes, a block may lie on one of them
        and leave the others idle, this gives each its proportion.""",
        name="curvature_rows",
    )

    def rows(self, total: int, epoch: int) -> Tensor | None:
        return curvature_rows(total, self.size, epoch, strided=self.order == "strided")


def curvature_rows(rows: int, size: int | None, epoch: int, *, strided: bool = False) -> Tensor | None:
    """The curvature batch of epoch e: rows (eC + i) mod B for i < C, so that it passes through every row in B/C epochs.

    Strided, it is rows (⌊iB/C⌋ + e) mod B instead: spread evenly over the batch, one further in each epoch.

    Args:
        rows: B, the rows of the gradient batch.
        size: C, the rows of the curvature batch; None or more than B: all of them.
        epoch: e, counted from 0.
        strided: which of the two.

    Returns:
        The row numbers, or None where they are all rows in their order.
    """
    if size is None or size >= rows:
        return None
    if strided:
        return (torch.arange(size) * rows // size + epoch) % rows
    return (epoch * size + torch.arange(size)) % rows


def count_rows(data: Any) -> int:
    """Rows of a structure of tensors: their common length along axis 0 (a PackedSequence counts its sequences)."""
    lengths = _lengths(data)
    if not lengths:
        raise TypeError(
            f"no tensors in {type(data).__name__}: expected a tensor, or a tuple, list or dict of tensors; "
            "for other data pass count= and select="
        )
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the tensors of a batch must agree in their number of rows (axis 0), got {lengths}; "
            "for data that is not rows of tensors pass count= and select="
        )
    return lengths[0]


def _lengths(data: Any) -> list[int]:
    if isinstance(data, PackedSequence):
        return [int(data.batch_sizes[0])]
    if isinstance(data, Tensor):
        if data.ndim == 0:
            raise ValueError(
                "a tensor of a batch has no rows (0 dimensions); for shared values pass select= and count="
            )
        return [data.shape[0]]
    if isinstance(data, Mapping):
        return [n for value in data.values() for n in _lengths(value)]
    if isinstance(data, tuple | list):
        return [n for value in data for n in _lengths(value)]
    return []


def select_rows(data: Any, rows: Tensor, total: int | None = None) -> Any:
    """The given rows of every tensor in a structure; CSR tensors and packed sequences included. Of a list without tensors,
    such as a batch of texts, they are taken where it has `total` entries."""
    if isinstance(data, PackedSequence):
        return _select_packed(data, rows)
    if isinstance(data, Tensor):
        if data.layout == torch.sparse_csr:
            return _select_csr(data, rows)
        return data.index_select(0, rows.to(data.device))
    if isinstance(data, Mapping):
        return {key: select_rows(value, rows, total) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(select_rows(value, rows, total) for value in data))
    if isinstance(data, list) and len(data) == total and not leaves(data):
        return [data[i] for i in rows.tolist()]
    if isinstance(data, tuple | list):
        return type(data)(select_rows(value, rows, total) for value in data)
    return data


def _select_csr(matrix: Tensor, rows: Tensor) -> Tensor:
    """Rows of a CSR matrix by its three arrays; nothing is made dense."""
    crow, col, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    rows = rows.to(crow.device)
    starts = crow[rows]
    lengths = crow[rows + 1] - starts
    new_crow = torch.cat([crow.new_zeros(1), lengths.cumsum(0)])
    total = int(new_crow[-1])
    within = torch.arange(total, device=crow.device) - new_crow[:-1].repeat_interleave(lengths, output_size=total)
    entries = starts.repeat_interleave(lengths, output_size=total) + within
    return torch.sparse_csr_tensor(
        new_crow.to(crow.dtype),
        col[entries],
        values[entries],
        size=(len(rows), matrix.shape[1]),
        check_invariants=False,
    )


def _select_packed(packed: PackedSequence, rows: Tensor) -> PackedSequence:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    rows = rows.cpu()
    return pack_padded_sequence(
        padded.index_select(0, rows.to(padded.device)), lengths[rows], batch_first=True, enforce_sorted=False
    )


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some cases, with the functions that count and select them."""

    inputs: Any
    targets: Any
    rows: int
    select: Select = select_rows

    @classmethod
    def of(
        cls,
        inputs: Any,
        targets: Any,
        select: Select = select_rows,
        count: Count = count_rows,
        *,
        may_be_empty: bool = False,
    ) -> Self:
        rows = count(inputs)
        if rows < 1 and not may_be_empty:
            raise ValueError(f"the batch is empty: {rows} rows, expected at least 1")
        if count is count_rows and leaves(targets) and (found := count_rows(targets)) != rows:
            raise ValueError(f"inputs have {rows} rows but targets have {found}: they must agree")
        return cls(inputs, targets, rows, select)

    def beside(self, rows: Tensor | None) -> Tensor | None:
        """Numbers of rows that will be taken several times, where the inputs lie: so they are sent there once."""
        held = leaves(self.inputs) if self.select is select_rows else []
        return rows.to(held[0].device) if rows is not None and held else rows

    def take(self, rows: Tensor | None) -> "Batch":
        """The batch of these rows only; None means all."""
        if rows is None:
            return self
        return Batch(self.take_inputs(rows), self.take_targets(rows), len(rows), self.select)

    def take_inputs(self, rows: Tensor | None) -> Any:
        return self._take(self.inputs, rows)

    def take_targets(self, rows: Tensor | None) -> Any:
        return self._take(self.targets, rows)

    def _take(self, data: Any, rows: Tensor | None) -> Any:
        if rows is None or data is None:
            return data
        return select_rows(data, rows, self.rows) if self.select is select_rows else self.select(data, rows)
