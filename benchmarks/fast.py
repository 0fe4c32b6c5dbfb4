"""The measurements of docs/fast.md: what the parts beyond the paper are worth, at equal time.

    python benchmarks/fast.py run [GROUP …]     make the missing records below results/fast; takes up what was interrupted
    python benchmarks/fast.py page              tables and figures of docs/fast.md from the records

Every record is what `shf run` makes, and every choice of an opponent's settings what `shf tune` makes, on one thread, in
seconds of the processor: they mean the same on a machine that others use too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from shf.lab.choices import read_choices
from shf.lab.configure import Request
from shf.lab.figures import metric_words
from shf.lab.files import write_atomically
from shf.lab.pages import filled, spread, table
from shf.lab.plots import Chart, Series, draw
from shf.lab.records import RunRecord, read_run
from shf.lab.rerun.entries import EPOCHS_ONLY, Run, Tuning
from shf.lab.rerun.queue import CHOICES, is_done, work
from shf.lab.rerun.quotes import quoted

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE, FIGURES = ROOT / "results" / "fast", ROOT / "docs" / "fast.md", ROOT / "docs" / "figures"
ONE, THREE = (0,), (0, 1, 2)


@dataclass(frozen=True)
class Entry:
    """A contestant: its directory below the group's, how the page calls it, the words of `shf run`, and its time where that
    is not the group's."""

    name: str
    label: str
    method: str
    options: tuple[str, ...] = ()
    seeds: tuple[int, ...] = THREE
    tuned: bool = False
    minutes: float | None = None


@dataclass(frozen=True)
class Group:
    """Contestants on one experiment, each for so many minutes of the processor and evaluated so often beside the ends of
    epochs; opponents are tuned first. The table has all of them, the figure the first `drawn`. Where there are
    `goals`, columns and their values, the table says when each is reached."""

    name: str
    experiment: str
    minutes: float
    entries: tuple[Entry, ...]
    options: tuple[str, ...] = ("reshuffle=true",)
    tuning: float = 4.0
    drawn: int = 7
    evaluations: int | None = None
    goals: tuple[tuple[str, float], ...] = ()

    def queue(self) -> Iterator[Run | Tuning]:
        for entry in self.entries:
            if entry.tuned:
                yield Tuning(self.experiment, entry.method, self.tuning)
            for seed in entry.seeds:
                yield self.run(entry, seed)

    def run(self, entry: Entry, seed: int) -> Run:
        minutes = entry.minutes or self.minutes
        request = Request(
            self.experiment,
            entry.method,
            minutes=minutes,
            seed=seed,
            options=(*self.options, *entry.options),
            rows_every=EPOCHS_ONLY,
            threads=1,
            untuned=not entry.tuned,
            clock="processor",
            evaluate_seconds=None if self.evaluations is None else 60 * minutes / self.evaluations,
        )
        return Run(f"{self.name}/{entry.name}-{seed}", request)

    def records(self) -> dict[Entry, list[RunRecord]]:
        """What there is, by contestant and in the order of seeds; a record that was changed by hand is refused."""
        found: dict[Entry, list[RunRecord]] = {}
        for entry in self.entries:
            done = [run for seed in entry.seeds if is_done(run := self.run(entry, seed), RESULTS)]
            for record in (read_run(RESULTS / run.name) for run in done):
                if record.problems:
                    raise ValueError(f"{record.directory}: {'; '.join(record.problems)}")
                found.setdefault(entry, []).append(record)
        return found


