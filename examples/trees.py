"""Recursive networks on trees of different shapes: a binary Tree-LSTM that composes a whole batch level by level.

A batch is a list of trees. The optimizer is told how to count and select them:

    shf.SHF(TreeLSTM(...), loss, count=len, select=select_trees)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shf.data.batches import select_rows


@dataclass(frozen=True, eq=False)
class Tree:
    """A binary tree of symbols: a leaf, or a node with a left and a right child."""

    symbol: int
    children: tuple[Tree, Tree] | None = None

    @property
    def height(self) -> int:
        """0 for a leaf."""
        return 0 if self.children is None else 1 + max(child.height for child in self.children)

    @cached_property
    def table(self) -> Tensor:
        """(nodes, 4): symbol, height, left and right child of every node (rows of this table, -1 for none), root last."""
        rows: list[tuple[int, int, int, int]] = []

        def visit(tree: Tree) -> int:
            left, right = (-1, -1) if tree.children is None else map(visit, tree.children)
            height = 0 if tree.children is None else 1 + max(rows[left][1], rows[right][1])
            rows.append((tree.symbol, height, left, right))
            return len(rows) - 1

        visit(self)
        return torch.tensor(rows)


class Level(NamedTuple):
    """The nodes of one height, of all trees: their symbols, and where their children stand among the lower nodes."""

    symbols: Tensor
    left: Tensor
    right: Tensor


def levels(trees: Sequence[Tree], device: torch.device | None = None) -> tuple[list[Level], Tensor]:
    """The nodes of a batch from the leaves up, and where the roots stand, if nodes are numbered in that order; for a network
    on this device."""
    sizes = torch.tensor([len(tree.table) for tree in trees])
    ends = sizes.cumsum(0)
    symbol, height, left, right = torch.cat([tree.table for tree in trees]).unbind(1)
    offset = (ends - sizes).repeat_interleave(sizes)
    order = height.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    found = []
    for nodes in order.split(height.bincount().tolist()):
        lower = [place[(child + offset)[nodes].clamp_min(0)] for child in (left, right)]
        found.append(Level(*(indices.to(device) for indices in (symbol[nodes], *lower))))
    return found, place[ends - 1].to(device)


class TreeLSTM(nn.Module):
    """The binary Tree-LSTM (Tai et al., 2015) with an embedding per symbol and an output at the root.

    With x the symbol's embedding, children (h_l, c_l) and (h_r, c_r), [i, f_l, f_r, o, u] = W [x, h_l, h_r] + b:

        c = σ(i) tanh(u) + σ(f_l) c_l + σ(f_r) c_r,   h = σ(o) tanh(c);   leaves have h = tanh(x), c = x.

    Args:
        symbols: how many there are.
        width: of x, h and c.
        outputs: of the linear layer at the root.
    """

    def __init__(self, symbols: int, width: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.gates = nn.Linear(3 * width, 5 * width)
        self.out = nn.Linear(width, outputs)

    def forward(self, trees: Sequence[Tree]) -> Tensor:
        """(trees, outputs)."""
        (leaves, *inner), roots = levels(trees, self.out.weight.device)
        cells = self.embedding(leaves.symbols)
        states = torch.tanh(cells)
        for level in inner:
            h, c = self.compose(
                self.embedding(level.symbols), *(t[i] for i in (level.left, level.right) for t in (states, cells))
            )
            states, cells = torch.cat([states, h]), torch.cat([cells, c])
        found: Tensor = self.out(states[roots])
        return found

    def compose(self, x: Tensor, h_l: Tensor, c_l: Tensor, h_r: Tensor, c_r: Tensor) -> tuple[Tensor, Tensor]:
        """h and c of nodes from their symbols and children, (nodes, width) each."""
        i, f_l, f_r, o, u = self.gates(torch.cat([x, h_l, h_r], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + f_l.sigmoid() * c_l + f_r.sigmoid() * c_r
        return o.sigmoid() * c.tanh(), c


def select_trees(data: Any, rows: Tensor) -> Any:
    """The given rows of a list of trees, or of the targets that belong to them."""
    if isinstance(data, list) and data and isinstance(data[0], Tree):
        return [data[i] for i in rows.tolist()]
    return select_rows(data, rows)
