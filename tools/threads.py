"""What a second thread gives and takes: `python tools/threads.py` compares steps on one thread and on all that torch has.

Steps take turns, so that what else the machine does meets both. Processor time stands beside time: threads that wait for
each other take it too.
"""

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import shf

CASES: dict[str, tuple[tuple[int, ...], int, int]] = {  # widths, rows, steps in a turn
    "10-50-50-1": ((10, 50, 50, 1), 148, 10),
    "64-128-128-10": ((64, 128, 128, 10), 500, 5),
    "256-500-500-10": ((256, 500, 500, 10), 1000, 2),
}


def optimizer(widths: tuple[int, ...], rows: int) -> tuple[shf.SHF, tuple[Any, Any]]:
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    batch = torch.randn(rows, widths[0]), torch.randn(rows, widths[-1])
    return shf.SHF(nn.Sequential(*layers[:-1]), nn.MSELoss(), seed=0), batch


def turn(own: shf.SHF, batch: tuple[Any, Any], steps: int, threads: int) -> tuple[float, float]:
    """Time and processor time of a few steps."""
    torch.set_num_threads(threads)
    own.step(*batch)
    begin, spent = time.perf_counter(), time.process_time()
    for _ in range(steps):
        own.step(*batch)
    return time.perf_counter() - begin, time.process_time() - spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds, most = parser.parse_args().rounds, torch.get_num_threads()
    for name, (widths, rows, steps) in CASES.items():
        own, batch = optimizer(widths, rows)
        pairs = [[turn(own, batch, steps, threads) for threads in (1, most)] for _ in range(rounds)]
        times, spent = (statistics.median(all_[k] / one[k] for one, all_ in pairs) for k in (0, 1))
        print(
            f"{name}, {rows} rows: {most} threads against one: {times:.2f} × the time, {spent:.2f} × the processor time"
        )


if __name__ == "__main__":
    main()
