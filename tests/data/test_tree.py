"""Structures of tensors: listing their tensors, and mapping over them in the same order."""

from collections import OrderedDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import identical
from shf.data.tree import leaves, map_leaves

Pair = namedtuple("Pair", "left right")

tensors = st.integers(0, 9).map(lambda n: torch.tensor([float(n)]))
trees = st.recursive(
    st.one_of(tensors, st.none(), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(trees)
def test_mapping_follows_the_order_of_leaves(tree):
    seen = []
    map_leaves(lambda t: seen.append(t) or t, tree)
    assert all(a is b for a, b in zip(seen, leaves(tree), strict=True))


@given(trees)
def test_identity_keeps_structure_and_types(tree):
    assert identical(map_leaves(lambda t: t, tree), tree)


@given(trees)
def test_mapping_leaves_the_original_alone(tree):
    before = [t.clone() for t in leaves(tree)]
    doubled = map_leaves(lambda t: t * 2, tree)
    assert identical(leaves(tree), before)
    assert identical(leaves(doubled), [t * 2 for t in before])


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        (OrderedDict(b=torch.zeros(1), a=torch.ones(1)), OrderedDict),
        (MappingProxyType({"a": torch.ones(1)}), dict),
        (Pair(torch.zeros(1), torch.ones(1)), Pair),
    ],
)
def test_containers(tree, kind):
    result = map_leaves(Tensor.neg, tree)
    assert type(result) is kind
    assert identical(leaves(result), [-t for t in leaves(tree)])
