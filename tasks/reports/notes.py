"""Notes on scores: facts about questions, answers, versions and records that readers need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tasks.records.builds import BuildChange
from tasks.records.details import BenchmarkDetails
from tasks.records.numbers import measured
from tasks.records.record import CheckpointReference, Record
from tasks.records.seals import broken_seal
from tasks.reports.table import Column, ColumnResult, Results
from tasks.spec.names import how_many, in_few_words

NOTED, CHANGED = "*", "!"
"""Signs behind a number: it has a note; its record was changed."""


def mark(results: Results, checkpoint: CheckpointReference, column: Column) -> str:
    """Returns the sign behind a number, empty without notes."""
    outcome = results.outcome(checkpoint, column)
    if outcome is None or outcome.metric is None:
        return ""
    if broken_seal(outcome.record):
        return CHANGED
    changed = any((c.run, c.step) == (checkpoint.run, checkpoint.step) for c in results.build_changes(column))
    return NOTED if changed or remarks_on(outcome) else ""


def remarks_on(outcome: ColumnResult) -> list[str]:
    """Returns short facts about the questions and answers behind a number."""
    details = outcome.metric and outcome.record.noticed(outcome.metric.benchmark)
    if not details or outcome.metric is None:
        return []
    words = [text.format(count=f"{value:,}") for text, value_of in _COUNTED.items() if (value := value_of(details))]
    completed = details.completed.get(outcome.metric.name)
    return words + ([f"{measured(completed, None)} over the completed"] if completed is not None else [])


_COUNTED: dict[str, Callable[[BenchmarkDetails], int | None]] = {
    "{count} prompts cut": lambda details: details.truncated,
    "{count} left out": lambda details: details.skipped,
    "{count} at the length limit": lambda details: details.at_limit,
    "{count} with reasoning that never closed": lambda details: details.unclosed,
}


def notes(results: Results, columns: Sequence[Column]) -> list[str]:
    """Returns the notes on the numbers in some columns, a line each, most severe first."""
    lines = [f"{CHANGED} {_named(record)}: {seal}" for record in results.records if (seal := broken_seal(record))]
    for change, names in _by_change(results, columns).items():
        lines.append(f"{NOTED} {in_few_words(names)} from {change.run} step {change.step:,}: {change.text}")
    lines += [f"{NOTED} {line}" for line in dict.fromkeys(line for column in columns for line in _on(results, column))]
    lines += [f"{NOTED} {note}" for note in dict.fromkeys(n for record in results.records for n in _facts(record))]
    return lines


def _named(record: Record) -> str:
    return f"{record.checkpoint.name}, {', '.join(record.benchmarks)}"


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
            both = f"{measured(detail.completed[column.metric], None)}, over all {measured(outcome.metric.value, None)}"
            yield f"{title} · {column.metric}: over completed answers {both} at {checkpoint.name}"
            break


def _facts(record: Record) -> Iterator[str]:
    yield from record.asking.notes
    for benchmark, details in record.details.items():
        yield from (f"{benchmark}: {note}" for note in details.notes)
