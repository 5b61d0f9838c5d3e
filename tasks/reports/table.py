"""Results: the scores of many records as checkpoints × metrics, with notes that readers need.

Scores of different evaluators never share a column, even for benchmarks of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from tasks.records.builds import BuildChange, Qualification, build_changes
from tasks.records.current import current_records, newest_of_each_hash, told_apart, trained_run, words_of_settings
from tasks.records.details import BenchmarkDetails, CheckpointReference
from tasks.records.numbers import NOTHING, arrow, between, evaluator_place, interval, margin, measured
from tasks.records.record import Metric, Record, broken_seal
from tasks.records.search import RecordFilter
from tasks.spec.evaluators import evaluator_title
from tasks.spec.labels import Order
from tasks.spec.names import how_many, in_few_words
from tasks.verdicts.alerts import Drop, drops_in
from tasks.verdicts.statistics.intervals import difference_interval


@dataclass(frozen=True)
class Column:
    """A metric of a benchmark; `metric` is empty for a benchmark without any score."""

    evaluator: str
    benchmark: str
    metric: str
    higher_is_better: bool | None
    part: bool
    """True for a subset that the harness reports in addition to the requested benchmark."""
    cells: frozenset[tuple[str, ...]]
    """Benchmark sets of the cells with this metric."""
    evaluation_hash: str = ""
    """Hash of the settings of all its scores."""
    settings: str = ""
    """Label for its settings if the metric was measured with several; otherwise empty."""
    smooth: bool = False
    """True for a smooth score of a multiple-choice benchmark."""

    @property
    def arrow(self) -> str:
        return arrow(self.higher_is_better)

    @property
    def label(self) -> str:
        name = f"{self.benchmark} · {self.metric}" if self.metric else self.benchmark
        return f"{name} ({self.settings})" if self.settings else name


@dataclass(frozen=True)
class ColumnResult:
    """Content of a column for a checkpoint: a score, or the record without it."""

    record: Record
    metric: Metric | None

    @property
    def text(self) -> str:
        if self.metric is None:
            return NOTHING if self.record.succeeded else self.record.status
        return " ".join(filter(None, (measured(self.metric.value), margin(self.metric))))


@dataclass(frozen=True)
class Change:
    """The change from the first to the last score of a run in a column."""

    run: str
    first_step: int
    last_step: int
    first: Metric
    last: Metric
    broken: bool = False
    """True if versions changed in between without a qualification."""

    @property
    def difference(self) -> float:
        return self.last.value - self.first.value

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the difference of two independent measurements; None if unknown."""
        first, last = interval(self.first), interval(self.last)
        if first is None or last is None:
            return None
        return difference_interval((self.last.value, *last), (self.first.value, *first))

    @property
    def verdict(self) -> str:
        """Direction of the change if its 95 % interval excludes zero, else the reason for no verdict."""
        if self.broken:
            return "other versions"
        if self.interval is None:
            return "no standard error"
        if self.interval[0] <= 0 <= self.interval[1]:
            return "no clear change"
        if self.last.higher_is_better is None:
            return "changed"
        return "better" if (self.difference > 0) == self.last.higher_is_better else "worse"


