"""Nested tuples, lists and mappings of tensors: what models take and return."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a structure, in order; everything else is passed over."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, tuple | list):
        return [leaf for value in tree for leaf in leaves(value)]
    return []


def entries(tensor: Tensor) -> Tensor:
    """The numbers of a tensor; of a sparse one those that it stores."""
    if tensor.layout == torch.strided:
        return tensor.detach()
    return (tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()).detach()


def parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor consists of: of a sparse one where its numbers are, too."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), entries(tensor)]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), entries(tensor)]
    return [entries(tensor)]


def map_leaves(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same structure with `function` applied to each tensor, in the order of `leaves`."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        result: Any = dict(tree) if not hasattr(tree, "__setitem__") else copy.copy(tree)
        for key in list(tree):
            result[key] = map_leaves(function, tree[key])
        return result
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_leaves(function, value) for value in tree)
    return tree
