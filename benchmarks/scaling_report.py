"""The tables of docs/scaling.md, from a record of benchmarks/scaling.py and the cost model fitted to it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from costmodel import Machine, Shape, bytes_held, fit_positive, rate
from shf.lab.pages import fill, table

DOCUMENT = Path(__file__).parents[1] / "docs" / "scaling.md"

CLUSTER = Machine(
    name="one A100 (40 GB) per rank, one Slingshot 11 port each",
    flops=0.4 * 156e12,  # TF32 peak, and the part of it that large matrix products reach
    numbers=0.7 * 1555e9 / 4,  # float32 numbers through the memory's bandwidth
    bandwidth=0.8 * 25e9,  # 200 Gb/s per port
    latency=5e-6,
    overhead=5e-3,
    memory=40e9,
    trees=True,
)
"""From data sheets. Nothing of it was measured for this project."""


def write_tables(record: dict[str, Any], document: Path = DOCUMENT) -> None:
    """Replaces what stands between the markers of the document."""
    fill(document, tables(record))


def tables(record: dict[str, Any]) -> dict[str, str]:
    machine = fit(record)
    return {
        "measured steps": measured_steps(record),
        "measured messages": measured_messages(record, machine),
        "measured memory": measured_memory(record),
        "measured rounding": measured_rounding(record),
        "fitted constants": fitted_constants(machine),
        "fitted steps": fitted_steps(record, machine),
        "predicted strong": predicted_strong(),
        "predicted weak": predicted_weak(),
        "predicted memory": predicted_memory(),
        "source": source(record),
    }


# --- the model ----------------------------------------------------------------------------------------------------------


def shape_of(record: dict[str, Any], row: dict[str, Any]) -> Shape:
    step = record["step"]
    return Shape(
        row["parameters"],
        step["rows"],
        step["curvature_rows"],
        step["iterations"],
        row["ranks"],
        width=2 if row["vectors"] == "bfloat16" else 4,
        split=row["vectors"] == "split",
    )


def fit(record: dict[str, Any]) -> Machine:
    """The constants of the machine that was measured: messages from messages, the rest from steps on one rank."""
    rows = record["messages"]
    halves = [2 if row["kind"] == "all-reduce" else 1 for row in rows]
    hops = [half * (row["ranks"] - 1) for half, row in zip(halves, rows, strict=True)]
    sent = [half * row["bytes"] * (row["ranks"] - 1) / row["ranks"] for half, row in zip(halves, rows, strict=True)]
    latency, per_byte = fit_positive([hops, sent], [row["seconds"] for row in rows])

    alone = [row for row in record["steps"] if row["ranks"] == 1 and row["vectors"] == "whole"]
    shapes = [shape_of(record, row) for row in alone]
    columns = [[1.0] * len(alone), [s.flops() for s in shapes], [s.vector_numbers() for s in shapes]]
    overhead, per_flop, per_number = fit_positive(columns, [row["seconds"] - row["waited_seconds"] for row in alone])
    return Machine("this machine", rate(per_flop), rate(per_number), rate(per_byte), latency, overhead)


# --- measured -----------------------------------------------------------------------------------------------------------


def measured_steps(record: dict[str, Any]) -> str:
    rows = (
        (
            f"{row['parameters']:,}",
            row["vectors"],
            row["ranks"],
            f"{row['seconds']:.3f}",
            f"{row['waited_seconds']:.3f}",
            row["messages"],
            f"{row['bytes'] / 1e6:.1f}",
        )
        for row in sorted(record["steps"], key=lambda r: (r["parameters"], ORDER[r["vectors"]], r["ranks"]))
    )
    return table(("parameters", "vectors", "ranks", "s/step", "of it waiting", "messages", "MB handed over"), rows)


ORDER = {"whole": 0, "split": 1, "bfloat16": 2}


def measured_messages(record: dict[str, Any], machine: Machine) -> str:
    rows = []
    for row in record["messages"]:
        half = 2 if row["kind"] == "all-reduce" else 1
        R = row["ranks"]
        model = half * (R - 1) * (machine.latency + row["bytes"] / R / machine.bandwidth)
        rows.append((row["kind"], R, f"{row['bytes']:,}", f"{1e3 * row['seconds']:.2f}", f"{1e3 * model:.2f}"))
    return table(("message", "ranks", "bytes", "ms measured", "ms by the fit"), rows)


def measured_memory(record: dict[str, Any]) -> str:
    largest = max(row["parameters"] for row in record["steps"])
    rows = [
        (
            row["ranks"],
            row["vectors"],
            f"{row['numbers_alive'] / largest:.1f}",
            f"{bytes_held(shape_of(record, row)) / 4 / largest:.1f}",
        )
        for row in record["steps"]
        if row["parameters"] == largest and row["vectors"] != "bfloat16"
    ]
    return table(("ranks", "vectors", "numbers alive / N", "of them counted by the model"), rows)


def measured_rounding(record: dict[str, Any]) -> str:
    rows = [
        (row["seed"], row["messages"], *(f"{value:.4f}" for value in row["f"].values())) for row in record["rounding"]
    ]
    steps = [f"f at step {k}" for k in record["rounding"][0]["f"]]
    return table(("seed", "messages", *steps), rows)


def source(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    return (
        f"Record: `benchmarks/results/scaling.json`, made by `{record['command']}` on {record['when'][:10]}: "
        f"{machine['cores']} cores ({machine['processor']}), one thread per rank, gloo over the loopback device, "
        f"torch {versions['torch']}. Other programs were running: load {record['load_before']:.1f} before and "
        f"{record['load_after']:.1f} after. Each step has {record['step']['rows']} rows, "
        f"{record['step']['curvature_rows']} of them for curvature (strided), and {record['step']['iterations']} CG "
        "iterations; the median of five steps on the slowest rank is given."
    )


# --- fitted -------------------------------------------------------------------------------------------------------------


def fitted_constants(machine: Machine) -> str:
    vectors = f"{machine.numbers / 1e9:.2f} G numbers/s per rank"
    rows = [
        ("matrix products", f"{machine.flops / 1e9:.1f} Gflop/s per rank"),
        ("vector arithmetic", vectors if math.isfinite(machine.numbers) else "not told apart from matrix products"),
        ("bandwidth", f"{machine.bandwidth / 1e9:.2f} GB/s per rank, while it receives as much"),
        ("latency", f"{1e6 * machine.latency:.0f} µs per hop"),
        ("overhead", f"{1e3 * machine.overhead:.1f} ms per step"),
    ]
    return table(("constant", "fitted"), rows)


def fitted_steps(record: dict[str, Any], machine: Machine) -> str:
    """More ranks than cores share them: the model's compute is stretched by ranks / cores."""
    cores, rows = record["machine"]["cores"], []
    for row in sorted(record["steps"], key=lambda r: (r["parameters"], ORDER[r["vectors"]], r["ranks"])):
        shape = shape_of(record, row)
        crowded = max(1.0, row["ranks"] / cores)
        seconds = crowded * machine.compute_seconds(shape) + machine.message_seconds(shape)
        rows.append(
            (
                f"{row['parameters']:,}",
                row["vectors"],
                row["ranks"],
                f"{row['seconds']:.3f}",
                f"{seconds:.3f}",
                f"{seconds / row['seconds']:.2f}",
            )
        )
    return table(("parameters", "vectors", "ranks", "s measured", "s by the model", "ratio"), rows)


