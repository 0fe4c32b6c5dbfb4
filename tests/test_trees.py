"""The recursive network: composing a batch level by level gives what plain recursion gives, tree by tree."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shf
from helpers import assert_close
from trees import Tree, TreeLSTM, levels, select_trees

LEAVES, SYMBOLS = 4, 7
forests = st.lists(
    st.recursive(
        st.builds(Tree, st.integers(0, LEAVES - 1)),
        lambda tree: st.builds(Tree, st.integers(LEAVES, SYMBOLS - 1), st.tuples(tree, tree)),
        max_leaves=12,
    ),
    min_size=1,
    max_size=6,
)


def network() -> TreeLSTM:
    torch.manual_seed(0)
    return TreeLSTM(SYMBOLS, 5, 3).double()


def naive(model: TreeLSTM, tree: Tree) -> tuple[Tensor, Tensor]:
    """h and c of one tree, node after node."""
    x = model.embedding(torch.tensor([tree.symbol]))
    if tree.children is None:
        return torch.tanh(x), x
    (h_l, c_l), (h_r, c_r) = (naive(model, child) for child in tree.children)
    return model.compose(x, h_l, c_l, h_r, c_r)


def size(tree: Tree) -> int:
    return 1 if tree.children is None else 1 + sum(map(size, tree.children))


@given(forests)
def test_a_batch_gives_what_recursion_gives(trees):
    model = network()
    expected = torch.cat([model.out(naive(model, tree)[0]) for tree in trees])
    found = model(trees)
    assert_close(found.detach(), expected.detach(), 1e-12)
    ours, theirs = (
        torch.autograd.grad(z.square().sum(), list(model.parameters()), allow_unused=True) for z in (found, expected)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None) or not (b if a is None else a).any()
        if a is not None and b is not None:
            assert_close(a, b, 1e-10)


@given(forests)
def test_every_node_is_composed_once_after_its_children(trees):
    found, roots = levels(trees)
    assert len(found) == 1 + max(tree.height for tree in trees)
    assert sum(len(level.symbols) for level in found) == sum(map(size, trees))
    done = len(found[0].symbols)
    for level in found[1:]:
        assert max(level.left.max(), level.right.max()) < done
        done += len(level.symbols)
    assert len(roots) == len(trees)


def test_trees_are_selected_with_their_targets():
    trees = [Tree(k) for k in range(5)]
    rows = torch.tensor([3, 0])
    assert [tree.symbol for tree in select_trees(trees, rows)] == [3, 0]
    assert select_trees(torch.arange(5), rows).tolist() == [3, 0]


def test_training_on_a_list_of_trees():
    """Which of two leaves is larger: learned to the last tree, with curvature on some of them."""
    trees = [
        Tree(4, (Tree(a), Tree(b))) if a % 2 else Tree(5, (Tree(4, (Tree(a), Tree(a))), Tree(b)))
        for a in range(4)
        for b in range(4)
    ]
    targets = torch.tensor([int(a > b) for a in range(4) for b in range(4)])
    torch.manual_seed(0)
    model = TreeLSTM(6, 8, 2)
    options = {"damping": 0.01, "cg_iterations": 10, "curvature_batch": 12}
    optimizer = shf.SHF(model, nn.CrossEntropyLoss(), count=len, select=select_trees, seed=0, **options)
    infos = [optimizer.step(trees, targets) for _ in range(30)]
    assert infos[-1].loss_after < 0.05 * infos[0].loss_before
    assert torch.equal(model(trees).argmax(1), targets)