class Results:
    """Checkpoints × metrics from the newest record of each cell; by default without smooth scores of parts."""

    def __init__(
        self,
        records: Sequence[Record],
        *,
        filters: RecordFilter | None = None,
        qualifications: Sequence[Qualification] = (),
    ) -> None:
        self.records = current_records(list(records))
        self.replaced = len(records) - len(self.records)
        apart = told_apart([record.checkpoint for record in records])
        shown = [(apart(record.checkpoint), record) for record in self.records]
        self.checkpoints: list[CheckpointReference] = list({(c.run, c.order): c for c, _ in shown}.values())
        self.runs = list(dict.fromkeys(checkpoint.run for checkpoint in self.checkpoints))
        self.trained = {checkpoint.run: trained_run(checkpoint) for checkpoint in self.checkpoints}
        self.columns = [
            column
            for column in _columns(self.records)
            if (
                filters.takes(column.benchmark, column.metric, smooth=column.smooth)
                if filters is not None
                else not (column.smooth and column.part)
            )
        ]
        self.evaluators = list(dict.fromkeys(column.evaluator for column in self.columns))
        self._at: dict[tuple[str, Order, str], list[Record]] = {}
        for checkpoint, record in sorted(shown, key=lambda item: (item[1].succeeded, item[1].created)):
            self._at.setdefault((checkpoint.run, checkpoint.order, record.evaluator), []).append(record)
        self._outcomes: dict[tuple[str, Order, Column], ColumnResult | None] = {}
        self._qualifications = qualifications
        self._build_changes: dict[Column, list[BuildChange]] = {}

    def merged_by(self, run: str) -> str:
        """Returns the label of a merged curve's kind of merge; empty for written checkpoints."""
        return run.removeprefix(self.trained[run])

    def place_of(self, run: str) -> tuple[int, int]:
        """Returns a run's index among the trained runs, and the number of its kind of merge from 1; 0 if not merged."""
        trained = self.trained[run]
        kinds = [name for name, of in self.trained.items() if of == trained and name != of]
        return list(dict.fromkeys(self.trained.values())).index(trained), kinds.index(run) + 1 if run in kinds else 0

    def steps_of(self, run: str) -> list[CheckpointReference]:
        """Returns the checkpoints of a run that are points of its curves: those without a label."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.run == run and checkpoint.label is None]

    def outcome(self, checkpoint: CheckpointReference, column: Column) -> ColumnResult | None:
        """Returns the newest success, else the newest record; None if never evaluated."""
        place = (checkpoint.run, checkpoint.order, column)
        if place not in self._outcomes:
            self._outcomes[place] = self._outcome(checkpoint, column)
        return self._outcomes[place]

    def _outcome(self, checkpoint: CheckpointReference, column: Column) -> ColumnResult | None:
        for record in reversed(self._at.get((checkpoint.run, checkpoint.order, column.evaluator), [])):
            if record.evaluation_hash != column.evaluation_hash:
                continue
            if column.benchmark in record.benchmarks or record.benchmarks in column.cells:
                numbers = [m for m in record.metrics if (m.benchmark, m.name) == (column.benchmark, column.metric)]
                return ColumnResult(record, numbers[0] if numbers else None)
        return None

    @cached_property
    def drops(self) -> list[Drop]:
        return drops_in(self.records, qualifications=self._qualifications)

    def drops_of(self, column: Column) -> list[Drop]:
        key = (column.evaluator, column.benchmark, column.metric, column.evaluation_hash)
        alerts = ((drop, drop.alert) for drop in self.drops)
        return [drop for drop, a in alerts if (a.evaluator, a.benchmark, a.metric, a.evaluation_hash) == key]

    def build_changes(self, column: Column) -> list[BuildChange]:
        if column not in self._build_changes:
            outcomes = ((checkpoint, self.outcome(checkpoint, column)) for checkpoint in self.checkpoints)
            self._build_changes[column] = build_changes(
                ((checkpoint, outcome.record) for checkpoint, outcome in outcomes if outcome and outcome.metric),
                evaluator=column.evaluator,
                benchmark=column.benchmark,
                metric=column.metric,
                qualifications=self._qualifications,
            )
        return self._build_changes[column]

    def by_evaluator(self, *, parts: bool = False, smooth: bool = False) -> list[tuple[str, list[Column]]]:
        """Returns the columns by title of their evaluator: of whole benchmarks, of parts, or smooth scores."""
        kind = (parts, smooth)
        groups = [
            (name, [c for c in self.columns if c.evaluator == name and (c.part, c.smooth) == kind])
            for name in self.evaluators
        ]
        return [(evaluator_title(evaluator), columns) for evaluator, columns in groups if columns]

    def headings(self, columns: Sequence[Column]) -> list[tuple[str, int]]:
        """Returns the titles of evaluators with the number of consecutive columns below each."""
        return [(evaluator_title(name), len(list(below))) for name, below in groupby(c.evaluator for c in columns)]

    def named(self, column: Column) -> str:
        return f"{evaluator_title(column.evaluator)}: {column.label}" if len(self.evaluators) > 1 else column.label

    def labelled(self, column: Column) -> list[tuple[CheckpointReference, Metric]]:
        """Returns the scores of checkpoints with a label."""
        outcomes = ((each, self.outcome(each, column)) for each in self.checkpoints if each.label is not None)
        return [(each, outcome.metric) for each, outcome in outcomes if outcome and outcome.metric]

    def metrics(self, column: Column) -> list[Metric]:
        outcomes = (self.outcome(checkpoint, column) for checkpoint in self.checkpoints)
        return [outcome.metric for outcome in outcomes if outcome and outcome.metric]

    def changes(self, column: Column) -> list[Change]:
        """Returns the change from first to last score for every run with at least two."""
        changes = []
        for run in self.runs:
            outcomes = [(c.step, self.outcome(c, column)) for c in self.steps_of(run)]
            numbers = [(step, o.metric) for step, o in outcomes if o and o.metric and math.isfinite(o.metric.value)]
            if len(numbers) > 1:
                broken = any(change.run == run and not change.qualified for change in self.build_changes(column))
                changes.append(Change(run, numbers[0][0], numbers[-1][0], numbers[0][1], numbers[-1][1], broken))
        return changes


def _columns(records: Sequence[Record]) -> list[Column]:
    asked = {(record.evaluator, benchmark): None for record in records for benchmark in record.benchmarks}
    facts: dict[tuple[str, str, str, str], tuple[bool | None, set[tuple[str, ...]]]] = {}
    metrics: dict[tuple[str, str, str], bool] = {}
    for record in records:
        for metric in record.metrics:
            key = (record.evaluator, metric.benchmark, metric.name)
            metrics[key] = metric.smooth
            facts.setdefault((*key, record.evaluation_hash), (metric.higher_is_better, set()))[1].add(record.benchmarks)
    numbered = {(evaluator, benchmark, hash_) for evaluator, benchmark, _, hash_ in facts}
    parents = {(e, name, hash_) for (e, _, _, hash_), (_, sets) in facts.items() for names in sets for name in names}
    for record in records:
        for benchmark in record.benchmarks:
            key = (record.evaluator, benchmark, record.evaluation_hash)
            if key not in numbered | parents:
                facts[record.evaluator, benchmark, "", record.evaluation_hash] = (True, set())
                metrics[record.evaluator, benchmark, ""] = False
    hashes = {
        evaluator: newest_of_each_hash(record for record in records if record.evaluator == evaluator)
        for evaluator in {record.evaluator for record in records}
    }
    order = {key: place for place, key in enumerate(asked)}
    columns = []
    for key in sorted(metrics, key=lambda key: (evaluator_place(key[0]), order.get(key[:2], len(order)))):
        series = [record for record in hashes[key[0]] if (*key, record.evaluation_hash) in facts]
        for hash_, settings in words_of_settings(series, key[1]).items():
            higher_is_better, sets = facts[(*key, hash_)]
            part = key[:2] not in asked
            columns.append(Column(*key, higher_is_better, part, frozenset(sets), hash_, settings, metrics[key]))
    return columns


def change_of(change: Change) -> str:
    """Formats a difference with sign and 95 % interval."""
    shown = ("+" if change.difference >= 0 else "−") + measured(abs(change.difference))
    return shown if change.interval is None else f"{shown} {between(*change.interval, like=change.difference)}"


def described(change: Change) -> str:
    """Formats a change in a line."""
    first, last = (
        f"{' '.join(filter(None, (measured(metric.value), margin(metric))))} at step {step:,}"
        for metric, step in ((change.first, change.first_step), (change.last, change.last_step))
    )
    return f"{change.run}: {first} → {last} ({change_of(change)}, {change.verdict})"


def questions(metrics: Iterable[Metric]) -> str:
    """Formats the number of questions behind some scores."""
    numbers = sorted({metric.n for metric in metrics})
    return f"n = {numbers[0]:,}" if len(numbers) == 1 else f"n = {numbers[0]:,} to {numbers[-1]:,}" if numbers else ""


NOTED, CHANGED = "*", "!"
"""Signs behind a number: it has a note; its record was changed."""


def mark(results: Results, checkpoint: CheckpointReference, column: Column) -> str:
    """Returns the sign behind a number, empty without notes."""
    outcome = results.outcome(checkpoint, column)
    if outcome is None or outcome.metric is None:
        return ""
    if broken_seal(outcome.record):
        return CHANGED
    place = None if checkpoint.label else (checkpoint.run, checkpoint.step)
    changed = any((change.run, change.step) == place for change in results.build_changes(column))
    return NOTED if changed or remarks_on(outcome) else ""


def remarks_on(outcome: ColumnResult) -> list[str]:
    """Returns short facts about the questions and answers behind a number."""
    details = outcome.metric and outcome.record.noticed(outcome.metric.benchmark)
    if not details or outcome.metric is None:
        return []
    words = [text.format(count=f"{value:,}") for text, value_of in _COUNTED.items() if (value := value_of(details))]
    completed = details.completed.get(outcome.metric.name)
    return words + ([f"{measured(completed)} over the completed"] if completed is not None else [])


_COUNTED: dict[str, Callable[[BenchmarkDetails], int | None]] = {
    "{count} prompts cut": lambda details: details.truncated,
    "{count} left out": lambda details: details.skipped,
    "{count} at the length limit": lambda details: details.at_limit,
    "{count} with reasoning that never closed": lambda details: details.unclosed,
}


def notes(results: Results, columns: Sequence[Column]) -> list[str]:
    """Returns the notes on the numbers in some columns, a line each, most severe first."""
    lines = [
        f"{CHANGED} {record.checkpoint.name}, {', '.join(record.benchmarks)}: {seal}"
        for record in results.records
        if (seal := broken_seal(record))
    ]
    for change, names in _by_change(results, columns).items():
        lines.append(f"{NOTED} {in_few_words(names)} from {change.run} step {change.step:,}: {change.text}")
    lines += [f"{NOTED} {line}" for line in dict.fromkeys(line for column in columns for line in _on(results, column))]
    lines += [f"{NOTED} {note}" for note in dict.fromkeys(n for record in results.records for n in _facts(record))]
    return lines


def _by_change(results: Results, columns: Sequence[Column]) -> dict[BuildChange, list[str]]:
    by_change: dict[BuildChange, list[str]] = {}
    for column in columns:
        for change in results.build_changes(column):
            names = by_change.setdefault(change, [])
            names += [column.benchmark] if column.benchmark not in names else []
    return by_change


def _on(results: Results, column: Column) -> Iterator[str]:
    shown = [
        (checkpoint, details)
        for checkpoint in results.checkpoints
        if (outcome := results.outcome(checkpoint, column)) and outcome.metric
        if (details := outcome.record.noticed(column.benchmark))
    ]
    title = f"{column.benchmark} ({column.settings})" if column.settings else column.benchmark
    for text, value_of in _COUNTED.items():
        concerned = [(value, checkpoint, details) for checkpoint, details in shown if (value := value_of(details))]
        if not concerned:
            continue
        value, checkpoint, details = max(concerned, key=lambda item: item[0])
        others = how_many(len(concerned) - 1, "other checkpoint")
        of = f"{text.format(count=f'{value:,}')} of {details.questions:,}"
        yield f"{title}: {of} at {checkpoint.name}" + (f", fewer at {others}" if len(concerned) > 1 else "")
    for checkpoint, detail in shown[::-1]:
        outcome = results.outcome(checkpoint, column)
        if column.metric in detail.completed and outcome and outcome.metric:
            both = f"{measured(detail.completed[column.metric])}, over all {measured(outcome.metric.value)}"
            yield f"{title} · {column.metric}: over completed answers {both} at {checkpoint.name}"
            break


def _facts(record: Record) -> Iterator[str]:
    yield from record.asking.notes
    for benchmark, details in record.details.items():
        yield from (f"{benchmark}: {note}" for note in details.notes)
