"""The page about the paper's claims: its tables and figures, made anew from the records. No torch here.

The page's own sentences stand outside of the marked parts, which are replaced as a whole; of the sentences only the
quoted numbers are.
"""

import json
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from shf.lab.experiments import find
from shf.lab.figures import metric_words
from shf.lab.files import write_atomically
from shf.lab.pages import filled, table
from shf.lab.plots import draw
from shf.lab.records import RunRecord
from shf.lab.report import find_runs, read_verified
from shf.lab.rerun.charts import FIGURE_LIST, TABLE_ONE
from shf.lab.rerun.claims import CLAIMS, Claim, Verdict
from shf.lab.rerun.entries import ABLATED, Ablated, Tuning
from shf.lab.rerun.judges import Records, final, reached
from shf.lab.rerun.quotes import quoted
from shf.lab.runconfig import RunConfig
from shf.lab.words import duration

PAGE = "results.md"
FIGURES = Path("figures") / "results"
CLOCK_WORDS = {"processor": "of one processor", "wall": "by the clock on the wall"}


def read_records(root: Path) -> dict[str, RunRecord]:
    """Verified records by their names below the root; one that was changed after it was written is refused.

    Raises:
        RecordError: if there is none, or if one cannot be trusted.
    """
    records = read_verified(find_runs([root]))
    return {record.directory.relative_to(root).as_posix(): record for record in records if len(record.epochs) > 1}


def open_claims(root: Path) -> list[str]:
    """The claims that the records below the root do not decide."""
    records = read_records(root)
    return [claim.words for claim in CLAIMS if claim.find(records).verdict is Verdict.NOT_DECIDED]


def write_page(root: Path, docs: Path) -> list[Path]:
    """Replaces the marked parts and numbers of the page and of the README beside its directory, and draws the figures;
    returns what was written."""
    records = read_records(root)
    written = [docs / PAGE, docs.parent / "README.md"]
    ours = {name: make(records) for name, make in PARTS.items()} | {"generated curves": curves_table(root)}
    parts = (ours, {"claims": headlines_table(records)})
    pages = [filled(path.read_text(encoding="utf-8"), part) for path, part in zip(written, parts, strict=True)]
    texts = [quoted(page, records) for page in pages]
    for path, text in zip(written, texts, strict=True):
        write_atomically(path, text.encode())
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    for figure in chain.from_iterable(FIGURE_LIST.values()):
        if (chart := figure.chart(records)) is not None:
            path = docs / FIGURES / f"{figure.name}.svg"
            write_atomically(path, draw(chart, standalone=True).encode())
            written.append(path)
    return written


# --- tables ----------------------------------------------------------------------------------------------------------


def claims_table(records: Records) -> str:
    """All claims; where there was an earlier criterion, it and what it says stand in the last column."""
    heads = ("claim", "paper", "here", "verdict", "counts as reproduced", "earlier criterion, and its verdict")
    return table(heads, (_claim_cells(claim, records) for claim in CLAIMS))


def headlines_table(records: Records) -> str:
    rows = [_claim_cells(claim, records)[:4] for claim in CLAIMS if claim.headline]
    return table(("the paper's claim", "paper", "here", "verdict"), rows)


def _claim_cells(claim: Claim, records: Records) -> tuple[str, ...]:
    found = claim.find(records)
    earlier = f"{claim.earlier.needs}: {found.earlier}" if claim.earlier else ""
    return claim.words, claim.paper, found.ours, f"**{found.verdict.value}**", claim.needs, earlier


def runs_table(records: Records) -> str:
    """Every record, with its real budget and the command that makes it again; and what all of them took."""
    rows, total = [], 0.0
    for name, record in records.items():
        epochs, seconds = record.column("epoch")[-1], record.column("elapsed_seconds")[-1]
        total += seconds
        command = f"`{RunConfig.from_json(record.config).command()}`"
        rows.append((f"`{name}`", record.status, f"{epochs:.4g}", duration(seconds), reached(record), command))
    heads = ("record", "status", "epochs", "training time", "reached", "command")
    return f"{len(rows)} runs, {duration(total)} of training on one thread.\n\n{table(heads, rows)}"


