"""Questions that a checkpoint answered worse than the one before an alert's drop."""

from __future__ import annotations

from tasks.alerts.detection import Alert
from tasks.records.record import FoundRecord
from tasks.statistics.question_scores import QuestionScores

QuestionName = tuple[str, str]
"""A benchmark that asks questions itself, and the id of one of them."""


def improvements(
    alert: Alert, before: FoundRecord, after: FoundRecord, *, scores: QuestionScores
) -> dict[QuestionName, float] | str:
    """The changes of the questions that two records have in common, below zero where worse; or why they are not known.

    Args:
        alert: whose curve they are on.
        before: the record at the last checkpoint before the drop.
        after: the record that it was found at.
        scores: where samples are looked up.

    Raises:
        StorageError: samples are damaged, or cannot be read.
    """
    asked = []
    for found in (before, after):
        metric = next(m for m in found.record.metrics if (m.benchmark, m.name) == (alert.benchmark, alert.metric))
        composition = scores.of(found, metric)
        if isinstance(composition, str):
            return composition
        if composition.form is not None:
            return "its value is a ratio over documents, not a mean of questions"
        asked.append(composition.asked)
    sign = 1.0 if alert.higher_is_better else -1.0
    first, second = asked
    return {
        (part, name): sign * (second[part][name].sum - question.sum)
        for part, questions in first.items()
        for name, question in questions.items()
        if name in second.get(part, {})
    }
