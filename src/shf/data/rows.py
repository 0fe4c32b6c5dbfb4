"""Where the rows of a batch lie inside a tensor that a model made: found by how its shape scales with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shf.data.tree import leaves, map_leaves
from shf.errors import AmbiguousRowsError


@dataclass(frozen=True)
class RowAxis:
    """Rows lie along `axis`, `fold` entries each: (B·k, …) as a (B, k) block, or as (k, B) if `minor`."""

    axis: int
    fold: int = 1
    minor: bool = False

    def take(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """The entries of the given rows, in their order."""
        rows = rows.to(tensor.device)
        if self.fold == 1:
            return tensor.index_select(self.axis, rows)
        grouped: Tensor = tensor.unflatten(self.axis, (self.fold, -1) if self.minor else (-1, self.fold))
        axis = self.axis + 1 if self.minor else self.axis
        return grouped.index_select(axis, rows).flatten(self.axis, self.axis + 1)

    def to_front(self, tensor: Tensor) -> Tensor:
        """The tensor as (rows, …), everything of a row behind it."""
        if self.fold > 1:
            tensor = tensor.unflatten(self.axis, (self.fold, -1) if self.minor else (-1, self.fold))
            if self.minor:
                return tensor.movedim(self.axis + 1, 0)
        return tensor.movedim(self.axis, 0)

    def factor(self, per_row: Tensor, ndim: int) -> Tensor:
        """One number per row, shaped so that a tensor of this kind with `ndim` axes is multiplied row by row."""
        if self.fold > 1:
            per_row = per_row.repeat(self.fold) if self.minor else per_row.repeat_interleave(self.fold)
        return per_row.view([-1 if axis == self.axis else 1 for axis in range(ndim)])

    def cat(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins tensors of consecutive rows."""
        if self.fold == 1 or not self.minor:
            return torch.cat(list(parts), self.axis)
        split = [part.unflatten(self.axis, (self.fold, -1)) for part in parts]
        return torch.cat(split, self.axis + 1).flatten(self.axis, self.axis + 1)

    def resized(self, shape: Sequence[int], rows: int) -> list[int]:
        """The shape that a tensor of this kind has with `rows` rows."""
        return [rows * self.fold if axis == self.axis else n for axis, n in enumerate(shape)]


def even_chunks(rows: int, largest: int) -> list[Tensor]:
    """The numbers of all rows in as few chunks of at most `largest` as it takes, of even size: no remainder of one row,
    which a model that ends in `.squeeze()` would take for none."""
    return list(torch.arange(rows).tensor_split(-(-rows // largest)))


def infer_axis(full: Sequence[int], full_rows: int, part: Sequence[int], part_rows: int) -> RowAxis | None:
    """The row axis of a tensor, from its shapes with two different numbers of rows.

    Returns:
        None where the shapes are equal: the tensor is shared by all rows.

    Raises:
        AmbiguousRowsError: if several axes change, or one does not change in proportion to the rows.
    """
    if tuple(full) == tuple(part):
        return None
    changed = [a for a in range(len(full)) if full[a] != part[a]] if len(full) == len(part) else []
    if len(changed) == 1:
        axis = changed[0]
        fold, rest = divmod(full[axis], full_rows)
        if rest == 0 and fold * part_rows == part[axis]:
            return RowAxis(axis, fold)
    raise AmbiguousRowsError(
        f"its shape is {tuple(full)} with {full_rows} rows and {tuple(part)} with {part_rows}: "
        "no single axis grows in proportion to the rows"
    )


def join_outputs(parts: Sequence[Any], axes: Sequence[RowAxis | None]) -> Any:
    """Structures of outputs of consecutive rows, joined; `axes` belong to the floating-point tensors in order."""
    if len(parts) == 1:
        return parts[0]
    places = iter(axes)
    joined = []
    for column in zip(*(leaves(part) for part in parts), strict=True):
        axis = next(places) if column[0].is_floating_point() else _axis_of_others(column[0])
        if axis is not None and len({tuple(axis.resized(z.shape, 0)) for z in column}) > 1:
            raise unlike_shapes("microbatch", [tuple(z.shape) for z in column], "chunks of the rows")
        joined.append(column[0] if axis is None else axis.cat(column))
    tensors = iter(joined)
    return map_leaves(lambda _: next(tensors), parts[0])


def unlike_shapes(option: str, shapes: Sequence[Sequence[int]], where: str) -> ValueError:
    """The error of an output that is padded to another length on other rows."""
    return ValueError(
        f"{option}: an output has the shapes {[tuple(shape) for shape in shapes]} on {where}, which do not fit together; "
        f"pad it to one length for all (pad_packed_sequence has total_length), or use {option}=None"
    )


def _axis_of_others(tensor: Tensor) -> RowAxis | None:
    """Of an output that is no floating-point tensor (indices, masks): axis 0, unless it has no entries along it."""
    return RowAxis(0) if tensor.ndim and len(tensor) else None


def take_outputs(outputs: Any, axes: Sequence[RowAxis | None], rows: Tensor) -> Any:
    """The given rows of a structure of outputs; `axes` as in `join_outputs`."""
    places = iter(axes)

    def take(tensor: Tensor) -> Tensor:
        axis = next(places) if tensor.is_floating_point() else _axis_of_others(tensor)
        return tensor if axis is None else axis.take(tensor, rows)

    return map_leaves(take, outputs)