FAST = Entry("fast", "fast", "fast")
ONCE = replace(FAST, seeds=ONE)
PAPER = Entry("paper", "the paper's settings, 30 min", "shf", seeds=ONE, minutes=30)
ABLATIONS = (
    FAST,
    Entry("diagonal", "diagonal, as in the paper", "fast", ("preconditioner=empirical-fisher",)),
    Entry("start", "CG from γδ, as in the paper", "fast", ("cg_decay=0.95",)),
    Entry("exact", "exact momentum", "fast", ("cg_decay=0.95", "delta_momentum=exact")),
    Entry("zeta-1", "ζ = 1", "fast", ("cg_iterations=1",)),
    Entry("zeta-2", "ζ = 2 whatever the noise", "fast", ("cg_noise=null",)),
    Entry("factor", "λ moves by 0.9, up as down", "fast", ("damping_factor=0.9", "damping_rise=1")),
    Entry("rise", "λ moves by 0.7, up as down", "fast", ("damping_rise=1",)),
    Entry("no-floor", "first λ 0.2, no floor under it", "fast", ("damping=0.2",)),
    Entry("heldout", "λ hears the next batch", "fast", ("damping_rule=held-out",)),
    Entry("first-10", "first λ 10, as in the paper, no floor", "fast", ("damping=10",)),
    Entry("compared", "f compared at all CG iterates", "fast", ("backtracking=all",)),
    Entry("no-average", "no average", "fast", ("averaging=0",)),
    Entry("worth", "ζ by worth, at most 10", "fast", ("cg_worth=true", "cg_iterations=10")),
    Entry("not-growing", "batches stay at 500", "fast", ("growing=false",)),
    Entry("large", "batches stay at 1000", "fast", ("growing=false", "gradient_batch=1000")),
)


def tuned(*methods: str, seeds: tuple[int, ...] = ONE) -> tuple[Entry, ...]:
    return tuple(Entry(method, f"{method}, tuned", method, seeds=seeds, tuned=True) for method in methods)


OF_MNIST = (*tuned("nag", "soap", seeds=THREE), *tuned("adam", "muon", "shampoo"))
OF_CURVES = (*tuned("nag", "soap", "muon", "adam", seeds=THREE), *tuned("shampoo"))
HALF = "train_half_squared_error"
FEW = ("reshuffle=true", "evaluation_cases=5000")
GROUPS = (
    Group("ablation-curves", "curves-demo", 0.3, (*tuned("adam"), *ABLATIONS), tuning=1.5, drawn=3),
    Group("ablation-usps", "usps-classifier-dropout", 0.15, ABLATIONS, drawn=2),
    Group("curves-paper", "curves-autoencoder", 5, (ONCE, PAPER, *tuned("adam", "nag")), FEW, evaluations=20),
    Group("curves", "curves-autoencoder", 15, (FAST, *OF_CURVES), FEW, evaluations=30),
    Group("curves-hour", "curves-autoencoder", 60, (ONCE, *tuned("muon")), FEW, evaluations=120),
    Group("mnist", "mnist-autoencoder", 15, (FAST, *OF_MNIST), FEW, evaluations=30, goals=((HALF, 0.877),)),
    Group("mnist-hour", "mnist-autoencoder", 60, (ONCE, *tuned("nag")), FEW, evaluations=120, goals=((HALF, 0.877),)),
    Group(
        "dropout",
        "mnist-classifier-dropout",
        60,
        (ONCE, *tuned("dropout-sgd-last", "adam")),
        goals=(("test_errors", 120), ("test_errors", 110)),
    ),
)


def page() -> None:
    """Replaces what stands between the marks of the page, tables and numbers in sentences, and draws its figures."""
    parts, charts = {"spent": _spent()}, {}
    every: dict[str, RunRecord] = {}
    for group in GROUPS:
        if records := group.records():
            charts[f"fast-{group.name}.svg"] = draw(_chart(group, records), standalone=True)
            alt = f"{metric_words(_metric(records))} against seconds: {group.experiment}, {group.minutes:g} minutes"
            parts[group.name] = f"![{alt}](figures/fast-{group.name}.svg)\n\n{_table(group, records)}"
            every |= {r.directory.relative_to(RESULTS).as_posix(): r for found in records.values() for r in found}
    text = filled(PAGE.read_text(encoding="utf-8"), parts)
    write_atomically(PAGE, quoted(text, every).encode())
    for name, chart in charts.items():
        (FIGURES / name).write_text(chart, encoding="utf-8")


