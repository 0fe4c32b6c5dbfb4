"""The pathological long-term tasks on a plain tanh network: SHF with structural damping against Adam with clipping.

Adding: two marked numbers are to be remembered; wanted is ½ + (a + b)/4, within 0.04. Temporal order: two of the symbols
are X or Y; wanted is which of XX, XY, YX, YY. As in Martens & Sutskever (2011): lengths T to 1.1 T, events in the first
tenth and half (adding), in the second and sixth tenth (order). Solved, and over: < 1 % wrong of 2,000, held out and test.

python examples/longterm.py --T 50 100 --seconds 600 --seed 0 1 2
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shf
from shf.lab.contest import Method, Row, Step, Task, by_gradient, contest, parser, stochastic

UNITS, CONNECTIONS, RADIUS = 50, 15, 1.1
SHF = {"structural_damping": 0.03, "cg_iterations": 20, "curvature_batch": 200, "backtracking": "first-worse"}
OWN = {"adding": {"damping": 0.01}, "order": {"damping": 0.03, "damping_rule": "held-out", "damping_factor": 0.9}}
Sequences = tuple[tuple[Tensor, Tensor], Tensor]


class Plain(nn.Module):
    """h_t = tanh(W x_t + R h_{t-1} + b), read at the end of each sequence; every h_t is held steady."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(inputs, UNITS), nn.Linear(UNITS, outputs)
        self.over = nn.Linear(UNITS, UNITS, bias=False)
        with torch.no_grad():  # sparse, with a spectral radius above 1 (Sutskever et al., 2013)
            R = torch.randn(UNITS, UNITS) * (torch.rand(UNITS, UNITS).argsort(1) < CONNECTIONS)
            self.over.weight.copy_(R * RADIUS / torch.linalg.eigvals(R).abs().max())
            nn.init.normal_(self.into.weight, std=0.5)
            nn.init.zeros_(self.into.bias)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h, states = x.new_zeros(len(x), UNITS), []
        for u in self.into(x).unbind(1):
            h = shf.hold_steady(torch.tanh(u + self.over(h)))
            states.append(h)
        return self.out(torch.stack(states, 1)[torch.arange(len(x)), lengths - 1])


def integers(low: float, high: float, count: int, source: torch.Generator) -> Tensor:
    return torch.randint(math.ceil(low), math.floor(high) + 1, (count,), generator=source)


def adding(T: int, count: int, source: torch.Generator) -> Sequences:
    lengths, rows = integers(T, 1.1 * T, count, source), torch.arange(count)
    x = torch.rand(count, int(1.1 * T), 1, generator=source) * torch.tensor([1.0, 0.0])
    first, second = integers(0, T / 10 - 1, count, source), integers(T / 10, T / 2 - 1, count, source)
    x[rows, first, 1] = x[rows, second, 1] = 1
    return (x, lengths), 0.5 + (x[rows, first, :1] + x[rows, second, :1]) / 4


def order(T: int, count: int, source: torch.Generator) -> Sequences:
    lengths, rows = integers(T, 1.1 * T, count, source), torch.arange(count)
    symbols = torch.randint(2, 6, (count, int(1.1 * T)), generator=source)
    events = torch.randint(2, (count, 2), generator=source)
    symbols[rows, integers(0.1 * T, 0.2 * T, count, source)] = events[:, 0]
    symbols[rows, integers(0.5 * T, 0.6 * T, count, source)] = events[:, 1]
    return (nn.functional.one_hot(symbols, 6).float(), lengths), 2 * events[:, 0] + events[:, 1]


def wrong(z: Tensor, targets: Tensor) -> float:  # in per cent
    right = z.argmax(1) == targets if z.shape[1] > 1 else (z - targets).abs() <= 0.04
    return 100 - 100 * right.double().mean().item()


def long_term(name: str, T: int, loss: nn.Module) -> Task:
    make, model = {"adding": (adding, partial(Plain, 2, 1)), "order": (order, partial(Plain, 6, 4))}[name]
    held_out, test = (make(T, 2000, torch.Generator().manual_seed(seed)) for seed in (10**6, 10**6 + 1))

    def batches(size: int, source: torch.Generator) -> Iterator[Sequences]:
        while True:
            yield make(T, size, source)

    def evaluate(model: nn.Module) -> Row:
        (z, y), (z_test, y_test) = ((model(*x), t) for x, t in (held_out, test))
        found = {"held_out_loss": loss(z, y).item(), "held_out_wrong_percent": wrong(z, y)}
        return {**found, "wrong_percent": wrong(z_test, y_test)}

    def solved(row: Row) -> bool:
        return max(row["held_out_wrong_percent"], row["wrong_percent"]) < 1

    return Task(f"{name}-{T}", model, batches, evaluate, "held_out_loss", solved)


def adam(loss: nn.Module, model: nn.Module, rate: float) -> Step:
    return by_gradient(model, loss, torch.optim.Adam(model.parameters(), lr=rate), clip=1.0)


def second_order(name: str, loss: nn.Module, **settings: Any) -> Method:
    chosen = {**SHF, **settings}
    return Method(name, 500, lambda m, _: stochastic(m, loss, epoch=50, **chosen, seed=0), settings=chosen)


def main() -> None:
    options = parser(__doc__, seconds=150)
    options.add_argument("--tasks", nargs="+", default=list(OWN), choices=list(OWN))
    options.add_argument("--T", type=int, nargs="+", default=[50], help="lengths")
    chosen = options.parse_args()
    for name, T in ((name, T) for T in chosen.T for name in chosen.tasks):
        loss = nn.MSELoss() if name == "adding" else nn.CrossEntropyLoss()
        methods = [
            second_order("shf", loss, **OWN[name]),
            second_order("shf-without", loss, **OWN[name], structural_damping=0.0),
            *([second_order("shf-own-batch", loss, damping=0.03)] if name == "order" else []),
            Method("adam", 100, partial(adam, loss), (0.01, 0.003, 0.001, 0.0003, 0.0001), {"clipped at": 1.0}),
        ]
        contest([long_term(name, T, loss)], methods, chosen)


if __name__ == "__main__":
    main()
