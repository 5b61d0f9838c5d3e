"""Curves over training steps as SVG: a small chart per benchmark and metric.

The charts are for HTML pages. Ink, grid and series colors are CSS variables with a fallback, so the same drawing works
in light and dark mode; text stays text, in common fonts; there are no ids, scripts or references.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import median
from typing import Literal

from resources.errors import RecordStatus
from tasks.spec.labels import order_of

WIDTH, HEIGHT = 400, 295
"""Size of a chart in CSS pixels, without the legend below."""
_SERIES_COLOURS = ("#0072b2", "#c75000", "#007f5c", "#a3498a", "#8f6400", "#3d7fb0", "#5a5f66")
"""Okabe and Ito's colors, distinguishable for color-blind readers, darkened to 3:1 against white."""
_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND_ROW = 48, WIDTH - 14, 72, HEIGHT - 46, 20
_INK, _MUTED, _GRID = "currentColor", "var(--chart-muted, #55606e)", "var(--chart-grid, #dfe3e8)"
_PAPER, _BAD = "var(--chart-paper, #ffffff)", "var(--bad, #a8261c)"
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_LABEL = 52  # width of a label behind the axis, in px
_CHARACTER = 7.5  # upper estimate of a character's width in a 12.5 px label, in px
_MOST_WITH_CAPS = 25  # points on a curve; with more, markers and lines are finer
_RING = "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0z"
_MARKERS = (
    _RING,
    "M-.9-.9H.9V.9H-.9z",
    "M0-1.1L1.1.9H-1.1z",
    "M0-1.2L1.2 0L0 1.2L-1.2 0z",
    "M0 1.1L1.1-.9H-1.1z",
    "M-.4-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4z",
    "M-1.1-.6L-.6-1.1L0-.5L.6-1.1L1.1-.6L.5 0L1.1.6L.6 1.1L0 .5L-.6 1.1L-1.1.6L-.5 0z",
)
"""Outlines of markers around 0, with a radius of about 1."""
_GAP_MARKERS: dict[str, str] = {
    "withheld": "M0-1.3L.8 0L0 1.3L-.8 0z",
    "failed": "M-1-1L1 1M-1 1L1-1",
    "infra_failed": "M-1.2 0H1.2M0-1.2V1.2",
    "gone": "M-1.2 0H1.2",
}
_DASHES = ("none", "10 4", "3 3")
_MERGED_DASHES, _MEAN_DASHES, _BUILD_DASHES, _GAP_DASHES = "6 3", "1.5 1.5", "6 2 1 2", "2 3"
_ALERTS = {"open": (_BAD, 2.2), "acknowledged": (_MUTED, 1.5)}


