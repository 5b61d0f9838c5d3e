"""Questions that a checkpoint answered worse than the one before, for an alert to say how many there are."""

from __future__ import annotations

from tasks.alerts.detection import Alert
from tasks.records.record import FoundRecord
from tasks.records.scores import KeptSamples, kept_samples
from tasks.statistics.composition import Composition, composition_of


class LostQuestions:
    """Counts them by the samples of two records, each of which is read once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], KeptSamples | None] = {}

    def count(self, alert: Alert, before: FoundRecord, after: FoundRecord) -> int | None:
        """The number of questions that both were asked and the later one has a worse score in; None if unknown.

        Raises:
            StorageError: samples are damaged, or cannot be read.
        """
        first, second = self._scores(alert, before), self._scores(alert, after)
        if first is None or second is None or first.form is not None:
            return None
        sign = 1.0 if alert.higher_is_better else -1.0
        return sum(
            sign * (second.asked[part][name].sum - question.sum) < 0
            for part, asked in first.asked.items()
            for name, question in asked.items()
            if name in second.asked.get(part, {})
        )

    def _scores(self, alert: Alert, found: FoundRecord) -> Composition | None:
        place = found.cell_uri, found.record.attempt
        if place not in self._read:
            self._read[place] = kept_samples(found)
        kept = self._read[place]
        metric = next(m for m in found.record.metrics if (m.benchmark, m.name) == (alert.benchmark, alert.metric))
        scores = composition_of(metric, kept.questions, found.record.metrics) if kept is not None else ""
        return scores if isinstance(scores, Composition) else None