# --- predicted ----------------------------------------------------------------------------------------------------------

RANKS = (8, 64, 512, 4096)
PARAMETERS = (1e8, 1e9, 1e10, 1e11)
STRONG_ROWS, WEAK_ROWS, SHARE, ITERATIONS = 65_536, 512, 10, 3


def predicted_strong() -> str:
    """The same batch on more and more ranks."""
    table = _predicted(lambda ranks: STRONG_ROWS)
    return f"The same batch of {STRONG_ROWS:,} rows on more and more ranks:\n\n{table}"


def predicted_weak() -> str:
    """The same number of rows on every rank."""
    return f"{WEAK_ROWS:,} rows on every rank:\n\n{_predicted(lambda ranks: WEAK_ROWS * ranks)}"


def _predicted(rows_of: Any) -> str:
    lines = []
    for N in PARAMETERS:
        for split in (False, True):
            cells = []
            for R in RANKS:
                B = rows_of(R)
                shape = Shape(N, B, B // SHARE, ITERATIONS, R, split=split)
                fits = bytes_held(shape) <= CLUSTER.memory
                cells.append(
                    f"{_seconds(CLUSTER.seconds(shape))}, {CLUSTER.efficiency(shape):.0%}{'' if fits else ' †'}"
                )
            lines.append((_power(N), "split" if split else "whole", *cells))
    return table(("parameters", "vectors", *(f"{R:,} ranks" for R in RANKS)), lines)


def predicted_memory() -> str:
    lines = []
    for N in PARAMETERS:
        shapes = [Shape(N, 1, 1, ITERATIONS, R, split=True) for R in RANKS]
        whole = bytes_held(Shape(N, 1, 1, ITERATIONS, 8))
        lines.append((_power(N), f"{whole / 1e9:.1f}", *(f"{bytes_held(s) / 1e9:.1f}" for s in shapes)))
    return table(("parameters", "GB whole", *(f"GB split, {R:,} ranks" for R in RANKS)), lines)


def _power(number: float) -> str:
    return "10" + str(round(len(f"{number:.0f}") - 1)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.2g} ms"
