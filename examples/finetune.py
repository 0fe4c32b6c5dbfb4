"""Fine-tuning the last layers of a frozen network: SHF against Adam.

A convolutional network learns the digits 0 to 4; then its convolutions are frozen and its last layers learn 5 to 9 from few
examples. Parameters that are frozen have no part in gradients, curvature or vectors: they cost nothing but the pass
through them.

python examples/finetune.py --seconds 60
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import shf
from cnn import LOSS, errors, network
from shf.lab.baselines.registry import find
from shf.lab.contest import Method, Row, Task, contest, parser, stochastic
from shf.lab.data import Dataset, load

SHF = {**shf.presets.fast, "weight_decay": 1e-4}
FROZEN = 8  # modules of the network up to the first linear layer


def pretrained(data: Dataset, updates: int) -> nn.Sequential:
    """The network after some updates on digits below 5, its convolutions frozen and its last layers fresh."""
    torch.manual_seed(0)
    model, fresh = network(), network()
    mine = data.train_targets < 5
    inputs, targets = data.train_inputs[mine].unflatten(1, (28, 28)), data.train_targets[mine]
    method = find("adam").build(model, LOSS, {"learning_rate": 0.001})
    for _ in range(updates):
        rows = torch.randint(len(inputs), (100,))
        method.step(inputs[rows], targets[rows])
    for body in model[:FROZEN]:
        body.requires_grad_(False)
    return nn.Sequential(*model[:FROZEN], *fresh[FROZEN:])


def later_digits(data: Dataset, cases: int, updates: int) -> Task:
    """The digits from 5 on: so many cases to learn from, as many held out."""
    body = pretrained(data, updates)

    def part(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mine = targets >= 5
        return inputs[mine].unflatten(1, (28, 28)), targets[mine]

    inputs, targets = part(data.train_inputs, data.train_targets)
    test = part(data.test_inputs, data.test_targets)
    rows = min(cases, len(inputs) // 2)
    held_out = inputs[rows : 2 * rows], targets[rows : 2 * rows]

    def model() -> nn.Sequential:
        found = copy.deepcopy(body)
        for layer in found:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        return found

    def batches(size: int, source: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for chosen in torch.randperm(rows, generator=source).split(min(size, rows)):
                yield inputs[chosen], targets[chosen]

    def evaluate(model: nn.Module) -> Row:
        loss = LOSS(model(held_out[0]), held_out[1]).item()
        return {"held_out_loss": loss, "test_error_percent": 100 * errors(model, *test) / len(test[0])}

    return Task("finetune", model, batches, evaluate, tuned_on="held_out_loss")


def methods(cases: int) -> list[Method]:
    rates = (0.01, 0.003, 0.001, 0.0003, 0.0001)
    return [
        Method("shf", cases, lambda m, _: stochastic(m, LOSS, 1, **SHF, seed=0), settings=SHF),
        Method("adam", 100, lambda m, r: find("adam").build(m, LOSS, {"learning_rate": r}).step, rates),
    ]


def main() -> None:
    options = parser(__doc__, seconds=30)
    options.add_argument("--cases", type=int, default=1000, help="training cases of the digits from 5 on")
    options.add_argument("--pretraining", type=int, default=500, help="updates on the digits below 5")
    chosen = options.parse_args()
    data = load("mnist", standardise=False)
    contest([later_digits(data, chosen.cases, chosen.pretraining)], methods(chosen.cases), chosen)


if __name__ == "__main__":
    main()
