"""A convolutional network of LeNet's size on MNIST with dropout: SHF against Adam and SGD with momentum, equal time.

python examples/cnn.py --seconds 600
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shf.lab.baselines.registry import find
from shf.lab.contest import Method, Row, Step, Task, by_gradient, contest, parser, stochastic
from shf.lab.data import Dataset, load

HELD_OUT = 5000
LOSS = nn.CrossEntropyLoss()
SHF = {"damping": 0.1, "cg_iterations": 3, "curvature_batch": 200, "preconditioner": "kronecker", "update_decay": 0.998}


def network() -> nn.Sequential:
    """6 and 16 maps, 120 and 84 units: 61,706 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(84, 10),
    )


def errors(model: nn.Module, inputs: Tensor, targets: Tensor) -> int:
    return sum(
        int((model(x).argmax(1) != t).sum()) for x, t in zip(inputs.split(2000), targets.split(2000), strict=True)
    )


def digits(data: Dataset) -> Task:
    """MNIST; the last rows of the training set are held out, for the choice of rates."""
    inputs, targets = data.train_inputs.unflatten(1, (28, 28)), data.train_targets
    test = data.test_inputs.unflatten(1, (28, 28))
    rows = len(inputs) - min(HELD_OUT, len(inputs) // 2)

    def batches(size: int, source: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for chosen in torch.randperm(rows, generator=source).split(min(size, rows)):
                yield inputs[chosen], targets[chosen]

    def evaluate(model: nn.Module) -> Row:
        held_out = inputs[rows:], targets[rows:]
        return {
            "held_out_loss": LOSS(model(held_out[0]), held_out[1]).item(),
            "test_errors": errors(model, test, data.test_targets),
        }

    return Task("cnn", network, batches, evaluate, tuned_on="held_out_loss")


def sgd(model: nn.Module, rate: float) -> Step:
    return by_gradient(model, LOSS, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9))


def methods(epoch: int) -> list[Method]:
    rates = (0.01, 0.003, 0.001, 0.0003)
    return [
        Method("shf", 1000, lambda m, _: stochastic(m, LOSS, epoch, **SHF, seed=0), settings=SHF),
        Method("adam", 100, lambda m, r: find("adam").build(m, LOSS, {"learning_rate": r}).step, rates),
        Method("sgd", 100, sgd, (0.1, 0.03, 0.01, 0.003), {"momentum": 0.9}),
    ]


def main() -> None:
    options = parser(__doc__, seconds=120)
    options.add_argument("--cases", type=int, help="use only so many cases for training, and for the test")
    chosen = options.parse_args()
    task = digits(load("mnist", train=chosen.cases, test=chosen.cases, standardise=False))
    contest([task], methods(epoch=55), chosen)


if __name__ == "__main__":
    main()
