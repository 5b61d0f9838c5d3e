"""Scores of single questions, from the samples beside records: what two checkpoints are compared with."""

from __future__ import annotations

from tasks.records.record import FoundRecord, Metric
from tasks.records.scores import KeptSamples, kept_samples
from tasks.records.verification import Verification, verified_with
from tasks.statistics.composition import Composition, composition_of


class QuestionScores:
    """Looks up scores in the samples of records; every file is read once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], KeptSamples | None] = {}

    def of(self, found: FoundRecord, metric: Metric) -> Composition | str:
        """The questions that a metric is made of, or why they are not known.

        Raises:
            StorageError: the samples are damaged, or cannot be read.
        """
        kept = self._kept(found)
        if kept is None:
            return "no samples were kept"
        return composition_of(metric, kept.questions, found.record.metrics)

    def verified(self, found: FoundRecord) -> Verification:
        """Returns whether a record is what was written, by itself and its samples.

        Raises:
            StorageError: the samples are damaged, or cannot be read.
        """
        return verified_with(found, self._kept(found))

    def _kept(self, found: FoundRecord) -> KeptSamples | None:
        place = found.cell_uri, found.record.attempt
        if place not in self._read:
            self._read[place] = kept_samples(found)
        return self._read[place]
