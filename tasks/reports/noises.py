"""Noise of training in the columns of a report, and the mean of the last checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tasks.records.current import sharing_no_input
from tasks.reports.table import Column, ColumnResult, Results, measured
from tasks.statistics.last_checkpoints import LAST, LastCheckpoints, mean_of_last
from tasks.statistics.training_noise import Point, TrainingNoise, training_noise, trends

_SHOWN = 8  # curves in a line of a terminal


class Wavering(NamedTuple):
    """The noise of training in one curve; `siblings` says that it is that of the other runs of its chart."""

    noise: TrainingNoise
    siblings: bool


def wavering(results: Results, column: Column) -> dict[str, Wavering]:
    """The noise of training in a column, by run: its own, else that of the others; without those that show none.

    Merged checkpoints waver less than those that training wrote, so theirs is that of others merged alike.
    """
    pieces = {run: _pieces(results, column, run) for run in results.runs}
    found: dict[str, Wavering] = {}
    for run, own in pieces.items():
        alike = [other for other in pieces if other != run and results.merged_by(other) == results.merged_by(run)]
        noise, siblings = training_noise(own), [piece for other in alike for piece in pieces[other]]
        if noise is None and (noise := training_noise(siblings)) is not None:
            found[run] = Wavering(noise, siblings=True)
        elif noise is not None:
            found[run] = Wavering(noise, siblings=False)
    return found


def last_means(
    results: Results, column: Column, run: str, noises: Mapping[str, Wavering]
) -> dict[int, LastCheckpoints]:
    """The mean of the last checkpoints of a run, by the step of the last, from the first that has enough before it.

    Merged checkpoints have none: neighbours may share inputs, and so their noise.
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
    """The outcomes of a run in a column, by step."""
    found = ((c.step, results.outcome(c, column)) for c in results.checkpoints if c.run == run)
    return [(step, outcome) for step, outcome in found if outcome is not None]


class Summary(NamedTuple):
    """Texts about one curve as a whole; empty where there are too few checkpoints."""

    last: str
    noise: str


def summary(results: Results, column: Column, run: str) -> Summary:
    """The mean of a run's last checkpoints with its standard error, and the noise of training; not while it trends."""
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
    """Rows about the curves of a run as a whole, for a table with some columns; without those that hold nothing."""
    found = [summary(results, column, run) for column in columns]
    rows = [
        (f"mean of the last {LAST}, ± standard error", [each.last for each in found]),
        ("wavers by, ± standard deviation", [each.noise for each in found]),
    ]
    return [(name, texts) for name, texts in rows if any(texts)]


def noise_note(results: Results, columns: Sequence[Column]) -> list[str]:
    """Returns a line that says how far scores waver from checkpoint to checkpoint; none where that is not known."""
    found = [
        (column, run, text)
        for column in columns
        for run in results.runs
        if (text := summary(results, column, run)).noise
    ]
    several = len(results.runs) > 1
    lines = [
        f"{results.named(column)}{f' of {run}' if several else ''} {text.noise}"
        + (f", mean of the last {LAST} {text.last}" if text.last else "")
        for column, run, text in found[:_SHOWN]
    ]
    more = [f"{len(found) - _SHOWN} more in the report"] if len(found) > _SHOWN else []
    measures = "± standard deviation (means: ± standard error)"
    return [f"From checkpoint to checkpoint, {measures}: {'; '.join(lines + more)}"] if lines else []
