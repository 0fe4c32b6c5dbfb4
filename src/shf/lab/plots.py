"""Charts as SVG: thin lines, labels at the lines' ends, a grid that stays back, colours that the page decides.

matplotlib draws with placeholder colours; they are replaced by CSS variables, so that one drawing serves light and dark.
The series' colours (Okabe and Ito's, adapted) can be told apart by the colour-blind; no text depends on them. The same
chart gives the same bytes. No torch here.
"""

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from xml.sax.saxutils import quoteattr

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

Values = NDArray[np.float64]

SERIES_COLOURS = 8
_MOST_POINTS = 600
_INCHES = (4.1, 2.8)
_LABEL_COLUMNS = 13
_LABEL_LINES = 3
_NARROW = 0.3  # decades: a log scale would have no two ticks

# placeholder -> CSS variable; the placeholders are colours that matplotlib would not choose by itself
_INK, _QUIET, _GRID = "#010203", "#010204", "#010205"
_SERIES = tuple(f"#0103{i:02x}" for i in range(SERIES_COLOURS))
_VARIABLES = {_INK: "--ink", _QUIET: "--quiet", _GRID: "--grid"} | {c: f"--series-{i}" for i, c in enumerate(_SERIES)}


def _palette(ink: str, quiet: str, grid: str, *series: str) -> dict[str, str]:
    return {"--ink": ink, "--quiet": quiet, "--grid": grid} | {f"--series-{i}": c for i, c in enumerate(series)}


# fmt: off
_LIGHT = _palette(
    "#1b1f24", "#5c6570", "#e3e6ea",
    "#0072b2", "#d55e00", "#00916a", "#c0569b", "#b07d00", "#3a9bd9", "#7a5195", "#5c6570",
)
_DARK = _palette(
    "#e6e8eb", "#9aa4af", "#2c333b",
    "#4fb3f0", "#ff8a3d", "#2ec99a", "#ea8cc8", "#e6b422", "#9ad4ff", "#b695d6", "#9aa4af",
)
# fmt: on


