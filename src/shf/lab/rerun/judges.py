"""How records decide a claim: what a run ends with, and the criteria. No torch here.

A run is judged by the median of the last tenth of its epochs, so that no verdict hangs on one evaluation; what it has at
the very last is said too.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shf.lab.figures import metric_words
from shf.lab.records import RunRecord
from shf.lab.words import duration

Records = Mapping[str, RunRecord]
Judge = Callable[[Sequence[RunRecord]], tuple[str, bool]]
"""From the records, all there, to our number in words and whether it bears the claim out."""

SQUARED = "‖x-x̂‖² per training case"


def planned(record: RunRecord) -> float:
    """The epochs that a run was to make: those it was given, or where it was given minutes, its experiment's."""
    return float(record.config.get("epochs") or record.config["experiment"]["epochs"])


def is_whole(record: RunRecord) -> bool:
    """Whether a run went through its epochs, or until it diverged."""
    return record.status == "diverged" or bool(record.column("epoch")[-1] >= planned(record))


def within(record: RunRecord, column: str | None = None) -> NDArray[np.float64]:
    """A column up to the last planned epoch; by default the one that the experiment is judged by."""
    values = record.column(column or str(record.config["experiment"]["metric"]))
    return values[record.column("epoch") <= planned(record)]


def final(record: RunRecord, column: str | None = None) -> float:
    """A column at the last planned epoch."""
    return float(within(record, column)[-1])


def settled(record: RunRecord, column: str | None = None) -> float:
    """The median of a column over the last tenth of the planned epochs; of a run that ended before, its last value."""
    epochs = record.column("epoch")
    values = within(record, column)
    last_tenth = values[epochs[: len(values)] > 0.9 * planned(record)]
    return float(np.median(last_tenth)) if len(last_tenth) else float(values[-1])


def reached(record: RunRecord) -> str:
    """What a run has at its end, with its name: '131 (test errors)'."""
    end = float(record.column(str(record.config["experiment"]["metric"]))[-1])
    return f"{end:.4g} ({metric_words(str(record.config['experiment']['metric']))})"


def so_far(record: RunRecord) -> str:
    """How far a run is and what it has reached, for instance '131 (test errors) by shf at epoch 90 of 500, 58 min'."""
    epoch = record.column("epoch")[-1]
    words = f"{reached(record)} by {record.config['method']} at epoch {epoch:.4g} of {planned(record):.0f}"
    return f"{words}, {duration(record.column('elapsed_seconds')[-1])}"


def _listed(numbers: Sequence[float], digits: str = ".2f") -> str:
    return ", ".join(format(number, digits) for number in numbers)


def mean_at_most(most: float) -> Judge:
    """The records' mean."""

    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        errors = [settled(record) for record in records]
        mean, spread = statistics.fmean(errors), statistics.stdev(errors)
        ends = f"last epochs {statistics.fmean(map(final, records)):.2f} %"
        return f"{mean:.2f} % ± {spread:.2f} ({_listed(errors)}); {ends}", mean <= most

    return judge


def at_most(most: float, unit: str) -> Judge:
    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        error = settled(records[0])
        return f"{error:g} {unit}; last epoch {final(records[0]):g}", error <= most

    return judge


def last_at_most(judge: Judge, most: float) -> Judge:
    """The same in words, decided by the mean of the last epochs alone: the criterion before medians."""

    def judge_last(records: Sequence[RunRecord]) -> tuple[str, bool]:
        return judge(records)[0], statistics.fmean(map(final, records)) <= most

    return judge_last


def overfits(end: Callable[[RunRecord, str | None], float]) -> Judge:
    """Without dropout: no training errors to speak of, and a test error above that with dropout."""

    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        with_dropout, without = records
        trained, test, better = end(without, "train_error_percent"), end(without, None), end(with_dropout, None)
        last = f"last epoch {final(without):.2f} and {final(without, 'train_error_percent'):.2f} %"
        words = f"without {test:.2f} % test and {trained:.2f} % training error ({last}), with {better:.2f} % test error"
        return words, test > better and trained < 0.1

    return judge


def falls_then_rises(records: Sequence[RunRecord]) -> tuple[str, bool]:
    """λ has its smallest value inside every run, and settles at least a tenth above it."""
    dampings = [within(record, "damping") for record in records]
    ends = [settled(record, "damping") for record in records]
    least = [float(np.nanmin(damping)) for damping in dampings]
    inside = all(0 < int(np.nanargmin(damping)) < len(damping) - 1 for damping in dampings)
    start = dampings[0][np.isfinite(dampings[0])][0]
    words = f"from {start:.2f} down to {_listed(least)}, then {_listed(ends)}"
    return words, inside and all(end > 1.1 * low for end, low in zip(ends, least, strict=True))


def rises_steadily(records: Sequence[RunRecord]) -> tuple[str, bool]:
    """And from the tenth of the run with the smallest λ on, the median of every tenth is at least that before it."""
    words, holds = falls_then_rises(records)
    return words, holds and all(map(_is_steady, records))


