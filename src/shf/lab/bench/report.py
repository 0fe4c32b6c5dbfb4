"""Tables, plot and page from a record of the benchmark. No torch here.

`python -m shf.lab.bench.report RECORD.json PAGE.md` fills in the marked part of a page and draws figures/speed.svg by it.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shf.lab.bench.targets import KINDS, SPARSE, judge
from shf.lab.pages import filled, table

FIGURE = Path("figures") / "speed.svg"
"""The plot of a page, from the page's directory."""

Rows = list[Sequence[str]]


def write(results: dict[str, Any], folder: Path) -> Path:
    """Writes the record and its plot over those of the last run; returns the record's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("speed-quick.json" if results["quick"] else "speed.json")
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    plot(results, path.with_suffix(".svg"))
    return path


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> list[tuple[str, Sequence[str], Rows]]:
    """Title, heads and rows of every table that the record has figures for."""
    found: list[tuple[str, Sequence[str], Rows]] = []
    for section, (title, columns) in _TABLES.items():
        if (recorded := results["sections"].get(section)) is not None:
            heads, _, cells = zip(*(column.partition(": ") for column in columns.split(" | ")), strict=True)
            entries: Iterable[dict[str, Any]] = recorded.values()
            if section in _ENTRIES:
                entries = _ENTRIES[section](recorded)
            found.append((title, heads, [_row(entry, cells) for entry in entries]))
    verdicts: Rows = [
        (t.name, f"{t.value:.3g} {t.unit}".strip(), t.bound, "yes" if t.met else "**no**") for t in judge(results)
    ]
    return [*found, ("Targets", ("figure", "found", "wanted", "met"), verdicts)] if verdicts else found


def _scaling(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for e in found.values():
        points = (f"{p['value']:g}: {_seconds(p['seconds'])} ({p['step_over_floor']:.2f})" for p in e["points"])
        yield {**e, "points": ", ".join(points)}


def _memory(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, e in found.items():
        if name == "growth":
            what = f"{e['steps']} steps, early and late"
            yield {"network": what, "gradient_bytes": e["early"], "step_bytes": e["late"]}
        elif name == "microbatch":
            what = f"{e['network']}, microbatch {e['microbatch']} and whole"
            yield {"network": what, "gradient_bytes": e["chunked_bytes"], "step_bytes": e["whole_bytes"]}
        else:
            yield e


def _sparse(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for e in found.values():
        for what in SPARSE:
            dense, sparse = (_seconds(e[what][kind]["median_seconds"]) for kind in ("dense", "sparse"))
            rows = e["curvature_rows"] if what == "product_few" else e["rows"]
            on = f"{what.partition('_')[0]} on {rows} rows"
            yield {"what": on, "dense": dense, "sparse": sparse, "ratio": e[what + "_speedup"]}
        dense, sparse = _mebibytes(e["dense_bytes"]), _mebibytes(e["sparse_bytes"])
        ratio = e["dense_bytes"] / max(e["sparse_bytes"], 1)
        yield {"what": "peak memory of a step", "dense": dense, "sparse": sparse, "ratio": ratio}


_ENTRIES: dict[str, Callable[[dict[str, Any]], Iterable[dict[str, Any]]]] = {
    "scaling": _scaling,
    "memory": _memory,
    "sparse": _sparse,
}
"""Sections whose rows are not their entries as recorded."""

_TABLES = {
    "step": (
        "A step and its floor",
        "network: {network} | parameters: {parameters:,} | rows / curvature: {rows} / {curvature_rows} | "
        "products + evaluations: {products} + {evaluations} | step: {step[median_seconds]:time} | "
        "floor: {floor[median_seconds]:time} | step / floor: {step_over_floor:.2f}",
    ),
    "anatomy": (
        "Where a step's time goes",
        " | ".join(["network: {network}", *(f"{kind}: {{shares[{kind}]:share}}" for kind in KINDS)]),
    ),
    "product": (
        "A Gauss-Newton product and a gradient, on the same rows",
        "network: {network} | rows: {rows} | product: {product[median_seconds]:time} | "
        "gradient: {gradient[median_seconds]:time} | product / gradient: {product_over_gradient:.2f}",
    ),
    "scaling": (
        "Cost of a step against size",
        "what grows: {what} | a step (step / floor): {points} | exponent: {exponent:.2f} | "
        "exponent of the floor: {floor_exponent:.2f} | fitted: {fitted}",
    ),
    "memory": (
        "Peak memory",
        "network: {network} | gradient: {gradient_bytes:MiB} | step: {step_bytes:MiB} | "
        "step / gradient: {step_over_gradient:.2f}",
    ),
    "sparse": (
        "Reuters' shape, dense and sparse",
        "what: {what} | dense: {dense} | sparse: {sparse} | dense / sparse: {ratio:.1f}",
    ),
    "compiled": (
        "An evaluation of the objective, plain and through torch.compile",
        "network: {network} | plain: {plain[median_seconds]:time} | compiled: {compiled[median_seconds]:time} | "
        "compiled / plain: {compiled_over_plain:.2f} | compilation: {compilation_seconds:time}",
    ),
    "peers": (
        "Seconds per epoch of 60 batches, MNIST classifier, 1000 rows each",
        "optimizer: {peer} | package: {package} | set up: {setup} | step: {seconds_per_step:time} | "
        "epoch: {seconds_per_epoch:.3g} s | against Adam: {over_adam:.2f}",
    ),
}
"""For each section the title of its table, and its columns: their heads and how a cell is made from an entry."""


class _Cells(Formatter):
    """Knows seconds, mebibytes and shares as formats; None is a dash."""

    def format_field(self, value: Any, format_spec: str) -> str:
        match format_spec:
            case "time":
                return _seconds(value)
            case "MiB":
                return _mebibytes(value)
            case "share":
                return f"{100 * value:.0f} %"
        return "–" if value is None else str(super().format_field(value, format_spec))


def _row(entry: dict[str, Any], templates: Iterable[str]) -> list[str]:
    """The cells of an entry; the first that it has no figure for says why, if the entry does."""
    cells, why = [], entry.get("skipped", "")
    for template in templates:
        try:
            cells.append(_Cells().vformat(template, (), entry))
        except KeyError:
            cells.append(why)
            why = ""
    return cells


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _mebibytes(value: int) -> str:
    return f"{value / 2**20:.1f} MiB"


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    console.print(describe(results), highlight=False)
    for title, heads, rows in tables(results):
        table = Table(title=title, title_justify="left")
        for number, head in enumerate(heads):
            table.add_column(head, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(escape(cell.replace("**", "")) for cell in row))
        console.print(table)


def describe(results: dict[str, Any]) -> str:
    """The machine, versions and day in one line."""
    m, v = results["machine"], results["versions"]
    quick = " Shrunk shapes, one repetition: these figures mean nothing." if results["quick"] else ""
    return (
        f"{results['started'][:10]}: {m['processor']}, {m['cores']} cores, {m['threads']} threads, {m['memory_gib']} GiB, "
        f"{m['system']}; Python {v['python']}, torch {v['torch']}; {results['seconds'] / 60:.0f} minutes.{quick}"
    )


# --- plot ------------------------------------------------------------------------------------------------------------


def plot(results: dict[str, Any], path: Path) -> None:
    """Four panels: step over floor, product over gradient, cost against size, seconds per epoch."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(2, 2).ravel()
    found = results["sections"]
    _bars(axes[0], "step / floor", ((e["network"], e["step_over_floor"]) for e in found.get("step", {}).values()))
    ratios = ((e["network"], e["product_over_gradient"]) for e in found.get("product", {}).values())
    _bars(axes[1], "product / gradient", ratios)
    _lines(axes[2], found.get("scaling", {}))
    timed = (e for e in found.get("peers", {}).values() if "seconds_per_epoch" in e)
    _bars(axes[3], "seconds per epoch", ((e["peer"], e["seconds_per_epoch"]) for e in timed))
    figure.suptitle(describe(results), fontsize=8)
    # text as text, the same bytes each time
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shf"}):
        figure.savefig(path, metadata={"Date": None})


