"""What the paper claims, and what the records say about it. No torch here.

A claim is decided by runs that have gone through all epochs of their experiments; as long as one of them has not, it is
not decided, and what there is so far is shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from shf.lab.figures import metric_words
from shf.lab.records import RunRecord
from shf.lab.words import duration

Records = Mapping[str, RunRecord]


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    NOT_DECIDED = "not decided within the budget"


@dataclass(frozen=True)
class Finding:
    """Our number, in words, and what it says."""

    ours: str
    verdict: Verdict


Judge = Callable[[Sequence[RunRecord]], tuple[str, bool]]
"""From the records, all there, to our number in words and whether it bears the claim out."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Attributes:
        words: what is claimed.
        paper: the paper's number, or where it says so.
        needs: what counts as reproduced.
        runs: the records that decide it, in the order in which `judge` takes them.
        judge: decides.
        headline: whether the README has it too.
    """

    words: str
    paper: str
    needs: str
    runs: tuple[str, ...]
    judge: Judge
    headline: bool = False

    def find(self, records: Records) -> Finding:
        there = [records[name] for name in self.runs if name in records]
        if len(there) == len(self.runs) and all(is_whole(record) for record in there):
            words, holds = self.judge(there)
            return Finding(words, Verdict.REPRODUCED if holds else Verdict.NOT_REPRODUCED)
        return Finding("; ".join(map(so_far, there)) or "not run yet", Verdict.NOT_DECIDED)


def is_whole(record: RunRecord) -> bool:
    """Whether a run went as far as the experiment asks for: through all its epochs, or until it diverged."""
    return record.status == "diverged" or bool(record.column("epoch")[-1] >= record.config["experiment"]["epochs"])


def final(record: RunRecord, column: str | None = None) -> float:
    """A column at the last evaluated epoch, of a run that was given more than the experiment's epochs at the last of
    these; by default the one that the experiment is judged by."""
    values = record.column(column or str(record.config["experiment"]["metric"]))
    within = np.flatnonzero(record.column("epoch") <= record.config["experiment"]["epochs"])
    return float(values[within[-1]])


def reached(record: RunRecord) -> str:
    """What a run has at its end, with its name: '131 (test errors)'."""
    end = float(record.column(str(record.config["experiment"]["metric"]))[-1])
    return f"{end:.4g} ({metric_words(str(record.config['experiment']['metric']))})"


def so_far(record: RunRecord) -> str:
    """How far a run is and what it has reached, for instance '131 (test errors) by shf at epoch 90 of 500, 58 min'."""
    experiment, epoch = record.config["experiment"], record.column("epoch")[-1]
    words = f"{reached(record)} by {record.config['method']} at epoch {epoch:.4g} of {experiment['epochs']}"
    return f"{words}, {duration(record.column('elapsed_seconds')[-1])}"


def _mean_at_most(most: float) -> Judge:
    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        errors = [final(record) for record in records]
        each = ", ".join(f"{error:.2f}" for error in errors)
        mean, spread = statistics.fmean(errors), statistics.stdev(errors)
        return f"{mean:.2f} % ± {spread:.2f} ({each})", mean <= most

    return judge


def _at_most(most: float, unit: str) -> Judge:
    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        error = final(records[0])
        return f"{error:g} {unit}", error <= most

    return judge


def _overfits(records: Sequence[RunRecord]) -> tuple[str, bool]:
    """Without dropout: no training errors to speak of, and a test error above that with dropout."""
    with_dropout, without = records
    trained, test, better = final(without, "train_error_percent"), final(without), final(with_dropout)
    words = f"without {test:.2f} % test and {trained:.2f} % training error, with {better:.2f} % test error"
    return words, test > better and trained < 0.1


def _falls_then_rises(records: Sequence[RunRecord]) -> tuple[str, bool]:
    """λ has its smallest value inside the run, and ends at least a tenth above it."""
    (record,) = records
    damping = record.column("damping")
    lowest = int(np.nanargmin(damping))
    start, least, end = damping[np.isfinite(damping)][0], damping[lowest], damping[-1]
    words = f"from {start:.2f} down to {least:.2f} at epoch {record.column('epoch')[lowest]:.0f}, then {end:.2f}"
    return words, 0 < lowest < len(damping) - 1 and end > 1.1 * least


def epochs_to(record: RunRecord, column: str, level: float) -> float:
    """The first whole epoch at which a column is at or below a level; infinite if never."""
    return float(np.ceil(record.reached(column, level, clock="epoch")))


def _sooner(column: str, by: float = 1.0) -> Judge:
    """The first record reaches the last one's best value in fewer epochs (by the factor), and so do those between."""

    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        *ours, other = records
        best = float(np.nanmin(other.column(column)))
        needed = epochs_to(other, column, best)
        found = [epochs_to(record, column, best) for record in ours]
        shown = " and ".join(f"{epochs:.0f} epochs" if np.isfinite(epochs) else "never" for epochs in found)
        words = f"{shown}, against {needed:.0f}"
        return f"{words}, to {best:.3g} ({metric_words(column)})", all(by * epochs < needed for epochs in found)

    return judge


