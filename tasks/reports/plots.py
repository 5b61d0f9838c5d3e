"""Curves over training steps as SVG: a small chart per benchmark and metric, drawn with matplotlib.

The charts are for HTML pages. Ink, grid and series colors are CSS variables with a fallback, so the same drawing works
in light and dark mode; text stays text, in common fonts; there are no external references. The same points give the
same bytes.
"""

from __future__ import annotations

import html
import io
import math
import re
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter
from matplotlib.transforms import Transform, offset_copy

from resources.errors import RecordStatus

WIDTH, HEIGHT = 400, 295
"""Size of a chart in CSS pixels, without the legend below."""
Z_95 = 1.96
"""Half width of a 95 % interval in standard errors."""
SERIES_COLOURS = ("#0072b2", "#c75000", "#007f5c", "#a3498a", "#8f6400", "#3d7fb0", "#5a5f66")
"""Okabe and Ito's colors, distinguishable for color-blind readers, darkened to 3:1 against white."""

_INK, _MUTED, _GRID, _PAPER, _BAD = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {
    _INK: "currentColor",
    _MUTED: "var(--chart-muted, #55606e)",
    _GRID: "var(--chart-grid, #dfe3e8)",
    _PAPER: "var(--chart-paper, #ffffff)",
    _BAD: "var(--bad, #a8261c)",
} | {f"#0a0a0{index}": f"var(--series-{index}, {colour})" for index, colour in enumerate(SERIES_COLOURS)}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_GAP_MARKERS: dict[str, str] = {"withheld": "d", "failed": "x", "infra_failed": "+"}
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_STYLE = f'style="font-family: {_FONTS}; stroke-linejoin: round"'
_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND_ROW = 48, 14, 72, 46, 20
_CHANGED_BUILD: dict[str, Any] = {"color": _MUTED, "linewidth": 1, "linestyle": (0, (6, 2, 1, 2))}
_MEAN: dict[str, Any] = {"color": _INK, "linewidth": 1.5, "linestyle": (0, (1, 1))}
_RING: dict[str, Any] = {"marker": "o", "markersize": 14, "markerfacecolor": "none", "linestyle": "none"}
_ALERTS: dict[str, dict[str, Any]] = {
    "open": {**_RING, "markeredgecolor": _BAD, "markeredgewidth": 2.2},
    "acknowledged": {**_RING, "markeredgecolor": _MUTED, "markeredgewidth": 1.5},
}
_CHARACTER = 7.5  # upper estimate of a character's width in a 12.5 px label, in px
_MOST_WITH_CAPS = 25  # points on a curve; with more, markers and lines are finer
_SETTINGS_LOCK = threading.Lock()  # matplotlib's settings are global, and Prefect's tasks are threads
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "text.parse_math": False,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "legend.labelcolor": _INK,
}


def interval(value: float, stderr: float | None, low: float | None, high: float | None) -> tuple[float, float] | None:
    """Returns the 95 % interval of a number: as given, else from its standard error; None if neither is known.

    A standard error of 0 means that all answers have the same score, which gives no interval.
    """
    if low is not None and high is not None:
        return low, high
    return (value - Z_95 * stderr, value + Z_95 * stderr) if stderr else None