def _bars(axes: Axes, title: str, values: Iterable[tuple[str, float]]) -> None:
    pairs = list(values)[::-1]
    axes.set_title(title, loc="left", fontsize=10)
    bars = axes.barh([name for name, _ in pairs], [value for _, value in pairs], color="#0072b2", height=0.6)
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    if "/" in title:
        axes.axvline(1.0, color="#5c6570", linewidth=1)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)


def _lines(axes: Axes, sweeps: dict[str, Any]) -> None:
    axes.set_title("cost of a step against size (both relative to the largest)", loc="left", fontsize=10)
    for colour, (what, entry) in zip(("#0072b2", "#d55e00", "#00916a"), sweeps.items(), strict=False):
        points = entry["points"]
        sizes = [p["parameters"] if what == "parameters" else p["value"] for p in points]
        x = [size / sizes[-1] for size in sizes]
        y = [p["seconds"] / points[-1]["seconds"] for p in points]
        axes.loglog(x, y, "o-", color=colour, label=f"{what}: exponent {entry['exponent']:.2f}", linewidth=1.5)
    if sweeps:
        axes.legend(fontsize=8, frameon=False)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


# --- page ------------------------------------------------------------------------------------------------------------


def markdown(results: dict[str, Any]) -> str:
    """Plot and tables as Markdown, under the machine they were measured on."""
    parts = [f"*{describe(results)}*", f"![steps, products, scaling and peers]({FIGURE.as_posix()})"]
    for title, heads, rows in tables(results):
        parts.append(f"**{title}**\n\n{table(heads, rows)}")
    return "\n\n".join(parts)


def fill_in(page: str, results: dict[str, Any]) -> str:
    """The page with its marked part replaced.

    Raises:
        ValueError: if the page does not have the two marks.
    """
    return filled(page, {"bench": markdown(results)})


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m shf.lab.bench.report RECORD.json PAGE.md", file=sys.stderr)
        return 2
    record, page = (Path(argument) for argument in arguments)
    results = json.loads(record.read_text(encoding="utf-8"))
    page.write_text(fill_in(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    figure = page.parent / FIGURE
    figure.parent.mkdir(exist_ok=True)
    plot(results, figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