@dataclass(frozen=True)
class Series:
    """One line of a chart. `label` stands at its end (empty: none); `colour` is an index of the palette."""

    label: str
    x: Values
    y: Values
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn: `title` says what the vertical axis measures."""

    name: str
    title: str
    x_label: str
    series: tuple[Series, ...]
    log_y: bool = False
    references: tuple[float, ...] = ()
    y_limits: tuple[float, float] | None = None
    log_x: bool = False


def palette_css() -> str:
    """CSS rules that give every variable of the charts its colour, in light and in dark."""
    light = "".join(f"{name}:{value};" for name, value in _LIGHT.items())
    dark = "".join(f"{name}:{value};" for name, value in _DARK.items())
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def draw(chart: Chart, *, standalone: bool = False) -> str:
    """The chart as an SVG element; `standalone` adds the palette, for a file of its own."""
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.name,
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.unicode_minus": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=_INCHES)
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.12, 0.155, 0.61, 0.725))
        _scales(axes, chart)
        _frame(axes, chart)
        _lines(axes, chart)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _themed(buffer.getvalue().decode(), chart.title, standalone)


def _scales(axes: Axes, chart: Chart) -> None:
    every_y = np.concatenate([s.y[np.isfinite(s.y)] for s in chart.series] or [np.zeros(1)])
    every_x = np.concatenate([s.x[np.isfinite(s.x)] for s in chart.series] or [np.zeros(1)])
    _scale(axes, "y", every_y, chart.log_y)
    is_log = _scale(axes, "x", every_x, chart.log_x)
    if every_x.size and every_x.max() > 0:
        axes.set_xlim(float(every_x[every_x > 0].min()) if is_log else 0, float(every_x.max()))
    if chart.y_limits is not None:
        axes.set_ylim(*chart.y_limits)


def _scale(axes: Axes, direction: Literal["x", "y"], values: Values, log: bool) -> bool:
    """Gives an axis its ticks; returns whether it has become a log scale, which values close together do not get."""
    axis = axes.yaxis if direction == "y" else axes.xaxis
    positive = values[values > 0]
    is_log = log and positive.size > 0 and _decades(positive) >= _NARROW
    if is_log:
        axes.set(**{f"{direction}scale": "log"})
        axis.set_major_locator(LogLocator(subs=_log_steps(_decades(positive)), numticks=12))
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(LogLocator(subs=()))
    else:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    return is_log


def _decades(positive: Values) -> float:
    return math.log10(float(positive.max()) / float(positive.min()))


def _log_steps(decades: float) -> tuple[float, ...]:
    """More ticks per decade the fewer decades there are."""
    if decades < 0.7:
        return (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    if decades < 2:
        return (1.0, 2.0, 5.0)
    return (1.0,) if decades > 3 else (1.0, 3.0)


def _frame(axes: Axes, chart: Chart) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.grid(True, axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_QUIET, labelsize=8)
    axes.set_title(chart.title, loc="left", x=-0.17, fontsize=9, fontweight="bold", color=_INK, pad=9)
    axes.set_xlabel(chart.x_label, color=_QUIET, fontsize=8.5, loc="left", labelpad=3)
    for value in chart.references:
        axes.axhline(value, color=_QUIET, linewidth=0.7, dashes=(1.5, 2.5))


def _lines(axes: Axes, chart: Chart) -> None:
    ends: list[tuple[float, float, Series]] = []
    for series in chart.series:
        x, y = thinned(np.where(series.x > 0, series.x, np.nan) if chart.log_x else series.x, series.y)
        if x.size == 0:
            continue
        colour = _SERIES[series.colour % SERIES_COLOURS]
        style: tuple[int, tuple[float, ...]] | str = (0, (3.0, 2.0)) if series.dashed else "-"
        width = 0.9 if series.dashed else 1.3
        axes.plot(x, y, color=colour, linewidth=width, linestyle=style, solid_joinstyle="round")
        if series.label:
            ends.append((float(x[-1]), float(y[-1]), series))
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, Series]]) -> None:
    """A dot at every line's end, and its name in the margin beside it; names that would overlap are moved apart."""
    if not ends:
        return
    axes.autoscale_view()  # matplotlib would do so later, and the ends would be looked up on the wrong scale
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(np.clip(to_axes.transform((x, y))[1], 0.0, 1.0)) for x, y, _ in ends]
    labels = [_wrapped(series.label) for _, _, series in ends]
    gap = 0.078 * max(label.count("\n") + 1 for label in labels)
    for (x, y, series), label, height in zip(ends, labels, spread(heights, gap), strict=True):
        colour = _SERIES[series.colour % SERIES_COLOURS]
        axes.plot([x], [y], "o", color=colour, markersize=3.2, clip_on=False)
        axes.plot([1.025, 1.055], [height, height], color=colour, linewidth=2, transform=axes.transAxes, clip_on=False)
        axes.text(1.07, height, label, transform=axes.transAxes, va="center", fontsize=8.5, color=_INK)


def _wrapped(label: str) -> str:
    """The label in lines that fit the margin; what is too long ends in an ellipsis."""
    return "\n".join(textwrap.wrap(label, _LABEL_COLUMNS, max_lines=_LABEL_LINES, placeholder="…"))


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights near the given ones, at least `gap` apart, in the same order, inside [0, 1] as far as they fit."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [0.0] * len(heights)
    below = -math.inf
    for i in order:
        placed[i] = below = max(heights[i], below + gap)
    above = 1.0 + gap
    for i in reversed(order):
        placed[i] = above = min(placed[i], above - gap)
    return placed


def thinned(x: Values, y: Values) -> tuple[Values, Values]:
    """The finite points, at most 600 of them: per stretch the lowest and the highest, so that no spike is lost."""
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = x[keep], y[keep]
    if x.size <= _MOST_POINTS:
        return x, y
    chosen = {0, x.size - 1}
    for stretch in np.array_split(np.arange(x.size), _MOST_POINTS // 2 - 1):
        chosen |= {int(stretch[np.argmin(y[stretch])]), int(stretch[np.argmax(y[stretch])])}
    rows = np.array(sorted(chosen))
    return x[rows], y[rows]


def _themed(svg: str, title: str, standalone: bool) -> str:
    """Placeholders to variables; the XML prologue, fixed sizes and ids that nobody refers to are taken out."""
    svg = svg[svg.index("<svg") :]
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var({variable},{_LIGHT[variable]})")
    svg = re.sub(r"font-family: [^;\"]+", "font-family: system-ui, sans-serif", svg)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head_end = svg.index(">")
    head = re.sub(r' (?:width|height)="[^"]*"', "", svg[:head_end]) + f' role="img" aria-label={quoteattr(title)}'
    style = f"<style>{palette_css()}</style>" if standalone else ""
    return head + ">" + style + svg[head_end + 1 :].rstrip() + "\n"
