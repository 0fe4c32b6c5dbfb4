"""The measurements of docs/fast.md: what the parts beyond the paper are worth, at equal time.

    python benchmarks/fast.py run [GROUP …]     make the missing records below results/fast
    python benchmarks/fast.py page              tables and figures of docs/fast.md from the records

Every record is one `shf run`, on one thread, in seconds of the processor: they mean the same on a machine that others use
too.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shf.lab.figures import metric_words
from shf.lab.pages import filled
from shf.lab.plots import Chart, Series, draw
from shf.lab.records import RunRecord, read_run

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE, FIGURES = ROOT / "results" / "fast", ROOT / "docs" / "fast.md", ROOT / "docs" / "figures"


@dataclass(frozen=True)
class Entry:
    """One run: its directory below the group's, how the page calls it, and the words of `shf run`."""

    name: str
    label: str
    method: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Runs of one experiment that are compared, each for so many minutes of the processor."""

    name: str
    experiment: str
    minutes: float
    entries: tuple[Entry, ...]
    options: tuple[str, ...] = ("reshuffle=true",)

    def command(self, entry: Entry, out: str | Path, seed: int = 0) -> list[str]:
        words = ["shf", "run", self.experiment, "-o", entry.method, "--minutes", f"{self.minutes:g}"]
        words += ["--clock", "processor", "--threads", "1", "--seed", str(seed)]
        for option in (*self.options, *entry.options):
            words += ["--set", option]
        return [*words, "--out", str(out)]


FAST = Entry("fast", "fast", "fast")
PAPER = Entry("paper", "the paper's", "shf")
ABLATIONS = (
    FAST,
    Entry("diagonal", "paper's diagonal preconditioner", "fast", ("preconditioner=empirical-fisher",)),
    Entry("batch-rule", "λ hears its own batch", "fast", ("damping_rule=batch",)),
    Entry("first-10", "first λ 10, as in the paper", "fast", ("damping=10",)),
    Entry("no-average", "no average", "fast", ("averaging=0",)),
    Entry("no-start", "CG from zero (γ = 0)", "fast", ("cg_decay=0",)),
    Entry("worth", "ζ by worth, at most 10", "fast", ("cg_worth=true", "cg_iterations=10")),
    Entry("not-growing", "batches stay at 500", "fast", ("growing=false",)),
    Entry("large", "batches stay at 1000", "fast", ("growing=false", "gradient_batch=1000")),
)


def adam(*rates: float) -> tuple[Entry, ...]:
    return tuple(Entry(f"adam-{r:g}", f"Adam {r:g}", "adam", (f"learning_rate={r:g}",)) for r in rates)


FEW = ("reshuffle=true", "evaluation_cases=5000")
GROUPS = (
    Group("curves", "curves-autoencoder", 1.5, (FAST, *adam(1e-3, 3e-3), PAPER), FEW),
    Group("mnist", "mnist-autoencoder", 2.5, (FAST, *adam(1e-3)), FEW),
    Group("usps", "usps-classifier-dropout", 0.2, (FAST, *adam(1e-3, 3e-3), PAPER)),
    Group("ablation-curves", "curves-demo", 0.3, (*adam(3e-3), *ABLATIONS)),
    Group("ablation-usps", "usps-classifier-dropout", 0.15, ABLATIONS),
)


def run(groups: Sequence[Group]) -> None:
    """Makes the records that are not there yet; metrics and run.json are kept, checkpoints are not."""
    for group in groups:
        for entry in group.entries:
            place = RESULTS / group.name / entry.name
            if (place / "run.json").exists():
                continue
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                subprocess.run([sys.executable, "-m", *group.command(entry, out), "--quiet"], check=True, cwd=ROOT)
                place.mkdir(parents=True, exist_ok=True)
                for name in ("metrics.jsonl", "run.json"):
                    shutil.copyfile(out / name, place / name)
            print(f"{group.name}/{entry.name}: {_last(read_run(place)):.4g}", flush=True)


def page() -> None:
    """Replaces what stands between the markers of the page, and draws its figures."""
    text = PAGE.read_text(encoding="utf-8")
    for group in GROUPS:
        records = {e: read_run(RESULTS / group.name / e.name) for e in group.entries if _there(group, e)}
        if not records:
            continue
        (FIGURES / f"fast-{group.name}.svg").write_text(draw(_chart(group, records), standalone=True), encoding="utf-8")
        text = filled(text, {group.name: "\n".join(_table(group, records))})
    PAGE.write_text(text, encoding="utf-8")


def _there(group: Group, entry: Entry) -> bool:
    return (RESULTS / group.name / entry.name / "run.json").exists()


def _metric(record: RunRecord) -> str:
    return str(record.config["experiment"]["metric"])


def _last(record: RunRecord) -> float:
    return float(record.column(_metric(record))[-1])


def _table(group: Group, records: dict[Entry, RunRecord]) -> Iterator[str]:
    """The error at the end, when `fast` had it, and the steps taken."""
    metric = _metric(next(iter(records.values())))
    other = metric.replace("train_", "test_") if metric.startswith("train_") else metric.replace("test_", "train_")
    ours = next((r for e, r in records.items() if e is FAST), None)
    first = f"{group.experiment}, {group.minutes:g} min"
    yield f"| {first} | {metric_words(metric)} | {metric_words(other)} | `fast` has it after | steps |"
    yield "|---|---|---|---|---|"
    for entry, record in records.items():
        seconds = math.nan if ours is None or entry is FAST else ours.reached(metric, _last(record))
        when = "" if math.isnan(seconds) else f"{seconds:.0f} s" if math.isfinite(seconds) else "not"
        steps = int(record.column("iteration")[-1])
        yield f"| {entry.label} | {_last(record):.3f} | {float(record.column(other)[-1]):.3f} | {when} | {steps} |"


def _chart(group: Group, records: dict[Entry, RunRecord]) -> Chart:
    metric = _metric(next(iter(records.values())))
    series = tuple(
        Series(e.label, r.column("elapsed_seconds")[1:], r.column(metric)[1:], i)
        for i, (e, r) in enumerate(records.items())
    )
    return Chart(f"fast-{group.name}", metric_words(metric), "seconds of one processor", series, log_y=True)


def main(words: Sequence[str]) -> None:
    names = {group.name: group for group in GROUPS}
    match words:
        case ["run", *chosen]:
            run([names[name] for name in chosen] or GROUPS)
        case ["page"]:
            page()
        case ["commands"]:
            print(
                json.dumps(
                    [g.command(e, f"results/fast/{g.name}/{e.name}") for g in GROUPS for e in g.entries], indent=1
                )
            )
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
