"""Alerts of a report: expected and found values, both kinds of noise, and the lost questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resources.errors import StorageError
from resources.storage import storage
from tasks.records.numbers import measured
from tasks.records.record import FoundRecord, Record
from tasks.records.samples import SAMPLES_NAME, read_samples
from tasks.records.search import found_below
from tasks.reports.table import Column, Results
from tasks.verdicts.alert_files import read_acknowledgements
from tasks.verdicts.alerts import Alert, QuestionName, improvements
from tasks.verdicts.statistics.composition import QuestionScores

SHOWN_QUESTIONS = 20
"""Largest number of questions that an alert lists by name."""
_PROMPT_CHARACTERS = 160


@dataclass(frozen=True)
class LostQuestions:
    """Questions with a worse score than before the drop: numbers lost and won of all `asked` in both, and examples."""

    lost: int
    won: int
    asked: int
    shown: tuple[tuple[str, str], ...]
    """Name and first line of each listed question."""


@dataclass(frozen=True)
class AlertPart:
    """An alert on the page; `lost` is the reason if lost questions are unknown."""

    alert: Alert
    label: str
    lost: LostQuestions | str
    acknowledged: str | None

    @property
    def numbers(self) -> str:
        return _numbers(self.alert)

    @property
    def noises(self) -> str:
        noises = {
            "questions": (self.alert.question_noise, "error"),
            "training": (self.alert.training_noise, "deviation"),
        }
        words = {k: "unknown" if v is None else f"± {measured(v, None)} (standard {m})" for k, (v, m) in noises.items()}
        return ", ".join(f"of {name} {text}" for name, text in words.items())


def alert_parts(
    results: Results, *, records_at: str | None, acknowledged: Mapping[str, str] | None = None
) -> list[AlertPart]:
    """Returns the alerts of some results, latest first, acknowledged alerts last; reads only their samples.

    Lost questions are unknown without `records_at`. `acknowledged` has the comments of acknowledgements by alert id.
    """
    scores = QuestionScores()
    words = acknowledged or {}
    parts = [
        AlertPart(alert, results.named(column), _lost(alert, results, scores, records_at), words.get(alert.id))
        for column in results.columns
        for alert in results.alerts_of(column)
    ]
    return sorted(parts, key=lambda part: (part.acknowledged is not None, -part.alert.step))


def words_of_acknowledgements(records: Sequence[Record], *, records_at: str) -> dict[str, str]:
    """Returns the comments of acknowledged alerts by alert id; lists files once per run."""
    return {
        key: word.words
        for run in dict.fromkeys(record.checkpoint.run for record in records)
        for key, word in read_acknowledgements(storage.join(records_at, run)).items()
    }


def alert_lines(results: Results, column: Column) -> list[str]:
    """Returns a line per alert of a column."""
    return [
        f"Alert: {results.named(column)} of {alert.run} at step {alert.step:,}: {_numbers(alert)}"
        for alert in results.alerts_of(column)
    ]


def _numbers(alert: Alert) -> str:
    sign = "−" if alert.found < alert.expected else "+"
    expected, value = measured(alert.expected, None), measured(alert.found, None)
    return f"expected {expected}, found {value} ({sign}{measured(abs(alert.found - alert.expected), None)})"


def _lost(alert: Alert, results: Results, scores: QuestionScores, records_at: str | None) -> LostQuestions | str:
    if records_at is None:
        return "it is not known where their samples lie"
    before, after = (_record_at(alert, results, step, records_at) for step in (alert.before, alert.step))
    try:
        changes = improvements(alert, before, after, scores=scores)
        if isinstance(changes, str):
            return changes
        lost = sorted(changes, key=lambda name: (changes[name], *name))[: sum(c < 0 for c in changes.values())]
        won = sum(change > 0 for change in changes.values())
        return LostQuestions(len(lost), won, len(changes), _with_prompts(lost[:SHOWN_QUESTIONS], after))
    except StorageError as error:
        return error.found


def _record_at(alert: Alert, results: Results, step: int, records_at: str) -> FoundRecord:
    [column] = [column for column in results.columns if alert in results.alerts_of(column)]
    checkpoints = [c for c in results.checkpoints if (c.run, c.step) == (alert.run, step)]
    outcome = results.outcome(checkpoints[-1], column)
    assert outcome is not None
    return found_below(records_at, outcome.record)


def _with_prompts(names: Sequence[QuestionName], entry: FoundRecord) -> tuple[tuple[str, str], ...]:
    prompts = dict.fromkeys(names, "")
    uri = storage.join(entry.cell_uri, entry.record.attempt, SAMPLES_NAME)
    for sample in read_samples(uri) if names else ():
        if (sample.benchmark, sample.id) in prompts:
            own = sample.prompt.strip().rpartition("\n\n")[2].strip()
            prompts[sample.benchmark, sample.id] = own.partition("\n")[0][:_PROMPT_CHARACTERS]
    return tuple((name, text) for (_, name), text in prompts.items())
