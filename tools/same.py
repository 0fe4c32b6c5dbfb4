"""Whether two versions of shf train alike, bit by bit: `python tools/same.py OTHER/src` compares with this repository's src.

Each version makes fifty steps of each case in a process of its own, on one machine; the parameters at the end are compared,
and where they differ, by how much. A sum over two processes is one of the cases.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shf

STEPS, ROWS, FEATURES, CLASSES = 50, 60, 8, 3
OWN = Path(__file__).parents[1] / "src"


def network(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, CLASSES)]
    if dropout:
        layers.insert(4, nn.Dropout(dropout))
    return nn.Sequential(*layers)


def images() -> nn.Module:
    head = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.ReLU(), nn.Flatten())
    return nn.Sequential(head, nn.Linear(36, CLASSES))


def batches() -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, FEATURES, generator=source), torch.randint(CLASSES, (ROWS,), generator=source))
        for _ in range(5)
    ]


def train(make: Callable[[], nn.Module], options: dict[str, Any], share: slice = slice(None)) -> Tensor:
    """θ after all steps, five to an epoch."""
    torch.manual_seed(0)
    model, data = make(), batches()
    optimizer = shf.SHF(model, nn.CrossEntropyLoss(), seed=3, **options)
    for step in range(STEPS):
        inputs, targets = data[step % len(data)]
        optimizer.step(inputs[share], targets[share])
        if step % len(data) == len(data) - 1:
            optimizer.next_epoch()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def hessian_free(options: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    model, data = network(), batches()
    optimizer = shf.HF(model, nn.CrossEntropyLoss(), seed=3, **options)
    for step in range(STEPS // 5):
        optimizer.step(data, curvature=data[step % len(data)])
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _rank(rank: int, store: str, options: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    share = slice(0, 35) if rank == 0 else slice(35, ROWS)
    theta = train(partial(network, 0.3), options, share)
    if rank == 0:
        torch.save(theta, out)
    torch.distributed.barrier()  # neither leaves while the other still reads
    torch.distributed.destroy_process_group()


def two_processes(options: dict[str, Any]) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/theta"
        torch.multiprocessing.spawn(_rank, (f"{folder}/store", options, out), nprocs=2)
        found: Tensor = torch.load(out)
    return found


FAST = dict(shf.presets.fast)
CASES: dict[str, Callable[[], Tensor]] = {
    "default": lambda: train(network, {}),
    "curvature batch, decay": lambda: train(network, {"curvature_batch": 20, "weight_decay": 1e-3}),
    "dropout": lambda: train(partial(network, 0.3), {"curvature_batch": 20, "update_decay": 0.99}),
    "fast": lambda: train(network, FAST),
    "fast, dropout": lambda: train(partial(network, 0.3), {**FAST, "weight_decay": 1e-4}),
    "fast, convolution": lambda: train(images, FAST),
    "microbatch": lambda: train(partial(network, 0.3), {"microbatch": 16}),
    "fast, microbatch": lambda: train(network, {**FAST, "microbatch": 16}),
    "jacobi, first worse": lambda: train(network, {"preconditioner": "jacobi", "backtracking": "first-worse"}),
    "no preconditioner, max norm": lambda: train(network, {"preconditioner": None, "max_norm": "fan-in"}),
    "held-out": lambda: train(network, {"damping_rule": "held-out", "damping_factor": 0.8}),
    "exact momentum, worth": lambda: train(network, {"delta_momentum": "exact", "cg_worth": True, "cg_iterations": 8}),
    "HF": lambda: hessian_free({}),
    "HF, decay": lambda: hessian_free({"weight_decay": 1e-3, "preconditioner": "jacobi"}),
    "two processes": lambda: two_processes({"curvature_batch": 20}),
    "two processes, fast": lambda: two_processes(FAST),
    "two processes, split": lambda: two_processes({"split_vectors": True, "weight_decay": 1e-3}),
}


def dump(path: Path) -> None:
    torch.set_num_threads(1)
    torch.save({name: case() for name, case in CASES.items()}, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="the src of the other version")
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.dump:
        dump(chosen.dump)
        return 0
    if chosen.other is None:
        parser.error("give the src of the other version")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, src in (("other", chosen.other.resolve()), ("own", OWN)):
            out = Path(folder) / name
            environment = {**os.environ, "PYTHONPATH": str(src)}
            subprocess.run([sys.executable, __file__, "--dump", str(out)], env=environment, check=True)
            found.append(torch.load(out))
    other, own = found
    different = 0
    for name in CASES:
        same = torch.equal(other[name], own[name])
        different += not same
        gap = (other[name] - own[name]).abs().max() / other[name].abs().max()
        print(f"{name:30} {'the same, bit by bit' if same else f'differ by {gap:.2g} of the largest parameter'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
