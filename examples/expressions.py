"""A recursive network on nested expressions: SHF against Adagrad and L-BFGS, accuracy by depth.

Expressions are binary trees over the numbers 0 to 3 with three boolean operators, bit by bit (& | ^), and three arithmetic
ones modulo 4 (+ - ×); the network reads the tree and gives the value at its root. It sees depths 1 to 5 in training; the
test goes deeper.

python examples/expressions.py --seconds 600
"""

import operator
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shf.lab.baselines.registry import find
from shf.lab.contest import Method, Row, Task, contest, parser, stochastic
from trees import Tree, TreeLSTM, select_trees

NUMBERS = 4
OPERATORS: list[Callable[[int, int], int]] = [
    *(operator.and_, operator.or_, operator.xor),
    *(operator.add, operator.sub, operator.mul),
]
TRAINING_CASES, TRAINED_DEPTHS, TESTED_DEPTHS = 5000, range(1, 6), range(1, 9)
LOSS = nn.CrossEntropyLoss()
SHF = {"damping": 0.01, "cg_iterations": 10, "curvature_batch": 250, "preconditioner": None}


def expression(depth: int, source: torch.Generator) -> Tree:
    """A random expression of exactly this depth: one operand has depth - 1, the other any depth below."""

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=source))

    if depth == 0:
        return Tree(below(NUMBERS))
    operands = [expression(depth - 1, source), expression(below(min(depth, 4)), source)]
    left = below(2)
    return Tree(NUMBERS + below(len(OPERATORS)), (operands[left], operands[1 - left]))


def value(tree: Tree) -> int:
    if tree.children is None:
        return tree.symbol
    left, right = map(value, tree.children)
    return OPERATORS[tree.symbol - NUMBERS](left, right) % NUMBERS


def expressions(count: int, depths: range, seed: int) -> tuple[list[Tree], Tensor]:
    source = torch.Generator().manual_seed(seed)
    trees = [expression(depths[k % len(depths)], source) for k in range(count)]
    return trees, torch.tensor([value(tree) for tree in trees])


def nested(cases: int) -> Task:
    trees, targets = expressions(cases, TRAINED_DEPTHS, seed=1)
    held_out = expressions(500, TRAINED_DEPTHS, seed=2)
    test = {depth: expressions(300, range(depth, depth + 1), seed=3) for depth in TESTED_DEPTHS}

    def batches(size: int, source: torch.Generator) -> Iterator[tuple[list[Tree], Tensor]]:
        while True:
            for rows in torch.randperm(cases, generator=source).split(min(size, cases)):
                yield select_trees(trees, rows), targets[rows]

    def evaluate(model: nn.Module) -> Row:
        by_depth = {
            f"accuracy_depth_{depth}": 100 * (model(x).argmax(1) == t).double().mean().item()
            for depth, (x, t) in test.items()
        }
        seen = [by_depth[f"accuracy_depth_{depth}"] for depth in TRAINED_DEPTHS]
        error = 100 - sum(seen) / len(seen)
        return {"held_out_loss": LOSS(model(held_out[0]), held_out[1]).item(), "test_error_percent": error, **by_depth}

    symbols = NUMBERS + len(OPERATORS)
    return Task("expressions", lambda: TreeLSTM(symbols, 32, NUMBERS), batches, evaluate, tuned_on="held_out_loss")


def lbfgs(model: nn.Module, _: float) -> Callable[[list[Tree], Tensor], None]:
    """Ten iterations of L-BFGS on all cases at once."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, history_size=20, line_search_fn="strong_wolfe")

    def step(trees: list[Tree], targets: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            f = LOSS(model(trees), targets)
            f.backward()
            return f

        optimizer.step(closure)

    return step


def methods(cases: int) -> list[Method]:
    options = {**SHF, "count": len, "select": select_trees, "seed": 0}
    rates = (0.3, 0.1, 0.03, 0.01)
    return [
        Method("shf", 500, lambda m, _: stochastic(m, LOSS, max(cases // 500, 1), **options), settings=SHF),
        Method("adagrad", 50, lambda m, r: find("adagrad").build(m, LOSS, {"learning_rate": r}).step, rates),
        Method("lbfgs", cases, lbfgs),
    ]


def main() -> None:
    options = parser(__doc__, seconds=60)
    options.add_argument("--cases", type=int, default=TRAINING_CASES, help="expressions to train on")
    chosen = options.parse_args()
    contest([nested(chosen.cases)], methods(chosen.cases), chosen)


if __name__ == "__main__":
    main()
