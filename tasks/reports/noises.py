"""Noise of training in the columns of a report, and means of the last checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tasks.records.current import sharing_no_input
from tasks.records.numbers import measured
from tasks.reports.table import Column, ColumnResult, Results
from tasks.verdicts.statistics.training_noise import (
    LAST,
    LastCheckpoints,
    Point,
    TrainingNoise,
    mean_of_last,
    training_noise,
    trends,
)

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
    pieces = {run: _pieces(results, column, run) for run in results.runs}
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
    broken = {c.step for c in results.build_changes(column) if c.run == run and not c.qualified}
    noise = noises[run].noise if run in noises else None
    means: dict[int, LastCheckpoints] = {}
    points: list[Point] = []
    stderrs: list[float | None] = []
    for step, outcome in outcomes_of(results, column, run):
        if outcome.metric is None or not math.isfinite(outcome.metric.value):
            continue
        if step in broken:
            points, stderrs = [], []
        points = [*points[1 - LAST :], (step, outcome.metric.value)]
        stderrs = [*stderrs[1 - LAST :], outcome.metric.stderr]
        if mean := mean_of_last(points, stderrs, noise=noise):
            means[step] = mean
    return means


def _pieces(results: Results, column: Column, run: str) -> list[list[Point]]:
    broken = {c.step for c in results.build_changes(column) if c.run == run and not c.qualified}
    pieces: list[list[Point]] = [[]]
    outcomes = outcomes_of(results, column, run)
    apart = sharing_no_input(outcome.record.checkpoint for _, outcome in outcomes)
    for step, outcome in outcomes:
        if outcome.record.checkpoint in apart and outcome.metric is not None and math.isfinite(outcome.metric.value):
            pieces += [[]] if step in broken else []
            pieces[-1].append((step, outcome.metric.value))
    return pieces


def outcomes_of(results: Results, column: Column, run: str) -> list[tuple[int, ColumnResult]]:
    """Returns the outcomes of a run in a column, by step."""
    outcomes = ((c.step, results.outcome(c, column)) for c in results.checkpoints if c.run == run)
    return [(step, outcome) for step, outcome in outcomes if outcome is not None]


class Summary(NamedTuple):
    """Texts about a whole curve; empty with too few checkpoints."""

    last: str
    noise: str


def summary(results: Results, column: Column, run: str) -> Summary:
    """Returns mean and standard error of a run's last checkpoints, and the noise of training; empty during a trend."""
    noises = wavering(results, column)
    latest = _pieces(results, column, run)[-1][-LAST:]
    if run not in noises or (len(latest) == LAST and trends(latest, noises[run].noise)):
        return Summary("", "")
    mean = last_means(results, column, run, noises).get(int(latest[-1][0])) if latest else None
    siblings = " (other runs)" if noises[run].siblings else ""
    return Summary(
        measured(mean.mean, mean.stderr) if mean else "", f"± {measured(noises[run].noise.stddev, None)}{siblings}"
    )


def summary_rows(results: Results, columns: Sequence[Column], run: str) -> list[tuple[str, list[str]]]:
    """Returns rows about the whole curves of a run, aligned with some columns; leaves out empty rows."""
    summaries = [summary(results, column, run) for column in columns]
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
        if (text := summary(results, column, run)).noise
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
