"""Scores over all, clean and flagged questions, with the difference between the latter two, for page and tables.

Clean and flagged questions are different samples, so the interval of the difference is unpaired, built from both
intervals. Questions of a cluster on both sides are treated as independent, which is conservative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from resources.errors import StorageError
from resources.storage.bounded_folder import size_text
from tasks.records.export import SPLIT_COLUMNS
from tasks.records.numbers import NOTHING, between, measured, signed
from tasks.records.questions.asked import asked_in, by_benchmark
from tasks.records.questions.flags import Flags, QuestionFlag, Search, Status, status_of
from tasks.records.record import FoundRecord, Metric, Record
from tasks.records.samples import question_of, samples_of
from tasks.records.search import found_below
from tasks.spec.evaluators import evaluator_title
from tasks.spec.names import how_many
from tasks.verdicts.statistics.composition import Composition, composed, composition_of, part_of
from tasks.verdicts.statistics.intervals import difference_interval

_SHOWN_QUESTIONS = 20
_SIDES: tuple[Status, Status] = ("clean", "flagged")
_Statuses = Mapping[tuple[str, str], Status]


class Side(NamedTuple):
    """A score over some questions, with its 95 % interval if known."""

    value: float
    low: float | None
    high: float | None
    n: int


class Shown(NamedTuple):
    """A score, or a difference, as three texts: value, interval, number of questions."""

    value: str = NOTHING
    interval: str = ""
    n: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


class Split(NamedTuple):
    """A metric of a record over all, clean and flagged questions; `difference` is clean − flagged.

    `reason` explains a missing score or interval. If parts of a group lack clean or flagged questions, the difference
    is taken over the `parts` (number, total) that have both; empty if all have.
    """

    record: Record
    metric: Metric
    clean: Side | None = None
    flagged: Side | None = None
    not_scanned: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    parts: tuple[int, int] | None = None
    reason: str | None = None
    newest: bool = False
    """True at the last checkpoint of its run that has this score."""

    @property
    def label(self) -> str:
        return f"{self.metric.benchmark} · {self.metric.name}"

    @property
    def evaluator(self) -> str:
        return evaluator_title(self.record.evaluator)

    @property
    def columns(self) -> dict[str, float | int | str | None]:
        """The columns that a split adds to an exported row."""
        numbers = [
            number for side in (self.clean, self.flagged) for number in ((side.value, side.n) if side else (None, None))
        ]
        numbers += [self.not_scanned, self.difference, self.low, self.high, self.reason]
        return dict(zip(SPLIT_COLUMNS, numbers, strict=True))

    @property
    def as_row(self) -> dict[str, Any]:
        checkpoint, metric = self.record.checkpoint, self.metric
        return {
            "run": checkpoint.run,
            "step": checkpoint.step if checkpoint.label is None else None,
            "label": checkpoint.label,
            "checkpoint": checkpoint.name,
            "evaluator": self.record.evaluator,
            "benchmark": metric.benchmark,
            "metric": metric.name,
            **metric.model_dump(include={"value", "low", "high", "n"}),
            **self.columns,
        }

    @property
    def cells(self) -> tuple[Shown, ...]:
        """The formatted scores over all, clean and flagged questions, and the difference."""
        whole = Side(self.metric.value, self.metric.low, self.metric.high, self.metric.n)
        difference = Shown()
        if self.difference is not None:
            like = self.difference
            ends = [None if end is None else signed(end, like=like) for end in (self.low, self.high)]
            difference = Shown(signed(like, like=like), "" if None in ends else f"[{ends[0]}, {ends[1]}]")
        return *map(_shown, (whole, self.clean, self.flagged)), difference

    @property
    def note(self) -> str:
        """The reason for missing values, unscanned questions, and excluded parts."""
        notes = [f"{how_many(self.not_scanned, 'question')} not scanned"] if self.not_scanned else []
        notes += [f"difference over {self.parts[0]} of {self.parts[1]} parts"] if self.parts else []
        return "; ".join([*notes, *filter(None, [self.reason])])


class ContaminationView(NamedTuple):
    """Content of the page: scores, the searches behind them, and the questions that were found."""

    rows: list[Split]
    flags: Sequence[Flags]
    flagged: list[tuple[Search, QuestionFlag]]
    flagged_in_all: int


def contamination_view(
    records: Iterable[Record], flags: Sequence[Flags], *, evaluation_path: str
) -> ContaminationView | None:
    """Returns the view of some records below a folder; None if there was no search."""
    if not flags:
        return None
    flagged = [(each.search, flag) for each in flags for flag in each.questions.values() if flag.flagged]
    flagged.sort(key=lambda pair: (-(pair[1].score or 0.0), -(pair[1].longest or 0), pair[1].benchmark, pair[1].id))
    rows = splits_of(records, flags, evaluation_path=evaluation_path)
    return ContaminationView(rows, flags, flagged[:_SHOWN_QUESTIONS], len(flagged))


def splits_of(records: Iterable[Record], flags: Sequence[Flags], *, evaluation_path: str) -> list[Split]:
    """Returns the scores that the searches affect, in the order of the records."""
    statuses: dict[str, _Statuses] = {}
    splits = [
        split for record in records for split in _splits(found_below(evaluation_path, record), flags, statuses) if split
    ]
    last = {_column(split): split.record.checkpoint.order for split in splits}
    return [split._replace(newest=split.record.checkpoint.order == last[_column(split)]) for split in splits]


def _column(split: Split) -> tuple[str, ...]:
    record, metric = split.record, split.metric
    return record.checkpoint.run, record.evaluator, record.evaluation_hash, metric.benchmark, metric.name


def _splits(place: FoundRecord, flags: Sequence[Flags], known: dict[str, _Statuses]) -> Iterator[Split | None]:
    record = place.record
    if not flags or not record.succeeded:
        return
    try:
        samples = by_benchmark(samples_of(place))
    except StorageError as error:
        yield from (Split(record, metric, reason=f"not split: {error.found}") for metric in record.metrics)
        return
    statuses: _Statuses = known.get(record.evaluation_hash, {})
    if any((part, sample.id) not in statuses for part, asked in samples.items() for sample in asked):
        asked = asked_in(record, samples)
        statuses = {(question.benchmark, question.id): status_of(question, flags) for question in asked}
        known[record.evaluation_hash] = statuses
    questions = {part: [question_of(sample) for sample in asked] for part, asked in samples.items()}
    for metric in record.metrics:
        yield _split(Split(record, metric), composition_of(metric, questions, record.metrics), statuses)


def _split(split: Split, whole: Composition | str, statuses: _Statuses) -> Split | None:
    if isinstance(whole, str):
        parts = {split.metric.benchmark, *split.metric.parts}
        concerned = any(part in parts and status == "flagged" for (part, _), status in statuses.items())
        return split._replace(reason=f"not split: {whole}") if concerned else None
    clean, flagged = (part_of(whole, lambda *name, side=side: statuses.get(name) == side) for side in _SIDES)
    if clean is None and flagged is None:
        return None
    asked, seen = sum(map(len, whole.asked.values())), [_side(part) if part else None for part in (clean, flagged)]
    split = split._replace(
        clean=seen[0], flagged=seen[1], not_scanned=asked - sum(side.n for side in seen if side is not None)
    )
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


def _side(part: Composition) -> Side:
    value, interval = composed(part)
    low, high = (end if end is not None and math.isfinite(end) else None for end in (interval.low, interval.high))
    return Side(value, low, high, sum(map(len, part.asked.values())))


def _difference(clean: Side, flagged: Side) -> tuple[float | None, float | None]:
    if clean.low is None or clean.high is None or flagged.low is None or flagged.high is None:
        return None, None
    return difference_interval((clean.value, clean.low, clean.high), (flagged.value, flagged.low, flagged.high))


def searched(search: Search) -> list[str]:
    """Returns facts about a search, a short text each."""
    facts = [f"{how_many(search.flagged, 'question')} flagged of {search.questions:,} looked for"]
    if search.text_files is not None and search.text_bytes is not None:
        size, documents, words = size_text(search.text_bytes), search.documents or 0, search.words or 0
        facts.append(f"{how_many(search.text_files, 'file')} of {size}, {how_many(documents, 'text')}, {words:,} words")
    if search.n is not None:
        facts.append(f"n-grams of {search.n} words, flagged from {search.threshold:.0%} of them on")
    if search.too_short:
        facts.append(f"{how_many(search.too_short, 'question')} of less than {search.shortest} words not looked for")
    if search.unknown:
        facts.append(f"{how_many(search.unknown, 'finding')} about questions that no record asked")
    if search.unreadable:
        facts.append(f"{how_many(search.unreadable, 'line')} without a text")
    return [*facts, *(f"not searched: {part}" for part in search.not_read)]


def _shown(side: Side | None) -> Shown:
    if side is None:
        return Shown()
    ends = "" if side.low is None or side.high is None else between(side.low, side.high, like=side.value)
    return Shown(measured(side.value), ends, f"n = {side.n:,}")