@dataclass(frozen=True)
class Point:
    """A checkpoint on a curve; without a finite value it is a gap, marked with a symbol for its status. With a label it
    has no step: it is behind the axis, on no line."""

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
    label: str | None = None

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

    @property
    def colour(self) -> str:
        index = self.series % len(_SERIES_COLOURS)
        return f"var(--series-{index}, {_SERIES_COLOURS[index]})"

    @property
    def dashes(self) -> str:
        return _MERGED_DASHES if self.merged else _DASHES[self.series // len(_SERIES_COLOURS) % len(_DASHES)]


@dataclass(frozen=True)
class Chart:
    """A metric of a benchmark, with a curve per run."""

    title: str
    note: str
    description: str
    curves: tuple[Curve, ...]

    @property
    def points(self) -> list[Point]:
        return [point for curve in self.curves for point in curve.points]


def chart_svg(chart: Chart) -> str:
    """Returns an `<svg>` element for a page, as wide as its container."""
    content, height = _drawn(chart)
    label = escape(chart.description)
    return (
        f'<svg class="chart" role="img" aria-label="{label}" width="100%" viewBox="0 0 {WIDTH} {height}" '
        f'style="font-family: {_FONTS}; stroke-linejoin: round">{content}</svg>'
    )


def charts_svg(charts: Sequence[Chart], *, columns: int = 2) -> str:
    """Returns a standalone SVG (with XML namespace and background) of several charts, in rows of `columns`."""
    pictures = [_drawn(chart) for chart in charts]
    row_height = max((height for _, height in pictures), default=HEIGHT)
    columns = max(1, min(columns, len(pictures)))
    width, height = columns * WIDTH, max(1, math.ceil(len(pictures) / columns)) * row_height
    placed = "".join(
        f'<g transform="translate({index % columns * WIDTH} {index // columns * row_height})">{content}</g>'
        for index, (content, _) in enumerate(pictures)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'style="color: #1b222c; font: 14px {_FONTS}; stroke-linejoin: round">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>'
        f"{placed or _text('No results yet', WIDTH / 2, HEIGHT / 2, anchor='middle')}</svg>\n"
    )


def step_label(step: float) -> str:
    """Formats a training step, shortened if exact: 500, 2k, 2,048, 1.5M."""
    if step >= 1_000_000 and step % 10_000 == 0:
        return f"{step / 1_000_000:g}M"
    if step >= 1_000 and step % 100 == 0:
        return f"{step / 1_000:g}k"
    return f"{step:,.0f}"


def _drawn(chart: Chart) -> tuple[str, int]:
    legend = _legend(chart)
    columns = 1 if any(len(label) > 20 for _, label in legend) else 2
    rows = math.ceil(len(legend) / columns)
    parts = [_text(_shortened(chart.title, 42), 6, 19, style="font-weight: bold; font-size: 14px")]
    parts += [_text(line, 6, 37 + 16 * row, color=_MUTED) for row, line in enumerate(chart.note.splitlines())]
    labels = sorted({point.label for point in chart.points if point.label}, key=lambda label: order_of(0, label))
    steps = sorted({point.step for point in chart.points if point.label is None})
    right = _RIGHT - min(_LABEL * len(labels), (_RIGHT - _LEFT) / (2 if steps else 1))
    x_of_step, axis = _steps_axis(steps, right=right)
    slots, label_texts = _labels_axis(labels, left=right if steps else _LEFT)

    def x(point: Point) -> float:
        return x_of_step(point.step) if point.label is None else slots[point.label]

    y, grid = _values_axis(chart)
    parts += [*grid, *(axis if steps or not labels else ()), *label_texts]
    for index, curve in enumerate(chart.curves):
        aside = (index - (len(chart.curves) - 1) / 2) * 3.5
        parts += _curve(curve, x, y, aside=aside)
    for number, (sign, label) in enumerate(legend):
        left, top = 6 + number % columns * WIDTH / 2, HEIGHT + 8 + number // columns * _LEGEND_ROW
        parts.append(f'<g transform="translate({left:g} {top})">{sign}{_text(label, 32, 4)}</g>')
    return "".join(parts), HEIGHT + rows * _LEGEND_ROW + (6 if rows else 0)


def _text(
    content: str, x: float, y: float, *, color: str = _INK, anchor: str = "start", style: str = "font-size: 12px"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill: {color}; {style}">{escape(content)}</text>'
    )


def _line(path: str, color: str, width: float, *, dashes: str = "none", style: str = "fill: none") -> str:
    return f'<path d="{path}" style="stroke: {color}; stroke-width: {width:g}; stroke-dasharray: {dashes}; {style}"/>'


def _marker(outline: str, x: float, y: float, radius: float, *, fill: str, stroke: str, width: float = 1.0) -> str:
    place = f"translate({x:.1f} {y:.1f}) scale({radius:g})"
    look = f"fill: {fill}; stroke: {stroke}; stroke-width: {width:g}; vector-effect: non-scaling-stroke"
    return f'<path d="{outline}" transform="{place}" style="{look}"/>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _steps_axis(steps: Sequence[int], *, right: float) -> tuple[Callable[[float], float], list[str]]:
    positive = [step for step in steps if step > 0]
    is_log = bool(positive) and steps[-1] > 20 * positive[0] and median(steps) < 0.25 * steps[-1]

    def scaled(step: float) -> float:
        if not is_log:
            return step
        return 0.5 * step / positive[0] if step <= positive[0] else 0.5 + math.log10(step / positive[0])

    ends = (scaled(steps[0]), scaled(steps[-1])) if steps else (0.0, 1.0)
    span = 1.1 * (ends[1] - ends[0]) or 1.0
    low = (ends[0] + ends[1] - span) / 2

    def x(step: float) -> float:
        return _LEFT + (scaled(step) - low) / span * (right - _LEFT)

    labelled: Sequence[float] = _apart({step: x(step) for step in steps})
    if len(labelled) < len(steps) and not is_log:
        labelled = [step for step in _ticks(low, low + span, 6)[0] if step == round(step) and x(step) <= right - 10]
    parts = [_line(f"M{_LEFT} {_BOTTOM}H{right:.1f}", _MUTED, 1)]
    for step in labelled:
        parts.append(_line(f"M{x(step):.1f} {_BOTTOM}v4", _MUTED, 1))
        label = step_label(step).replace("-", "−")
        parts.append(_text(label, x(step), _BOTTOM + 20, anchor="middle", style="font-size: 12.5px"))
    name = "training step (log scale)" if is_log else "training step"
    return x, [*parts, _text(name, (_LEFT + right) / 2, _BOTTOM + 39, color=_MUTED, anchor="middle")]


def _labels_axis(labels: Sequence[str], *, left: float) -> tuple[dict[str, float], list[str]]:
    if not labels:
        return {}, []
    width = (_RIGHT - left) / len(labels)
    slots = {label: left + width * (number + 0.5) for number, label in enumerate(labels)}
    every = 1 if width >= 0.75 * _LABEL else math.ceil(1.2 * _LABEL / width)
    parts = [_line(f"M{left:.1f} {_TOP}V{_BOTTOM}H{_RIGHT}", _MUTED, 1)]
    for label, place in list(slots.items())[::-every]:
        shown = _shortened(label, max(3, int(width * every / 6.5)))
        parts.append(_text(shown, place, _BOTTOM + 20, anchor="middle", style="font-size: 12.5px"))
    return slots, parts


def _apart(where: dict[int, float]) -> list[int]:
    kept: list[int] = []
    free_up_to = math.inf
    for step, place in reversed(where.items()):
        half = len(step_label(step)) * _CHARACTER / 2
        if place + half + 6 <= free_up_to:
            kept.insert(0, step)
            free_up_to = place - half
    return kept


def _values_axis(chart: Chart) -> tuple[Callable[[float], float], list[str]]:
    edges = [
        end
        for point in chart.points
        if point.shown
        for end in (point.value or 0.0, *(point.interval or ()), *(point.outer or ()), *(point.mean or ()))
    ]
    if not edges:
        words = _text("no numbers yet", (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2, color=_MUTED, anchor="middle")
        return lambda value: _BOTTOM, [words]
    low, high = min(edges), max(edges)
    low = 0.0 if 0 < low < 0.5 * high else low  # start the axis at zero
    pad = max(0.07 * (high - low), 0.02 * abs(high)) or 0.05
    low, high = low - (0.0 if low == 0 and min(edges) > pad else pad), high + pad

    def y(value: float) -> float:
        return _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP)

    parts: list[str] = []
    ticks, decimals = _ticks(low, high, 5)
    for tick in ticks:
        label = step_label(tick) if high >= 1e3 else f"{tick:.{decimals}f}" if decimals < 7 else f"{tick:.3g}"
        parts.append(_line(f"M{_LEFT} {y(tick):.1f}H{_RIGHT}", _GRID, 1))
        label = label.replace("-", "−")
        parts.append(_text(label, _LEFT - 6, y(tick) + 4, anchor="end", style="font-size: 12.5px"))
    return y, parts


def _ticks(low: float, high: float, most: int) -> tuple[list[float], int]:
    least = (high - low) / most
    magnitude = math.floor(math.log10(least))
    factor = next(factor for factor in (1, 2, 2.5, 5, 10) if factor * 10.0**magnitude >= least * (1 - 1e-9))
    distance = factor * 10.0**magnitude
    numbers = range(math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9) + 1)
    return [number * distance for number in numbers], max(0, (factor == 2.5) - magnitude - (factor == 10))


