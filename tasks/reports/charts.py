"""Charts of columns: a curve per run with both noises, the mean of the last checkpoints, and marks at alerts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tasks.records.record import Metric
from tasks.reports import plots
from tasks.reports.noises import Wavering, last_means, outcomes_of, wavering
from tasks.reports.table import Column, Results, described, questions
from tasks.verdicts.statistics.training_noise import LastCheckpoints


def chart_of(
    results: Results, column: Column, *, title: str | None = None, acknowledged: Iterable[str] = ()
) -> plots.Chart:
    """Returns the chart of a column with a curve per run; `acknowledged` has the ids of acknowledged alerts."""
    curves = []
    changed = {(change.run, change.step): change for change in results.build_changes(column)}
    known = frozenset(acknowledged)
    alerts = {(alert.run, alert.step): alert.id in known for alert in results.alerts_of(column)}
    noises = wavering(results, column)
    for run in results.runs:
        means = last_means(results, column, run, noises)
        points = tuple(
            plots.Point(
                step,
                o.metric.value if o.metric else None,
                _interval(o.metric),
                o.record.status,
                change=(run, step) in changed,
                broken=(run, step) in changed and not changed[run, step].qualified,
                outer=_outer(o.metric, noises.get(run)),
                mean=_mean(means.get(step)),
                alert=None if (run, step) not in alerts else "acknowledged" if alerts[run, step] else "open",
            )
            for step, o in outcomes_of(results, column, run)
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


def _interval(metric: Metric | None) -> tuple[float, float] | None:
    return plots.interval(metric.value, metric.stderr, metric.low, metric.high) if metric else None


def _outer(metric: Metric | None, known: Wavering | None) -> tuple[float, float] | None:
    inner = _interval(metric)
    if metric is None or inner is None or known is None or not math.isfinite(metric.value):
        return None
    reach = plots.Z_95 * known.noise.stddev
    return metric.value - math.hypot(metric.value - inner[0], reach), metric.value + math.hypot(
        inner[1] - metric.value, reach
    )


def _mean(mean: LastCheckpoints | None) -> tuple[float, float, float] | None:
    if mean is None:
        return None
    reach = plots.Z_95 * (mean.stderr or 0.0)
    return mean.mean, mean.mean - reach, mean.mean + reach


def _bars(curves: Iterable[plots.Curve]) -> str:
    points = [point for curve in curves for point in curve.points]
    if not any(point.interval for point in points):
        return "no standard errors given, so no bars"
    thin = "; thin: of questions and training" if any(point.outer for point in points) else ""
    return f"bars: 95 % interval{' of questions' if thin else ''}{thin}"
