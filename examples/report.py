"""Tables and charts of docs/examples.md from the records of the examples; of other records, the tables alone, printed.

python examples/report.py
python examples/report.py runs/examples
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shf.lab.contest import read_contest
from shf.lab.pages import fill, spread, table
from shf.lab.plots import Chart, Series, draw
from shf.lab.records import RunRecord

DOCS = Path(__file__).parent.parent / "docs"
RECORDS = DOCS.parent / "results" / "examples"


@dataclass(frozen=True)
class Topic:
    """One task of the page: the measure that is judged, its words, and below what a run has solved the task."""

    task: str
    metric: str
    words: str
    solved_below: float | None = None


TOPICS = (
    Topic("cnn", "test_errors", "test errors of 10,000"),
    *(
        Topic(f"{task}-{T}", "wrong_percent", "sequences wrong, %", solved_below=1.0)
        for T in (50, 100, 200)
        for task in ("adding", "order")
    ),
    Topic("expressions", "test_error_percent", "wrong at depths 1 to 5, %"),
    Topic("characters", "validation_loss", "validation loss, nats per character"),
    Topic("finetune", "test_error_percent", "test error, %"),
)


def runs(root: Path, task: str) -> dict[str, list[RunRecord]]:
    """The records of one task by method, SHF first."""
    found = {method: list(by_seed.values()) for method, by_seed in read_contest(root / task).items()}
    return dict(sorted(found.items(), key=lambda item: item[0] != "shf"))


def results(topic: Topic, found: dict[str, list[RunRecord]]) -> str:
    heads = ["", topic.words, "updates", "batch", "set beforehand"] + ["solved"] * (topic.solved_below is not None)
    rows = []
    for method, records in found.items():
        ends = [record.column(topic.metric)[-1].item() for record in records]
        updates = spread([record.column("updates")[-1].item() for record in records], ".0f")
        config = records[0].config
        settings = ", ".join(f"{name} {value}" for name, value in config["settings"].items())
        settings += choice(config["tuning"])
        runs = f"{len(records)} run" + "s" * (len(records) > 1)
        cells = [f"{method}, {runs}", spread(ends), updates, str(config["rows"]), settings or "nothing"]
        if topic.solved_below is not None:
            cells.append(solutions(topic, records))
        rows.append(cells)
    seconds = sorted({record.config["seconds"] for records in found.values() for record in records})
    budget = f"{' or '.join(f'{s:g}' for s in seconds)} processor seconds each"
    until = ", or until the task is solved" if topic.solved_below is not None else ""
    return f"{table(heads, rows)}\n\n{budget}{until}; mean and range over seeds."


def choice(tuning: Mapping[str, Any]) -> str:
    """How a rate was chosen, in words."""
    if not (found := tuning.get("found")):
        return ""
    values = list(found.values())
    edge = min(values) in (values[0], values[-1])
    return f" (best of {len(found)}, {tuning['seconds_each']:g} s each{'; an end of its grid' if edge else ''})"


def solutions(topic: Topic, records: Sequence[RunRecord]) -> str:
    """How many runs end below the threshold, and when they first were."""
    assert topic.solved_below is not None
    solved = [r for r in records if r.column(topic.metric)[-1] < topic.solved_below]
    times = [r.column("processor_seconds")[-1].item() for r in solved]  # a run ends when it has solved its task
    when = f", after {', '.join(f'{t:.0f}' for t in sorted(times))} s" if times else ""
    return f"{len(times)} of {len(records)}{when}"


def overview(tasks: Mapping[Topic, dict[str, list[RunRecord]]]) -> str:
    """Which of the tasks that can be solved each method solves."""
    methods = list(dict.fromkeys(method for found in tasks.values() for method in found))
    rows = [
        (topic.task.replace("-", ", T = "), *(solutions(topic, found[m]) if m in found else "" for m in methods))
        for topic, found in tasks.items()
    ]
    return table(("", *methods), rows)


def by_depth(found: dict[str, list[RunRecord]]) -> str:
    """Accuracy of the expressions by depth, means over seeds."""
    names = [name for name in next(iter(found.values()))[0].epochs[0] if name.startswith("accuracy_depth_")]
    rows = [
        (method, *(f"{statistics.fmean(r.column(name)[-1].item() for r in records):.1f}" for name in names))
        for method, records in found.items()
    ]
    return table(("depth", *(name.rsplit("_", 1)[1] for name in names)), rows)


def chart(topic: Topic, found: dict[str, list[RunRecord]]) -> Chart:
    series = [
        Series(method if k == 0 else "", r.column("processor_seconds"), r.column(topic.metric), colour)
        for colour, (method, records) in enumerate(found.items())
        for k, r in enumerate(records)
    ]
    values = np.concatenate([s.y for s in series])
    log = bool((values > 0).all() and values.max() > 4 * values.min())
    return Chart(f"example-{topic.task}", topic.words, "processor seconds of updates", tuple(series), log_y=log)


def parts(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The page's tables by their names on it, and the charts by file name."""
    tables, charts = {}, {}
    solvable = {t: found for t in TOPICS if t.solved_below is not None and (found := runs(root, t.task))}
    if solvable:
        tables["solved"] = overview(solvable)
    for topic in TOPICS:
        if found := runs(root, topic.task):
            tables[topic.task] = f"![{topic.words}](figures/example-{topic.task}.svg)\n\n{results(topic, found)}"
            charts[f"example-{topic.task}.svg"] = draw(chart(topic, found), standalone=True)
            if topic.task == "expressions":
                tables["depths"] = by_depth(found)
    return tables, charts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="?", default=RECORDS)
    parser.add_argument("--docs", type=Path, help="where examples.md is; the project's own only for its own records")
    chosen = parser.parse_args()
    docs = chosen.docs or (DOCS if chosen.records.resolve() == RECORDS.resolve() else None)
    if docs is None:
        print("\n\n".join(f"{name}\n\n{part}" for name, part in parts(chosen.records)[0].items()))
        return
    tables, charts = parts(chosen.records)
    fill(docs / "examples.md", tables)
    for name, svg in charts.items():
        (docs / "figures" / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