def _lower(unit: str) -> Judge:
    """The first record ends below the others."""

    def judge(records: Sequence[RunRecord]) -> tuple[str, bool]:
        first, *others = [final(record) for record in records]
        words = f"{first:.3g} against {', '.join(f'{error:.3g}' for error in others)} {unit}"
        return words, all(first < error for error in others)

    return judge


_SPLITS = tuple(f"usps/dropout-released-weights-split{split}" for split in range(1, 6))
_SQUARED = "‖x-x̂‖² per training case"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "USPS, dropout: mean test error of five splits after 1000 epochs",
        "0.95 % (1, 1.1, 0.8, 0.9, 0.97)",
        "a mean of at most 1.1 %, the worst of the paper's splits",
        _SPLITS,
        _mean_at_most(1.1),
        headline=True,
    ),
    Claim(
        "USPS: without dropout SHF overfits",
        "§5.1, in words",
        "less than 0.1 % training error, and a test error above that with dropout",
        (_SPLITS[0], "usps/plain-released-weights-split1"),
        _overfits,
        headline=True,
    ),
    Claim(
        "USPS, dropout: λ falls at first and then rises",
        "Figure 1",
        "the smallest λ lies inside the run, the last is at least a tenth above it",
        (_SPLITS[0],),
        _falls_then_rises,
        headline=True,
    ),
    Claim(
        "Reuters: SHF without and with dropout trains faster than dropout SGD",
        "Figure 2, in words",
        "both reach dropout SGD's lowest training error in fewer epochs",
        ("reuters/plain", "reuters/dropout", "reuters/dropout-sgd-last"),
        _sooner("train_error_percent"),
        headline=True,
    ),
    *(
        Claim(
            f"Reuters, {words} dropout: a much smaller initial λ is faster still",
            "suspected in §5.1",
            "λ = 0.01 reaches in half the epochs the training loss that λ = 1 has at its best",
            (f"reuters/{form}-damping-0.01", f"reuters/{form}"),
            _sooner("train_loss", 2.0),
        )
        for words, form in (("with", "dropout"), ("without", "plain"))
    ),
    Claim(
        "MNIST, dropout: test errors at epoch 500",
        "107",
        "at most 120",
        ("mnist/dropout-released-weights",),
        _at_most(120, "errors"),
        headline=True,
    ),
    Claim(
        "MNIST without dropout: test errors at epoch 500",
        "159",
        "at most 175",
        ("mnist/plain-released-weights",),
        _at_most(175, "errors"),
    ),
    Claim(
        "CURVES: SHF ends below HF",
        "0.089 against 0.110",
        "a lower training error after the experiment's epochs",
        ("curves-autoencoder/shf", "curves-autoencoder/hf"),
        _lower(_SQUARED),
    ),
    Claim(
        "CURVES: NAG ends below SHF",
        "0.078 against 0.089",
        "a lower training error after the experiment's epochs",
        ("curves-autoencoder/nag", "curves-autoencoder/shf"),
        _lower(_SQUARED),
    ),
    Claim(
        "CURVES: small batches and five CG iterations end worse",
        "0.19 against 0.089",
        "a higher training error after the experiment's epochs",
        ("curves-autoencoder/shf", "curves-autoencoder/shf-small-batches"),
        _lower(_SQUARED),
    ),
    Claim(
        "CURVES: setting γ to 0 when training diverges lowers the error",
        "§5.2, in words",
        "a lower training error than with γ left on",
        ("curves-autoencoder/shf", "curves-autoencoder/shf-momentum-stays"),
        _lower(_SQUARED),
    ),
    Claim(
        "MNIST autoencoder: HF ends below SHF",
        "0.780 against 0.877",
        "a lower training error after the experiment's epochs",
        ("mnist-autoencoder/hf", "mnist-autoencoder/shf"),
        _lower(_SQUARED),
    ),
)
