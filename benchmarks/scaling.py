"""Steps on several ranks of this machine: time, messages, bytes and memory, with vectors whole and split.

python benchmarks/scaling.py measure     # a quarter of an hour: writes benchmarks/results/scaling.json
python benchmarks/scaling.py report      # fits the cost model to that record and writes the tables of docs/scaling.md
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shf

RESULTS = Path(__file__).parent / "results" / "scaling.json"
RANKS = (1, 2, 3, 4)
HIDDEN = (100, 700, 2100)
ROWS, CURVATURE_ROWS, ITERATIONS = 480, 120, 3
MESSAGES = (1, 1_000, 100_000, 1_000_000, 5_000_000)
REPEATS = 5
_CONTEXT = multiprocessing.get_context("spawn")


def network(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    centres = torch.randn(10, 784, generator=source)
    targets = torch.randint(10, (rows,), generator=source)
    return centres[targets] + torch.randn(rows, 784, generator=source), targets


class Census(nn.CrossEntropyLoss):
    """Cross-entropy that counts, when asked to, the numbers in all tensors that are alive while CG is at work."""

    numbers: int | None = None
    asked = False

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.asked and not torch.is_grad_enabled():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.layout == torch.strided]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4 for t in tensors}
            self.numbers = max(self.numbers or 0, sum(storages.values()))
        return super().forward(outputs, targets)


def optimizer_of(model: nn.Module, loss: nn.Module, **options: Any) -> shf.SHF:
    """Damping stays high, so that every step does the same work: ζ iterations, as many evaluations."""
    settings = {"curvature_batch": CURVATURE_ROWS, "curvature_rows": "strided", "cg_iterations": ITERATIONS}
    return shf.SHF(model, loss, damping=30.0, seed=0, check_every=10**9, **settings, **options)


def own_rows(data: tuple[torch.Tensor, torch.Tensor], rank: int, size: int) -> list[torch.Tensor]:
    return [part.tensor_split(size)[rank] for part in data]


# --- what a rank does ---------------------------------------------------------------------------------------------------


def step_case(rank: int, size: int, hidden: int, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds, seconds waited, messages and bytes of the median step, and the numbers that are alive in another one."""
    model, loss = network(hidden), Census()
    optimizer = optimizer_of(model, loss, **options)
    data = own_rows(batch(ROWS), rank, size)
    optimizer.step(*data)
    optimizer.step(*data)
    traffic = optimizer._connection.ranks().traffic
    rows = []
    for _ in range(REPEATS):
        dist.barrier()
        waited, messages, sent, begin = traffic.seconds, traffic.messages, traffic.bytes, time.perf_counter()
        info = optimizer.step(*data)
        seconds = time.perf_counter() - begin
        rows.append((seconds, traffic.seconds - waited, traffic.messages - messages, traffic.bytes - sent, info))
    loss.asked = True
    optimizer.step(*data)
    seconds, waited, messages, sent, info = sorted(rows, key=lambda row: row[0])[len(rows) // 2]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "waited_seconds": waited,
        "messages": messages,
        "bytes": sent,
        "evaluations": info.evaluations,
        "products": info.products,
        "numbers_alive": loss.numbers,
    }


def message_case(rank: int, size: int) -> list[dict[str, float]]:
    """Seconds of one all-reduce, reduce-scatter and all-gather of float32 vectors."""
    found = []
    for numbers in MESSAGES:
        length = -(-numbers // size) * size
        vector, part = torch.ones(length), torch.ones(length // size)
        calls = {
            "all-reduce": lambda vector=vector: dist.all_reduce(vector),
            "reduce-scatter": lambda vector=vector, part=part: shf.distributed.channel._reduce_scatter(part, vector),
            "all-gather": lambda vector=vector, part=part: shf.distributed.channel._all_gather(vector, part),
        }
        for kind, call in calls.items():
            seconds = []
            for _ in range(3 + REPEATS):
                dist.barrier()
                begin = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - begin)
            found.append({"kind": kind, "bytes": 4 * length, "seconds": statistics.median(seconds[3:])})
    return found


def rounding_case(rank: int, size: int, seed: int, options: dict[str, Any]) -> list[float]:
    """f over 200 steps of a deep autoencoder with long CG runs, where rounding has most to spoil."""
    torch.manual_seed(seed)
    sizes = (64, 48, 24, 6, 24, 48, 64)
    layers = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.Sigmoid())]
    model = nn.Sequential(*layers[:-1])
    loss = shf.losses.per_case(nn.BCEWithLogitsLoss())
    optimizer = shf.SHF(model, loss, seed=seed, **{**shf.presets.autoencoder, **options})
    images = (torch.randn(ROWS, 6) @ torch.randn(6, 64)).sigmoid()
    data = own_rows((images, images), rank, size)
    return [optimizer.step(*data).loss_before for _ in range(200)]


# --- running them -------------------------------------------------------------------------------------------------------


def on_ranks(size: int, function: Any, *args: Any) -> list[Any]:
    """What `function(rank, size, *args)` returns on each of `size` new processes with one thread each."""
    queue = _CONTEXT.Queue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [_CONTEXT.Process(target=_rank, args=(r, size, port, queue, function, args)) for r in range(size)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=1800) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(size)]


def _rank(rank: int, size: int, port: int, queue: Any, function: Any, args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    queue.put((rank, function(rank, size, *args)))
    dist.barrier()
    dist.destroy_process_group()


def measure(path: Path) -> None:
    record: dict[str, Any] = {
        "command": "python benchmarks/scaling.py measure",
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "shf": shf.__version__},
        "load_before": os.getloadavg()[0],
        "step": {"rows": ROWS, "curvature_rows": CURVATURE_ROWS, "iterations": ITERATIONS},
        "steps": [],
        "messages": [],
        "rounding": [],
    }
    for size in RANKS:
        for hidden in HIDDEN:
            for name, options in (
                ("whole", {}),
                ("split", {"split_vectors": True}),
                ("bfloat16", {"message_dtype": "bfloat16"}),
            ):
                found = on_ranks(size, step_case, hidden, options)
                slowest = max(found, key=lambda row: row["seconds"])
                record["steps"].append({"ranks": size, "vectors": name, **slowest})
                save(record, path)
        if size > 1:
            record["messages"] += [{"ranks": size, **row} for row in on_ranks(size, message_case)[0]]
    for seed in range(3):
        for name, options in (("float32", {}), ("bfloat16", {"message_dtype": "bfloat16"})):
            values = on_ranks(2, rounding_case, seed, options)[0]
            record["rounding"].append(
                {"seed": seed, "messages": name, "f": {k: values[k - 1] for k in (1, 10, 50, 200)}}
            )
            save(record, path)


def save(record: dict[str, Any], path: Path) -> None:
    """After every figure, so that what has been measured is not lost."""
    record["load_after"] = os.getloadavg()[0]
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["measure", "report"])
    parser.add_argument("--record", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.action == "measure":
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        measure(arguments.record)
    else:
        from scaling_report import write_tables

        write_tables(json.loads(arguments.record.read_text()))


if __name__ == "__main__":
    main()