def _is_steady(record: RunRecord) -> bool:
    damping = within(record, "damping")[1:]
    tenths = [float(np.median(part)) for part in np.array_split(damping, min(10, len(damping)))]
    return all(before <= after for before, after in pairwise(tenths[int(np.argmin(tenths)) :]))


def vanishes(records: Sequence[RunRecord]) -> tuple[str, bool]:
    """λ settles below a tenth of its first value and has its smallest in the second half."""
    (record,) = records
    damping, end = within(record, "damping"), settled(record, "damping")
    start, lowest = damping[np.isfinite(damping)][0], int(np.nanargmin(damping))
    words = f"from {start:.2f} to {end:.2g}, lowest {damping[lowest]:.2g} at epoch {record.column('epoch')[lowest]:.0f}"
    return words, end < 0.1 * start and lowest > len(damping) / 2


def epochs_to(record: RunRecord, column: str, level: float) -> float:
    """The first whole epoch at which a column is at or below a level; infinite if never."""
    return float(np.ceil(record.reached(column, level, clock="epoch")))


def _epochs_words(epochs: float) -> str:
    return f"{epochs:.0f} epochs" if np.isfinite(epochs) else "never"


def sooner(column: str, by: float = 1.0) -> Judge:
    """The first record reaches the last one's best value in fewer epochs (by the factor), and so do those between."""

    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        *ours, other = records
        best = float(np.nanmin(other.column(column)))
        needed = epochs_to(other, column, best)
        found = [epochs_to(record, column, best) for record in ours]
        words = f"{' and '.join(map(_epochs_words, found))}, against {needed:.0f}"
        return f"{words}, to {best:.3g} ({metric_words(column)})", all(by * epochs < needed for epochs in found)

    return judge


def sooner_to(column: str, levels: Sequence[float], ours: int) -> Judge:
    """The first records, so many, reach every level in fewer epochs than the quickest of the others does."""

    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        words, holds = [], True
        for level in levels:
            needed = [epochs_to(record, column, level) for record in records]
            best = min(needed[ours:])
            holds = holds and all(epochs < best for epochs in needed[:ours])
            shown = " and ".join(map(_epochs_words, needed[:ours]))
            words.append(f"to {level:g}: {shown}, against {_epochs_words(best)}")
        return f"{'; '.join(words)} ({metric_words(column)})", holds

    return judge


def lower(records: Sequence[RunRecord]) -> tuple[str, bool]:
    """The first record ends below the others."""
    first, *others = [settled(record) for record in records]
    words = f"{first:.3g} against {_listed(others, '.3g')} {SQUARED}; last {_listed([*map(final, records)], '.3g')}"
    return words, all(first < error for error in others)


def lower_in_equal_time(records: Sequence[RunRecord]) -> tuple[str, bool]:
    """The first record is below the second at the end of the shorter of the two."""
    seconds = min(float(record.column("elapsed_seconds")[-1]) for record in records)
    ours, other = (float(_at(record, seconds)) for record in records)
    return f"{ours:.3g} against {other:.3g} after {duration(seconds)}", ours < other


def share_a_clock(records: Sequence[RunRecord]) -> bool:
    """Whether the runs' seconds mean the same: one machine, one kind of clock."""
    first, *others = [(record.run.get("machine"), record.config.get("clock")) for record in records]
    return all(other == first for other in others)


def _at(record: RunRecord, seconds: float) -> float:
    """What a run has at its last evaluation within so many seconds."""
    values = record.column(str(record.config["experiment"]["metric"]))
    return float(values[record.column("elapsed_seconds") <= seconds][-1])


def competitive(margin: float, unit: str, sizes: Sequence[int] = (1, 1)) -> Judge:
    """Ours, the first group of records, errs in the mean by at most `margin` more than the best of the other groups."""

    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        rest, groups = list(records), []
        for size in sizes:
            groups.append([settled(record) for record in rest[:size]])
            rest = rest[size:]
        ours, *others = [statistics.fmean(group) for group in groups]
        each = [f" ({_listed(group)})" if len(group) > 1 else "" for group in groups]
        shown = [f"{mean:.4g}{of}" for mean, of in zip((ours, *others), each, strict=True)]
        return f"{shown[0]} against {' and '.join(shown[1:])} {unit}", ours <= min(others) + margin

    return judge


def calmer(column: str, first: int) -> Judge:
    """From an epoch on, to the end of the shorter run, the first record's highest value is below the other's."""

    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        last = min(planned(record) for record in records)
        epochs = (record.column("epoch") for record in records)
        inside = [(first <= epoch) & (epoch <= last) for epoch in epochs]
        ours, other = (float(np.nanmax(r.column(column)[rows])) for r, rows in zip(records, inside, strict=True))
        words = f"at most {ours:.2g} against up to {other:.2g} from epoch {first} to {last:.0f}"
        return f"{words} ({metric_words(column)})", ours < other

    return judge
