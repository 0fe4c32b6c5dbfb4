"""Tables, plot and page from a record of the benchmark. No torch here.

`python -m shf.lab.bench.report RECORD.json PAGE.md` fills in the marked part of a page and draws figures/speed.svg by it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shf.lab.bench.targets import SPARSE, judge
from shf.lab.pages import filled

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
    found = [
        (title, heads, make(results["sections"][section]))
        for section, (title, heads, make) in _TABLES.items()
        if section in results["sections"]
    ]
    verdicts: Rows = [
        (t.name, f"{t.value:.3g} {t.unit}".strip(), t.bound, "yes" if t.met else "**no**") for t in judge(results)
    ]
    return [*found, ("Targets", ("figure", "found", "wanted", "met"), verdicts)] if verdicts else found


def _step(found: dict[str, Any]) -> Rows:
    return [
        (
            e["network"],
            f"{e['parameters']:,}",
            f"{e['rows']} / {e['curvature_rows']}",
            f"{e['products']} + {e['evaluations']}",
            _seconds(e["step"]["median_seconds"]),
            _seconds(e["floor"]["median_seconds"]),
            f"{e['step_over_floor']:.2f}",
        )
        for e in found.values()
    ]


def _anatomy(found: dict[str, Any]) -> Rows:
    return [(e["network"], *(f"{100 * share:.0f} %" for share in e["shares"].values())) for e in found.values()]


def _product(found: dict[str, Any]) -> Rows:
    return [
        (
            e["network"],
            str(e["rows"]),
            _seconds(e["product"]["median_seconds"]),
            _seconds(e["gradient"]["median_seconds"]),
            f"{e['product_over_gradient']:.2f}",
        )
        for e in found.values()
    ]


def _scaling(found: dict[str, Any]) -> Rows:
    return [
        (
            e["what"],
            ", ".join(f"{p['value']:g}: {_seconds(p['seconds'])} ({p['step_over_floor']:.2f})" for p in e["points"]),
            f"{e['exponent']:.2f}",
            f"{e['floor_exponent']:.2f}",
            e["fitted"],
        )
        for e in found.values()
    ]


def _memory(found: dict[str, Any]) -> Rows:
    rows: Rows = []
    for name, e in found.items():
        if name == "growth":
            rows.append((f"{e['steps']} steps, early and late", _mebibytes(e["early"]), _mebibytes(e["late"]), ""))
        elif name == "microbatch":
            what = f"{e['network']}, microbatch {e['microbatch']} and whole"
            rows.append((what, _mebibytes(e["chunked_bytes"]), _mebibytes(e["whole_bytes"]), ""))
        else:
            ratio = f"{e['step_over_gradient']:.2f}"
            rows.append((e["network"], _mebibytes(e["gradient_bytes"]), _mebibytes(e["step_bytes"]), ratio))
    return rows


def _sparse(found: dict[str, Any]) -> Rows:
    rows: Rows = []
    for e in found.values():
        for what in SPARSE:
            dense, sparse = (_seconds(e[what][kind]["median_seconds"]) for kind in ("dense", "sparse"))
            few = f" on {e['curvature_rows']} rows" if what == "product_few" else f" on {e['rows']} rows"
            rows.append((what.partition("_")[0] + few, dense, sparse, f"{e[what + '_speedup']:.1f}"))
        dense, sparse = e["dense_bytes"], e["sparse_bytes"]
        rows.append(("peak memory of a step", _mebibytes(dense), _mebibytes(sparse), f"{dense / max(sparse, 1):.1f}"))
    return rows


def _compiled(found: dict[str, Any]) -> Rows:
    return [
        (e["network"], e["skipped"], "", "", "")
        if "skipped" in e
        else (
            e["network"],
            _seconds(e["plain"]["median_seconds"]),
            _seconds(e["compiled"]["median_seconds"]),
            f"{e['compiled_over_plain']:.2f}",
            _seconds(e["compilation_seconds"]),
        )
        for e in found.values()
    ]


def _peers(found: dict[str, Any]) -> Rows:
    return [
        (e["peer"], e["package"] or "–", e["setup"], e["skipped"], "", "")
        if "skipped" in e
        else (
            e["peer"],
            e["package"],
            e["setup"],
            _seconds(e["seconds_per_step"]),
            f"{e['seconds_per_epoch']:.3g} s",
            f"{e['over_adam']:.2f}" if "over_adam" in e else "",
        )
        for e in found.values()
    ]


_TABLES: dict[str, tuple[str, Sequence[str], Callable[[dict[str, Any]], Rows]]] = {
    "step": (
        "A step and its floor",
        ("network", "parameters", "rows / curvature", "products + evaluations", "step", "floor", "step / floor"),
        _step,
    ),
    "anatomy": (
        "Where a step's time goes",
        ("network", "matrix products", "passes over vectors", "elementwise work of the network", "all else"),
        _anatomy,
    ),
    "product": (
        "A Gauss-Newton product and a gradient, on the same rows",
        ("network", "rows", "product", "gradient", "product / gradient"),
        _product,
    ),
    "scaling": (
        "Cost of a step against size",
        ("what grows", "a step (step / floor)", "exponent", "exponent of the floor", "fitted"),
        _scaling,
    ),
    "memory": ("Peak memory", ("network", "gradient", "step", "step / gradient"), _memory),
    "sparse": ("Reuters' shape, dense and sparse", ("what", "dense", "sparse", "dense / sparse"), _sparse),
    "compiled": (
        "An evaluation of the objective, plain and through torch.compile",
        ("network", "plain", "compiled", "compiled / plain", "compilation"),
        _compiled,
    ),
    "peers": (
        "Seconds per epoch of 60 batches, MNIST classifier, 1000 rows each",
        ("optimizer", "package", "set up", "step", "epoch", "against Adam"),
        _peers,
    ),
}


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
        lines = [" | ".join(row) for row in (heads, ["---"] * len(heads), *rows)]
        parts.append(f"**{title}**\n\n" + "\n".join(f"| {line} |" for line in lines))
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
