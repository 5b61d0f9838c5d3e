"""Scores over all, clean and flagged questions, with the difference between the latter two.

Clean and flagged questions are different samples, so the interval of the difference is unpaired, built from both
intervals, which are valid for few questions and for clusters (MOVER, Newcombe 1998, Zou and Donner 2008). Questions of
a cluster on both sides are treated as independent, which is conservative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resources.errors import StorageError
from tasks.contamination.flags import Flags, Status, status_of
from tasks.contamination.questions import asked_in, samples_of
from tasks.records.record import FoundRecord, Metric
from tasks.records.samples import Sample
from tasks.records.scores import question_of
from tasks.statistics.composition import Composition, composed, composition_of, part_of

_Statuses = Mapping[tuple[str, str], Status]


class Side(NamedTuple):
    """A score over some questions, with its 95 % interval if known."""

    value: float
    low: float | None
    high: float | None
    n: int


class Split(NamedTuple):
    """A metric of a record over all, clean and flagged questions; `difference` is clean − flagged.

    `reason` explains a missing score or interval. If parts of a group lack clean or flagged questions, the difference
    is taken over the `parts` (number, total) that have both; empty if all have.
    """

    metric: Metric
    clean: Side | None = None
    flagged: Side | None = None
    not_scanned: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    parts: tuple[int, int] | None = None
    reason: str | None = None

    def as_row(self) -> dict[str, float | int | str | None]:
        clean, flagged = self.clean or _NONE, self.flagged or _NONE
        return {
            "clean_value": clean.value,
            "clean_n": clean.n,
            "flagged_value": flagged.value,
            "flagged_n": flagged.n,
            "not_scanned_n": self.not_scanned,
            "clean_less_flagged": self.difference,
            "clean_less_flagged_low": self.low,
            "clean_less_flagged_high": self.high,
            "contamination_note": self.reason,
        }


class _Nothing(NamedTuple):
    value: None = None
    n: int | None = None


_NONE = _Nothing()


class Splits:
    """Splits scores of records; caches the questions' status per evaluation."""

    def __init__(self, flags: Sequence[Flags]) -> None:
        self._flags = flags
        self._statuses: dict[str, _Statuses] = {}

    def of(self, found_record: FoundRecord) -> list[Split]:
        """Returns a record's scores that a search affects; empty if none of its questions was searched for."""
        if not self._flags or not found_record.record.succeeded:
            return []
        try:
            samples = samples_of(found_record)
        except StorageError as error:
            return [Split(metric, reason=f"not split: {error.found}") for metric in found_record.record.metrics]
        statuses = self._status(found_record, samples)
        questions = {part: [question_of(sample) for sample in asked] for part, asked in samples.items()}
        splits = [
            _split(metric, composition_of(metric, questions, found_record.record.metrics), statuses)
            for metric in found_record.record.metrics
        ]
        return [split for split in splits if split is not None]

    def _status(self, found_record: FoundRecord, samples: Mapping[str, Sequence[Sample]]) -> _Statuses:
        known = self._statuses.get(found_record.record.evaluation_hash, {})
        if all((part, sample.id) in known for part, asked in samples.items() for sample in asked):
            return known
        asked = asked_in(found_record.record, samples)
        statuses: _Statuses = {
            (question.benchmark, question.id): status_of(question, self._flags) for question in asked
        }
        self._statuses[found_record.record.evaluation_hash] = statuses
        return statuses


def _split(metric: Metric, whole: Composition | str, statuses: _Statuses) -> Split | None:
    if isinstance(whole, str):
        parts = {metric.benchmark, *metric.parts}
        concerned = any(part in parts and status == "flagged" for (part, _), status in statuses.items())
        return Split(metric, reason=f"not split: {whole}") if concerned else None
    clean, flagged = (part_of(whole, lambda *name, side=side: statuses.get(name) == side) for side in _SIDES)
    if clean is None and flagged is None:
        return None
    asked, seen = sum(map(len, whole.asked.values())), [_side(part) if part else None for part in (clean, flagged)]
    split = Split(metric, *seen, not_scanned=asked - sum(side.n for side in seen if side))
    if clean is None or flagged is None:
        return split._replace(reason=f"no question is {'clean' if clean is None else 'flagged'}")
    both = clean.asked.keys() & flagged.asked.keys()
    if not both:
        return split._replace(reason="no part has both clean and flagged questions")
    compared = [part_of(side, lambda part, _: part in both) for side in (clean, flagged)]
    first, second = (_side(part) for part in compared if part)
    low, high = _difference(first, second)
    return split._replace(
        difference=first.value - second.value,
        low=low,
        high=high,
        parts=(len(both), len(whole.asked)) if len(both) < len(whole.asked) else None,
        reason="too few questions for an interval" if low is None else None,
    )


_SIDES: tuple[Status, Status] = ("clean", "flagged")


def _side(part: Composition) -> Side:
    value, interval = composed(part)
    low, high = (end if end is not None and math.isfinite(end) else None for end in (interval.low, interval.high))
    return Side(value, low, high, sum(map(len, part.asked.values())))


def _difference(clean: Side, flagged: Side) -> tuple[float | None, float | None]:
    if clean.low is None or clean.high is None or flagged.low is None or flagged.high is None:
        return None, None
    difference = clean.value - flagged.value
    down = math.hypot(clean.value - clean.low, flagged.high - flagged.value)
    up = math.hypot(clean.high - clean.value, flagged.value - flagged.low)
    return difference - down, difference + up