def table_one(records: Records) -> str:
    """The paper's Table 1 with ours beside it, in both units."""
    rows = []
    for experiment in ("curves-autoencoder", "mnist-autoencoder"):
        for method, label in TABLE_ONE.items():
            record = records.get(f"{experiment}/{method}")
            ours = ("", "", "not run")
            if record is not None:
                half, whole = final(record, "train_half_squared_error"), final(record, "train_squared_error")
                ours = (f"{half:.3g}", f"{whole:.3g}", _what_differs(record))
            rows.append((experiment, label, f"{find(experiment).paper[method]:g}", *ours))
    return table(("experiment", "method", "paper", "here, ½‖x-x̂‖²", "here, ‖x-x̂‖²", "what differs"), rows)


def curves_table(root: Path) -> str:
    """What linear codes leave of the generated curves beside what is published of the original (benchmarks/curves.py)."""
    path = root / "curves.json"
    if not path.exists():
        return "Not measured yet."
    versions = json.loads(path.read_text(encoding="utf-8"))
    published = next(iter(versions.values()))["published"]
    rows: list[tuple[str, ...]] = []
    for name, original in published.items():
        cells = (f"{v['figures'][name]:.2f} ({v['off_percent'][name]:+.1f} %)" for v in versions.values())
        rows.append((name, f"{original:.2f}", *cells))
    rows.append(("pixels above 0.95", "", *(f"{100 * v['black']:.1f} %" for v in versions.values())))
    return table(("left of a test image, ‖x-x̂‖²", "original", *versions), rows)


def _what_differs(record: RunRecord) -> str:
    """From the paper's own run: the budget, and what the error is measured on."""
    experiment = record.config["experiment"]
    words = [
        f"{duration(record.column('elapsed_seconds')[-1])} {CLOCK_WORDS[record.config['clock']]}",
        f"{record.column('epoch')[-1]:.3g} epochs",
        f"{record.column('iteration')[-1]:.0f} updates",
    ]
    if experiment["data"] == "curves":
        words.append("generated data")
    if experiment.get("evaluation_cases"):
        words.append(f"error of {experiment['evaluation_cases']} training cases")
    return ", ".join(words)


def ablations_table(records: Records) -> str:
    """Short runs, one thing changed in each, beside the reference: a table for each experiment."""
    tables = [_ablated(records, ablated) for ablated in ABLATED]
    return "\n\n".join(table for table in tables if table) or "No ablation was run yet."


def _ablated(records: Records, ablated: Ablated) -> str:
    rows = []
    metric = find(ablated.experiment).metric
    for entry in ablated.entries():
        if isinstance(entry, Tuning) or (record := records.get(entry.name)) is None:
            continue
        error, loss = record.column(metric), record.column("train_loss")
        rows.append(
            (
                entry.name.removeprefix(f"ablations/{ablated.name}-"),
                ", ".join(option for option in record.config["options"] if option not in ablated.start),
                f"{error[-1]:.3g}",
                f"{np.nanmin(error):.3g}",
                f"{loss[-1]:.3g}",
                f"{record.column('passes')[-1]:.0f}",
                duration(record.column("elapsed_seconds")[-1]),
            )
        )
    heads = (ablated.name.upper(), "changed settings", metric_words(metric), "its lowest", "training loss")
    return table((*heads, "gradient-equivalents", "training time"), rows) if rows else ""


def figures_of(part: str) -> Callable[[Records], str]:
    """Links to the figures of one part of the page, as far as there are records for them."""

    def links(records: Records) -> str:
        there = [figure for figure in FIGURE_LIST[part] if figure.chart(records) is not None]
        images = [f"![{figure.title}]({(FIGURES / figure.name).as_posix()}.svg)" for figure in there]
        return "\n\n".join(images) or "No run is recorded yet."

    return links


PARTS: Mapping[str, Callable[[Records], str]] = {
    "claims": claims_table,
    **{part: figures_of(part) for part in FIGURE_LIST},
    "table one": table_one,
    "ablations": ablations_table,
    "runs": runs_table,
}