def _curve(curve: Curve, x: Callable[[Point], float], y: Callable[[float], float], *, aside: float) -> list[str]:
    places = {point: x(point) + aside for point in curve.points}
    fine = len(curve.points) > _MOST_WITH_CAPS
    shown = [(point, point.value or 0.0) for point in curve.points if point.shown]
    parts = [
        _line(f"M{x(point):.1f} {_TOP}V{_BOTTOM}", _MUTED, 1, dashes=dashes)
        for point in curve.points
        for dashes, is_drawn in ((_BUILD_DASHES, point.change), (_GAP_DASHES, not point.shown))
        if is_drawn
    ]
    for point, _ in shown:
        if point.outer:
            width = 0.7 if fine else 1
            parts.append(_line(_bar(places[point], *map(y, point.outer)), curve.colour, width, style="opacity: 0.55"))
        if point.interval:
            bar = _bar(places[point], *map(y, point.interval), cap=0 if fine else 3)
            parts.append(_line(bar, curve.colour, 1 if fine else 1.3))
    stretches = [[(places[p], y(p.value or 0.0)) for p in piece] for piece in _pieces(curve, lambda p: p.shown)]
    if stretches:
        parts.append(_line("".join(map(_path, stretches)), curve.colour, 2, dashes=curve.dashes))
    parts += [_sign(curve, places[point], y(value), fine=fine) for point, value in shown]
    for piece in _pieces(curve, lambda point: point.mean is not None):
        means = [(places[point], *map(y, point.mean)) for point in piece if point.mean]
        if len(means) > 1:
            band = [(step, low) for step, _, low, _ in means] + [(step, high) for step, _, _, high in means[::-1]]
            parts.append(f'<path d="{_path(band)}z" style="fill: {curve.colour}; opacity: 0.13"/>')
            parts.append(_line(_path([(step, mean) for step, mean, _, _ in means]), _INK, 1.5, dashes=_MEAN_DASHES))
    for point, value in shown:
        if point.alert:
            parts.append(_alert(point.alert, places[point], y(value), radius=7))
    gaps = [point for point in curve.points if not point.shown]
    return parts + [_gap(point.status, curve.colour, places[point], _BOTTOM - 10) for point in gaps]


