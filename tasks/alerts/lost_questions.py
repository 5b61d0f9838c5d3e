"""Questions that a checkpoint answered worse than the checkpoint before an alert's drop."""

from __future__ import annotations

from tasks.alerts.detection import Alert
from tasks.records.record import FoundRecord
from tasks.statistics.question_scores import QuestionScores

QuestionName = tuple[str, str]
"""A benchmark that has questions of its own, and the id of a question."""


def improvements(
    alert: Alert, before: FoundRecord, after: FoundRecord, *, scores: QuestionScores
) -> dict[QuestionName, float] | str:
    """Returns the score changes of the questions that two records share, negative if worse; or the reason why unknown.
    `before` is the last checkpoint before the drop, `after` the alert's checkpoint. Raises StorageError if samples are
    damaged or unreadable."""
    asked = []
    for side in (before, after):
        metric = next(m for m in side.record.metrics if (m.benchmark, m.name) == (alert.benchmark, alert.metric))
        composition = scores.of(side, metric)
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
