"""Scores of single questions from the samples of records, for comparisons of two checkpoints."""

from __future__ import annotations

from resources.errors import StorageError
from tasks.records.record import FoundRecord, Metric
from tasks.records.scores import KeptSamples, kept_samples
from tasks.records.verification import Verification, verified_with
from tasks.statistics.composition import Composition, composition_of


class QuestionScores:
    """Reads scores from the samples of records; each file is read once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], KeptSamples | StorageError | None] = {}

    def of(self, entry: FoundRecord, metric: Metric) -> Composition | str:
        """Returns the questions behind a metric, or the reason why they are unknown."""
        kept = self._kept(entry)
        if kept is None:
            return "no samples were kept"
        if isinstance(kept, StorageError):
            return f"its samples cannot be read: {kept.found}"
        return composition_of(metric, kept.questions, entry.record.metrics)

    def verified(self, entry: FoundRecord) -> Verification:
        """Verifies a record by its own digests and its samples."""
        return verified_with(entry, self._kept(entry))

    def _kept(self, entry: FoundRecord) -> KeptSamples | StorageError | None:
        place = entry.cell_uri, entry.record.attempt
        if place not in self._read:
            try:
                self._read[place] = kept_samples(entry)
            except StorageError as error:
                self._read[place] = error
        return self._read[place]
