"""Checkpoints × metrics: the numbers of many records, side by side and over training steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.records import CheckpointReference, Metric, Record, current_records

if TYPE_CHECKING:
    from tasks.plots import Chart  # imported where it draws: matplotlib takes a second, which a table need not wait

NOTHING = "–"
"""What stands where there is nothing to show."""


@dataclass(frozen=True)
class Column:
    """One metric of one benchmark; `metric` is empty for a benchmark that has not given a number anywhere."""

    evaluator: str
    benchmark: str
    metric: str
    higher_is_better: bool
    part: bool
    """Whether it is a subset that its harness reports beside the benchmark that was asked for."""
    cells: frozenset[tuple[str, ...]]
    """Benchmark sets of the cells that have it."""

    @property
    def label(self) -> str:
        """Benchmark and metric."""
        return f"{self.benchmark} · {self.metric}" if self.metric else self.benchmark


@dataclass(frozen=True)
class Outcome:
    """What one checkpoint has in one column: a number, or the record that says why there is none."""

    record: Record
    metric: Metric | None

    @property
    def text(self) -> str:
        """The number with its standard error, or the status."""
        if self.metric is None:
            return NOTHING if self.record.succeeded else self.record.status
        return measured(self.metric.value, self.metric.stderr)


@dataclass(frozen=True)
class Change:
    """From the first to the last number of one run in one column."""

    run: str
    first_step: int
    last_step: int
    first: Metric
    last: Metric

    @property
    def difference(self) -> float:
        """Last minus first."""
        return self.last.value - self.first.value

    @property
    def stderr(self) -> float | None:
        """Standard error of the difference, as of two independent measurements."""
        if self.first.stderr is None or self.last.stderr is None:
            return None
        return math.hypot(self.first.stderr, self.last.stderr)

    @property
    def verdict(self) -> str:
        """Whether the difference is outside its 95 % interval around no change, and in which direction."""
        from tasks import plots

        if self.stderr is None:
            return "no standard error"
        if abs(self.difference) <= plots.Z_95 * self.stderr:
            return "no clear change"
        return "better" if (self.difference > 0) == self.last.higher_is_better else "worse"


class Results:
    """Checkpoints × metrics, from the newest record of every cell."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = current_records(list(records))
        self.replaced = len(records) - len(self.records)
        self.checkpoints: list[CheckpointReference] = list(
            {(record.checkpoint.run, record.checkpoint.step): record.checkpoint for record in self.records}.values()
        )
        self.runs = list(dict.fromkeys(checkpoint.run for checkpoint in self.checkpoints))
        self.columns = _columns(self.records)

    def outcome(self, checkpoint: CheckpointReference, column: Column) -> Outcome | None:
        """The newest success, else the newest record; None if this was never evaluated."""
        found = None
        for record in sorted(self.records, key=lambda record: (record.succeeded, record.created)):
            same = (record.checkpoint.run, record.checkpoint.step) == (checkpoint.run, checkpoint.step)
            covers = column.benchmark in record.benchmarks or record.benchmarks in column.cells
            if same and covers and record.evaluator == column.evaluator:
                numbers = [m for m in record.metrics if (m.benchmark, m.name) == (column.benchmark, column.metric)]
                found = Outcome(record, numbers[0] if numbers else None)
        return found

    def chart(self, column: Column) -> Chart:
        """The curves of one column, one per run."""
        from tasks import plots

        curves = []
        for number, run in enumerate(self.runs):
            outcomes = [(c.step, self.outcome(c, column)) for c in self.checkpoints if c.run == run]
            points = tuple(
                plots.Point(
                    step, o.metric.value if o.metric else None, o.metric.stderr if o.metric else None, o.record.status
                )
                for step, o in outcomes
                if o is not None and (o.metric or not o.record.succeeded)
            )
            curves += [plots.Curve(run, points, number)] if points else []
        metrics = self.metrics(column)
        bars = "bars: 95 % interval (± 1.96 standard errors)"
        if not any(metric.stderr is not None for metric in metrics):
            bars = "no standard errors given, so no bars"
        note = f"{'higher' if column.higher_is_better else 'lower'} is better · {questions(metrics)}\n{bars}"
        changes = "; ".join(described(change) for change in self.changes(column))
        description = f"{column.label} over training steps. {changes or 'No change to show yet'}."
        return plots.Chart(column.label, note if metrics else "", description, tuple(curves))

    def metrics(self, column: Column) -> list[Metric]:
        """All numbers of one column."""
        outcomes = (self.outcome(checkpoint, column) for checkpoint in self.checkpoints)
        return [outcome.metric for outcome in outcomes if outcome and outcome.metric]

    def changes(self, column: Column) -> list[Change]:
        """First to last number, for every run that has at least two."""
        changes = []
        for run in self.runs:
            outcomes = [(c.step, self.outcome(c, column)) for c in self.checkpoints if c.run == run]
            numbers = [(step, o.metric) for step, o in outcomes if o and o.metric and math.isfinite(o.metric.value)]
            if len(numbers) > 1:
                changes.append(Change(run, numbers[0][0], numbers[-1][0], numbers[0][1], numbers[-1][1]))
        return changes


def _columns(records: Sequence[Record]) -> list[Column]:
    """In the order in which cells name their benchmarks, and harnesses their metrics."""
    asked = {(record.evaluator, benchmark): None for record in records for benchmark in record.benchmarks}
    found: dict[tuple[str, str, str], tuple[bool, set[tuple[str, ...]]]] = {}
    for record in records:
        for metric in record.metrics:
            key = (record.evaluator, metric.benchmark, metric.name)
            found.setdefault(key, (metric.higher_is_better, set()))[1].add(record.benchmarks)
    with_numbers = {(evaluator, benchmark) for evaluator, benchmark, _ in found}
    parents = {(evaluator, b) for (evaluator, _, _), (_, sets) in found.items() for names in sets for b in names}
    for evaluator, benchmark in asked:
        if (evaluator, benchmark) not in with_numbers | parents:
            found[(evaluator, benchmark, "")] = (True, set())
    order = list(asked)
    ranked = sorted(found, key=lambda key: order.index(key[:2]) if key[:2] in asked else len(order))
    return [Column(*key, found[key][0], key[:2] not in asked, frozenset(found[key][1])) for key in ranked]


def measured(value: float, stderr: float | None) -> str:
    """A number and its standard error, to as many decimals as its size asks for."""
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:,.{decimals}f}" + ("" if stderr is None else f" ± {stderr:.{decimals}f}")


def described(change: Change) -> str:
    """A change in one line."""
    difference = measured(change.difference, change.stderr).replace("-", "−")
    sign = "+" if change.difference >= 0 else ""
    return (
        f"{change.run}: {measured(change.first.value, change.first.stderr)} at step {change.first_step:,} → "
        f"{measured(change.last.value, change.last.stderr)} at step {change.last_step:,} "
        f"({sign}{difference}, {change.verdict})"
    )


def questions(metrics: Iterable[Metric]) -> str:
    """How many questions some numbers were taken over."""
    numbers = sorted({metric.n for metric in metrics})
    return f"n = {numbers[0]:,}" if len(numbers) == 1 else f"n = {numbers[0]:,} to {numbers[-1]:,}" if numbers else ""