@dataclass(frozen=True)
class Point:
    """A checkpoint on a curve; without a finite value it is a gap, marked with a symbol for its status."""

    step: int
    value: float | None
    interval: tuple[float, float] | None
    status: RecordStatus
    change: bool = False
    """True if its versions differ from those of the previous point."""
    broken: bool = False
    """True if that change is not qualified, so that the line is interrupted."""
    outer: tuple[float, float] | None = None
    """Ends of its 95 % interval over draws of questions and checkpoints; empty if unknown."""
    mean: tuple[float, float, float] | None = None
    """Mean of the last checkpoints up to this point, and the ends of its 95 % interval; empty with too few."""
    alert: Literal["open", "acknowledged"] | None = None
    """State of an alert at this point."""

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of its 95 % interval; the value itself if unknown."""
        value = self.value if self.value is not None else math.nan
        return self.interval or (value, value)

    @property
    def shown(self) -> bool:
        return self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True)
class Curve:
    """The points of a run by step; `series` is the index of the run, which selects color and marker.

    Merged checkpoints of a run are curves of their own in its color, with open markers; `merged` numbers them from 1.
    """

    run: str
    points: tuple[Point, ...]
    series: int = 0
    merged: int = 0


@dataclass(frozen=True)
class Chart:
    """A metric of a benchmark, with a curve per run."""

    title: str
    note: str
    description: str
    curves: tuple[Curve, ...]


def chart_svg(chart: Chart, *, name: str) -> str:
    """Returns an `<svg>` element for a page; `name` must be unique in the page."""
    return drawn(chart, name)[0]


def charts_svg(charts: Sequence[Chart], *, columns: int = 2) -> str:
    """Returns a standalone SVG (with XML namespace and background) of several charts, in rows of `columns`."""
    pictures = [drawn(chart, f"chart-{index}") for index, chart in enumerate(charts)]
    row_height = max((height for _, height in pictures), default=HEIGHT)
    columns = max(1, min(columns, len(pictures)))
    rows = max(1, math.ceil(len(pictures) / columns))
    placed = [
        svg.replace("<svg ", f'<svg x="{index % columns * WIDTH}" y="{index // columns * row_height}" ', 1).replace(
            'width="100%"', f'width="{WIDTH}" height="{height}"', 1
        )
        for index, (svg, height) in enumerate(pictures)
    ]
    if not placed:
        placed = [f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">No results yet</text>']
    size = f'width="{columns * WIDTH}" height="{rows * row_height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {columns * WIDTH} {rows * row_height}" style="color: #1b222c; font: 14px {_FONTS}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(placed)}</svg>\n'
    )


def step_label(step: float) -> str:
    """Formats a training step, shortened if exact: 500, 2k, 2,048, 1.5M."""
    if step >= 1_000_000 and step % 10_000 == 0:
        return f"{step / 1_000_000:g}M"
    if step >= 1_000 and step % 100 == 0:
        return f"{step / 1_000:g}k"
    return f"{step:,.0f}"


_STEP_FORMATTER = FuncFormatter(lambda value, _: step_label(value).replace("-", "−"))


@lru_cache(256)
def drawn(chart: Chart, name: str) -> tuple[str, int]:
    """Returns the `<svg>` element and its height in px; cached, since page and picture share charts (40 ms each)."""
    statuses = [status for status in _GAP_MARKERS if any(p.status == status for c in chart.curves for p in c.points)]
    legend = _legend(chart, statuses)
    legend_columns = 1 if any(len(label) > 20 for _, label in legend) else 2
    height = HEIGHT + math.ceil(len(legend) / legend_columns) * _LEGEND_ROW + (6 if legend else 0)
    with _SETTINGS_LOCK, matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the browser draws the text with its own fonts
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none")
        bottom = _BOTTOM + height - HEIGHT
        axes = figure.add_axes(
            (_LEFT / WIDTH, bottom / height, (WIDTH - _LEFT - _RIGHT) / WIDTH, (height - bottom - _TOP) / height)
        )
        for text, top, style in (
            (_shortened(chart.title, 42), 6, {"color": _INK, "weight": "bold", "size": 14}),
            (chart.note, 26, {"color": _MUTED, "size": 12, "linespacing": 1.3}),
        ):
            figure.text(6 / WIDTH, 1 - top / height, text, va="top", **style)
        _draw_axes(axes, chart)
        for index, curve in enumerate(chart.curves):
            _draw_curve(axes, curve, index, len(chart.curves))
        if legend:
            box = figure.legend(
                [handle for handle, _ in legend],
                [
                    str(number) for number in range(len(legend))
                ],  # placeholders, since labels with a leading underscore are left out
                loc="lower left",
                bbox_to_anchor=(6 / WIDTH, 2 / height),
                ncols=legend_columns,
                borderpad=0.2,
                labelspacing=0.45,
            )
            for text, (_, label) in zip(box.get_texts(), legend, strict=True):
                text.set_text(label)
        output = io.StringIO()
        FigureCanvasSVG(figure).print_svg(output, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _for_a_page(output.getvalue(), chart), height


def _draw_axes(axes: Axes, chart: Chart) -> None:
    steps = sorted({point.step for curve in chart.curves for point in curve.points})
    axes.set_facecolor("none")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0, pad=6, labelsize=12.5)
    axes.tick_params(axis="x", length=4, color=_MUTED, pad=4)
    axes.set_xlabel("training step", color=_MUTED, size=12, labelpad=3)
    _scale_steps(axes, steps)
    edges = [
        end
        for curve in chart.curves
        for point in curve.points
        if point.shown
        for end in (*point.ends, *(point.outer or ()), *(point.mean or ()))
    ]
    if not edges:
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, "no numbers yet", transform=axes.transAxes, ha="center", color=_MUTED, backgroundcolor=_PAPER
        )
        return
    low, high = min(edges), max(edges)
    if low > 0 and low < 0.5 * high:
        low = 0.0  # start the axis at zero
    pad = max(0.07 * (high - low), 0.02 * abs(high)) or 0.05
    axes.set_ylim(low - (0 if low == 0 and min(edges) > pad else pad), high + pad)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(_STEP_FORMATTER if high >= 1e3 else ScalarFormatter(useOffset=False))


def _scale_steps(axes: Axes, steps: Sequence[int]) -> None:
    positive = [step for step in steps if step > 0]
    if positive and steps[-1] > 20 * positive[0] and median(steps) < 0.25 * steps[-1]:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        axes.set_xlabel("training step (log scale)")
    axes.update_datalim([(step, 0.0) for step in steps])
    axes.autoscale_view(scaley=False)
    axes.autoscale(False)
    where = {step: float(axes.transData.transform((step, 0.0))[0]) for step in steps}
    labelled = _apart(where)
    if len(labelled) == len(steps) or axes.get_xscale() != "linear":
        axes.set_xticks(labelled, minor=False)
        axes.set_xticks([], minor=True)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(_STEP_FORMATTER)


def _apart(where: dict[int, float]) -> list[int]:
    kept: list[int] = []
    free_up_to = math.inf
    for step, place in reversed(where.items()):
        half = len(step_label(step)) * _CHARACTER / 2
        if place + half + 6 <= free_up_to:
            kept.insert(0, step)
            free_up_to = place - half
    return kept


def _draw_curve(axes: Axes, curve: Curve, index: int, curves: int) -> None:
    aside = (index - (curves - 1) / 2) * 3.5
    shown = offset_copy(axes.transData, x=aside, units="dots")
    foot = offset_copy(axes.get_xaxis_transform(), x=aside, units="dots")
    look = _look(curve)
    colour = str(look["color"])
    fine = len(curve.points) > _MOST_WITH_CAPS
    drawn = [  # NaN before each broken point interrupts the line
        (point.step, value, value - point.ends[0], point.ends[1] - value)
        for point in curve.points
        for value in ([math.nan] if point.broken else [])
        + [point.value if point.value is not None and point.shown else math.nan]
    ]
    steps, values, below, above = zip(*drawn, strict=True)
    axes.errorbar(
        steps,
        values,
        yerr=[[max(0.0, reach) for reach in below], [max(0.0, reach) for reach in above]],
        **{"markeredgecolor": colour if fine else _PAPER, **look, "transform": shown, "clip_on": False, "zorder": 3},
        **{"markersize": 3 if fine else 6, "elinewidth": 1 if fine else 1.3, "capsize": 0 if fine else 3},
        capthick=1.3,
    )
    _draw_training(axes, curve, shown, colour, fine=fine)
    for point in curve.points:
        if point.change:
            axes.axvline(point.step, zorder=1, **_CHANGED_BUILD)
    for point in curve.points:
        if not point.shown:
            axes.axvline(point.step, color=_MUTED, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
            axes.add_line(_gap_symbol(point.status, colour, at=point.step, transform=foot))


def _draw_training(axes: Axes, curve: Curve, transform: Transform, colour: str, *, fine: bool) -> None:
    if both := [(point.step, *point.outer) for point in curve.points if point.outer and point.shown]:
        axes.vlines(*zip(*both, strict=True), color=colour, linewidth=0.7 if fine else 1, alpha=0.55,
                    transform=transform, clip_on=False, zorder=2)  # fmt: skip
    pieces: list[list[Point]] = [[]]
    for point in curve.points:
        pieces += [[]] if point.broken or not point.mean else []
        pieces[-1] += [point] if point.mean else []
    for piece in pieces:
        if len(piece) < 2:
            continue
        steps, (means, low, high) = [p.step for p in piece], zip(*(p.mean for p in piece if p.mean), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0, transform=transform, zorder=1)
        axes.plot(steps, means, transform=transform, clip_on=False, zorder=4, **_MEAN)
    for point in curve.points:
        if point.alert and point.shown:
            axes.plot([point.step], [point.value or 0.0], transform=transform, clip_on=False, zorder=5,
                      **_ALERTS[point.alert])  # fmt: skip


def _look(curve: Curve) -> dict[str, Any]:
    colour = f"#0a0a0{curve.series % len(SERIES_COLOURS)}"
    look: dict[str, Any] = {
        "color": colour,
        "marker": _MARKERS[(curve.series + curve.merged) % len(_MARKERS)],
        "linestyle": _DASHES[curve.series // len(SERIES_COLOURS) % len(_DASHES)],
        "linewidth": 2,
    }
    if curve.merged:
        look |= {
            "linestyle": (0, (3, 1.5)),
            "markerfacecolor": _PAPER,
            "markeredgecolor": colour,
            "markeredgewidth": 1.5,
        }
    return look


def _gap_symbol(status: str, colour: str, *, at: float | None = None, transform: object = None) -> Line2D:
    placed = {} if at is None else {"transform": transform, "clip_on": False, "zorder": 4}
    return Line2D([0 if at is None else at], [0 if at is None else 0.06], linestyle="none", markersize=8,
                  marker=_GAP_MARKERS.get(status, "x"), markeredgecolor=colour, markerfacecolor=_PAPER,
                  markeredgewidth=2, **placed)  # fmt: skip


def _legend(chart: Chart, statuses: Sequence[str]) -> list[tuple[Line2D, str]]:
    runs = [(Line2D([], [], markersize=6, **_look(curve)), _shortened(curve.run, 44)) for curve in chart.curves]
    gaps = [(_gap_symbol(status, _INK), f"{status}: no number") for status in statuses]
    changed = any(point.change for curve in chart.curves for point in curve.points)
    builds = [(Line2D([], [], **_CHANGED_BUILD), "other versions from here")] if changed else []
    points = [point for curve in chart.curves for point in curve.points]
    means = sum(point.mean is not None for point in points) > 1
    mean = [(Line2D([], [], **_MEAN), "mean score of the last 5 checkpoints, 95 %")] if means else []
    alerts = [
        (Line2D([], [], **{**look, "markersize": 9}), {"open": "alert"}.get(state, f"alert, {state}"))
        for state, look in _ALERTS.items()
        if any(point.alert == state for point in points)
    ]
    return (runs if len(runs) > 1 else []) + mean + alerts + gaps + builds


def _shortened(text: str, length: int) -> str:
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def _for_a_page(svg: str, chart: Chart) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href=", "href=")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", body)
    body = re.sub(r"font-family: 'DejaVu Sans'[^;\"]*; ", "", body)
    body = re.sub(r"(?<=: )#0[a0-9]{5}\b", lambda m: _VARIABLES.get(m[0], m[0]), body)
    box = re.search(r'viewBox="[^"]+"', body)
    label = html.escape(chart.description, quote=True)
    opening = f'<svg class="chart" role="img" aria-label="{label}" width="100%" {box[0] if box else ""} {_STYLE}>'
    return re.sub(r"<svg[^>]*>", lambda _: opening, body, count=1).strip()
