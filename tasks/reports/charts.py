"""Charts of columns with both noises, means of the last checkpoints, and marks at alerts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tasks.records.current import sharing_no_input
from tasks.records.numbers import Z_95, interval, measured
from tasks.records.record import Metric
from tasks.reports import plots
from tasks.reports.table import Column, Results, described, questions
from tasks.verdicts.statistics.training_noise import (
    LAST,
    LastCheckpoints,
    Point,
    TrainingNoise,
    mean_of_last,
    training_noise,
    trends,
)


def chart_of(
    results: Results, column: Column, *, title: str | None = None, acknowledged: Iterable[str] = ()
) -> plots.Chart:
    """Returns the chart of a column with a curve per run; `acknowledged` has the ids of acknowledged alerts."""
    curves = []
    changed = {(change.run, change.step): change for change in results.build_changes(column)}
    known = frozenset(acknowledged)
    fallen = (drop.alert for drop in results.drops_of(column))
    alerts = {(alert.run, alert.step): alert.id in known for alert in fallen}
    noises = wavering(results, column)
    for run in results.runs:
        means = last_means(results, column, run, noises)
        of_run = [checkpoint for checkpoint in results.checkpoints if checkpoint.run == run]
        outcomes = ((checkpoint, results.outcome(checkpoint, column)) for checkpoint in of_run)
        places = ((c, o, None if c.label else (run, c.step)) for c, o in outcomes if o)
        points = tuple(
            plots.Point(
                c.step,
                o.metric.value if o.metric else None,
                interval(o.metric) if o.metric else None,
                o.record.status,
                change=at in changed,
                broken=at in changed and not changed[at].qualified,
                outer=_outer(o.metric, None if c.label else noises.get(run)),
                mean=_mean(means.get(c.step) if at else None),
                alert=None if at not in alerts else "acknowledged" if alerts[at] else "open",
                label=c.label,
            )
            for c, o, at in places
            if o.metric or not o.record.succeeded
        )
        curves += [plots.Curve(run, points, *results.place_of(run))] if points else []
    metrics = results.metrics(column)
    direction = {True: "higher is better · ", False: "lower is better · ", None: ""}[column.higher_is_better]
    note = f"{direction}{questions(metrics)}\n{_bars(curves)}"
    changes = "; ".join(described(change) for change in results.changes(column))
    fallen = "".join(f" Alert: {run}, step {step:,}." for run, step in alerts)
    description = f"{results.named(column)} over training steps. {changes or 'No change to show yet'}.{fallen}"
    return plots.Chart(title or column.label, note if metrics else "", description, tuple(curves))


def _outer(metric: Metric | None, known: Wavering | None) -> tuple[float, float] | None:
    inner = interval(metric) if metric else None
    if metric is None or inner is None or known is None or not math.isfinite(metric.value):
        return None
    reach = Z_95 * known.noise.stddev
    return metric.value - math.hypot(metric.value - inner[0], reach), metric.value + math.hypot(
        inner[1] - metric.value, reach
    )


def _mean(mean: LastCheckpoints | None) -> tuple[float, float, float] | None:
    if mean is None:
        return None
    reach = Z_95 * (mean.stderr or 0.0)
    return mean.mean, mean.mean - reach, mean.mean + reach


def _bars(curves: Iterable[plots.Curve]) -> str:
    points = [point for curve in curves for point in curve.points]
    if not any(point.interval for point in points):
        return "no standard errors given, so no bars"
    thin = "; thin: of questions and training" if any(point.outer for point in points) else ""
    return f"bars: 95 % interval{' of questions' if thin else ''}{thin}"


_SHOWN = 8  # curves listed in a terminal


class Wavering(NamedTuple):
    """Noise of training in a curve; `siblings` is True if it comes from the other runs of its chart."""

    noise: TrainingNoise
    siblings: bool


def wavering(results: Results, column: Column) -> dict[str, Wavering]:
    """Returns the noise of training in a column by run: its own, else that of the other runs; omitted if unknown.

    Merged checkpoints have less noise than written checkpoints, so a merged curve uses only curves of the same kind of
    merge.
    """
    pieces = {run: [_points(piece) for piece in _pieces(results, column, run)] for run in results.runs}
    noises: dict[str, Wavering] = {}
    for run, own in pieces.items():
        alike = [other for other in pieces if other != run and results.merged_by(other) == results.merged_by(run)]
        noise, siblings = training_noise(own), [piece for other in alike for piece in pieces[other]]
        if noise is None and (noise := training_noise(siblings)) is not None:
            noises[run] = Wavering(noise, siblings=True)
        elif noise is not None:
            noises[run] = Wavering(noise, siblings=False)
    return noises


def last_means(
    results: Results, column: Column, run: str, noises: Mapping[str, Wavering]
) -> dict[int, LastCheckpoints]:
    """Returns means of a run's last checkpoints by the step of the last, as soon as there are enough checkpoints.

    Merged checkpoints have none, since neighbors may share inputs, and so their noise.
    """
    if results.merged_by(run):
        return {}
    noise = noises[run].noise if run in noises else None
    means: dict[int, LastCheckpoints] = {}
    for piece in _pieces(results, column, run):
        points, stderrs = _points(piece), [metric.stderr for _, metric in piece]
        for end in range(LAST, len(piece) + 1):
            if mean := mean_of_last(points[end - LAST : end], stderrs[end - LAST : end], noise=noise):
                means[piece[end - 1][0]] = mean
    return means


def _pieces(results: Results, column: Column, run: str) -> list[list[tuple[int, Metric]]]:
    broken = {c.step for c in results.build_changes(column) if c.run == run and not c.qualified}
    pieces: list[list[tuple[int, Metric]]] = [[]]
    outcomes = [outcome for c in results.steps_of(run) if (outcome := results.outcome(c, column)) is not None]
    apart = sharing_no_input(outcome.record.checkpoint for outcome in outcomes)
    for checkpoint, metric in ((outcome.record.checkpoint, outcome.metric) for outcome in outcomes):
        if checkpoint in apart and metric is not None and math.isfinite(metric.value):
            pieces += [[]] if checkpoint.step in broken else []
            pieces[-1].append((checkpoint.step, metric))
    return pieces


def _points(piece: Iterable[tuple[int, Metric]]) -> list[Point]:
    return [(step, metric.value) for step, metric in piece]


class Summary(NamedTuple):
    """Texts about a whole curve; empty with too few checkpoints."""

    last: str
    noise: str


def _summary(results: Results, column: Column, run: str) -> Summary:
    noises = wavering(results, column)
    latest = _points(_pieces(results, column, run)[-1][-LAST:])
    if run not in noises or (len(latest) == LAST and trends(latest, noises[run].noise)):
        return Summary("", "")
    mean = last_means(results, column, run, noises).get(int(latest[-1][0])) if latest else None
    siblings = " (other runs)" if noises[run].siblings else ""
    return Summary(
        measured(mean.mean, mean.stderr) if mean else "", f"± {measured(noises[run].noise.stddev)}{siblings}"
    )


def summary_rows(results: Results, columns: Sequence[Column], run: str) -> list[tuple[str, list[str]]]:
    """Returns rows about the whole curves of a run, aligned with some columns; leaves out empty rows."""
    summaries = [_summary(results, column, run) for column in columns]
    rows = [
        (f"mean of the last {LAST}, ± standard error", [each.last for each in summaries]),
        ("wavers by, ± standard deviation", [each.noise for each in summaries]),
    ]
    return [(name, texts) for name, texts in rows if any(texts)]


def noise_note(results: Results, columns: Sequence[Column]) -> list[str]:
    """Returns a line with the noise of scores between checkpoints; no line if it is unknown."""
    summaries = [
        (column, run, text)
        for column in columns
        for run in results.runs
        if (text := _summary(results, column, run)).noise
    ]
    several = len(results.runs) > 1
    lines = [
        f"{results.named(column)}{f' of {run}' if several else ''} {text.noise}"
        + (f", mean of the last {LAST} {text.last}" if text.last else "")
        for column, run, text in summaries[:_SHOWN]
    ]
    more = [f"{len(summaries) - _SHOWN} more in the report"] if len(summaries) > _SHOWN else []
    measures = "± standard deviation (means: ± standard error)"
    return [f"From checkpoint to checkpoint, {measures}: {'; '.join(lines + more)}"] if lines else []