def _spent() -> str:
    """The hours that all records of the page took, and the searches of opponents' settings."""
    ends = [read_run(path.parent).epochs[-1] for path in RESULTS.rglob("run.json")]
    hours = sum(float(end.get("elapsed_seconds") or end["processor_seconds"]) for end in ends) / 3600
    choices = [found for methods in read_choices(RESULTS / CHOICES).values() for found in methods.values()]
    minutes = sum(choice.budget["processor_seconds"] for choice in choices) / 60
    return (
        f"The {len(ends)} runs of this page took {hours:.1f} hours of one core, the searches for opponents' settings "
        f"{minutes:.0f} minutes, those of the table of problems not counted."
    )


def _metric(records: dict[Entry, list[RunRecord]]) -> str:
    return str(next(iter(records.values()))[0].config["experiment"]["metric"])


def _table(group: Group, records: dict[Entry, list[RunRecord]]) -> str:
    """The error at the end, how many times sooner `fast` has the lowest, by the clock and by its work, and the steps."""
    metric = _metric(records)
    other = metric.replace("train_", "test_") if metric.startswith("train_") else metric.replace("test_", "train_")
    sooner_by = ("`fast` reaches its lowest sooner by", "in gradient-equivalents")
    heads = [f"{group.minutes:g} min", metric_words(metric), metric_words(other), *sooner_by, "steps"]
    heads += [f"{metric_words(column)} of {level:g} after, s" for column, level in group.goals]
    ours = next((found for entry, found in records.items() if entry.name == FAST.name), [])
    rows = []
    for entry, theirs in records.items():
        ends = [spread([float(r.column(column)[-1]) for r in theirs]) for column in (metric, other)]
        sooner = [
            "" if theirs is ours else _sooner(ours, theirs, metric, clock) for clock in ("elapsed_seconds", "passes")
        ]
        steps = spread([float(r.column("iteration")[-1]) for r in theirs], ".0f")
        runs = f"{entry.label}, {len(theirs)} run" + "s" * (len(theirs) > 1)
        rows.append([runs, *ends, *sooner, steps, *(_reached(theirs, *goal) for goal in group.goals)])
    return table(heads, rows)


def _reached(runs: Sequence[RunRecord], column: str, level: float) -> str:
    """When runs have come down to a level, or how many of them never do."""
    seconds = [record.reached(column, level) for record in runs]
    missed = sum(map(math.isinf, seconds))
    return f"not in {missed} of {len(runs)}" if missed else spread(seconds, ".0f")


def _sooner(ours: Sequence[RunRecord], theirs: Sequence[RunRecord], metric: str, clock: str) -> str:
    """How many times sooner ours reach the lowest that theirs have had, seed by seed; "not" where one of ours never does."""
    us = {record.config["seed"]: record for record in ours}
    ratios = []
    for them in theirs:
        errors, seed = them.column(metric), them.config["seed"]
        if not math.isfinite(errors[-1]):
            return "diverged"
        if seed in us:
            level = float(errors.min())
            needed = us[seed].reached(metric, level, clock)
            ratios.append(them.reached(metric, level, clock) / needed if needed > 0 else math.inf)
    if not ratios:
        return ""
    return spread(ratios, ".3g") + " ×" if min(ratios) > 0 else f"not in {ratios.count(0.0)} of {len(ratios)}"


def _chart(group: Group, records: dict[Entry, list[RunRecord]]) -> Chart:
    metric = _metric(records)
    series = tuple(
        Series(entry.label if k == 0 else "", r.column("elapsed_seconds")[1:], r.column(metric)[1:], colour)
        for colour, (entry, found) in enumerate(islice(records.items(), group.drawn))
        for k, r in enumerate(found)
    )
    return Chart(f"fast-{group.name}", metric_words(metric), "seconds of one processor", series, log_y=True)


def main(words: Sequence[str]) -> None:
    names = {group.name: group for group in GROUPS}
    match words:
        case ["run", *chosen] if set(chosen) <= set(names):
            torch.set_num_threads(1)  # of the searches; runs have theirs in their requests
            work([entry for name in chosen or names for entry in names[name].queue()], RESULTS)
        case ["page"]:
            page()
        case _:
            raise SystemExit(f"{__doc__}\nGroups: {', '.join(names)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