def _pieces(curve: Curve, includes: Callable[[Point], bool]) -> list[list[Point]]:
    numbers: list[int] = []
    for point in curve.points:
        numbers.append((numbers[-1] if numbers else 0) + (point.broken or point.label is not None))
    groups = groupby(zip(numbers, curve.points, strict=True), key=lambda pair: (pair[0], includes(pair[1])))
    return [[point for _, point in group] for (_, is_included), group in groups if is_included]


def _bar(x: float, bottom: float, top: float, *, cap: float = 0) -> str:
    caps = f"M{x - cap:.1f} {bottom:.1f}h{2 * cap:g}M{x - cap:.1f} {top:.1f}h{2 * cap:g}" if cap else ""
    return f"M{x:.1f} {bottom:.1f}V{top:.1f}{caps}"


def _sign(curve: Curve, x: float, y: float, *, fine: bool = False) -> str:
    outline, radius = _MARKERS[(curve.series + curve.merged) % len(_MARKERS)], 1.5 if fine else 3
    if curve.merged:
        return _marker(outline, x, y, radius, fill=_PAPER, stroke=curve.colour, width=1.5)
    return _marker(outline, x, y, radius, fill=curve.colour, stroke=curve.colour if fine else _PAPER)


def _gap(status: str, colour: str, x: float, y: float) -> str:
    return _marker(_GAP_MARKERS.get(status, _GAP_MARKERS["failed"]), x, y, 4, fill=_PAPER, stroke=colour, width=2)


def _alert(state: str, x: float, y: float, *, radius: float) -> str:
    colour, width = _ALERTS[state]
    return _marker(_RING, x, y, radius, fill="none", stroke=colour, width=width)


def _legend(chart: Chart) -> list[tuple[str, str]]:
    points = chart.points
    runs = [
        (_line("M0 0H24", curve.colour, 2, dashes=curve.dashes) + _sign(curve, 12, 0), _shortened(curve.run, 44))
        for curve in chart.curves
    ]
    entries = runs if len(runs) > 1 else []
    if sum(point.mean is not None for point in points) > 1:
        mean = _line("M0 0H24", _INK, 1.5, dashes=_MEAN_DASHES)
        entries.append((mean, "mean score of the last 5 checkpoints, 95 %"))
    for state in _ALERTS:
        if any(point.alert == state for point in points):
            name = "alert" if state == "open" else f"alert, {state}"
            entries.append((_alert(state, 12, 0, radius=4.5), name))
    for status in _GAP_MARKERS:
        if any(point.status == status for point in points):
            entries.append((_gap(status, _INK, 12, 0), f"{status}: no number"))
    if any(point.change for point in points):
        entries.append((_line("M0 0H24", _MUTED, 1, dashes=_BUILD_DASHES), "other versions from here"))
    return entries


def _shortened(text: str, length: int) -> str:
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"
