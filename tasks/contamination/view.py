"""Splits and searches formatted for the page and for tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tasks.contamination.flags import Flags, QuestionFlag, Search
from tasks.contamination.split import Side, Split, Splits
from tasks.records.record import Record
from tasks.records.search import found_below
from tasks.spec.evaluators import evaluator_title
from tasks.spec.names import how_many

_SHOWN_QUESTIONS = 20
_DECIMALS = 3


class Shown(NamedTuple):
    """A score, or a difference, as three texts: value, interval, number of questions."""

    value: str
    interval: str
    n: str

    def __str__(self) -> str:
        return " ".join(filter(None, self))


_NOTHING = Shown("–", "", "")


class SplitRow(NamedTuple):
    """A formatted score; `newest` if it is at the last checkpoint of its run that has this score."""

    record: Record
    split: Split
    newest: bool

    @property
    def label(self) -> str:
        metric = self.split.metric
        return f"{metric.benchmark} · {metric.name}"

    @property
    def evaluator(self) -> str:
        return evaluator_title(self.record.evaluator)

    @property
    def as_row(self) -> dict[str, Any]:
        checkpoint, metric = self.record.checkpoint, self.split.metric
        return {
            "run": checkpoint.run,
            "step": checkpoint.step,
            "checkpoint": checkpoint.name,
            "evaluator": self.record.evaluator,
            "benchmark": metric.benchmark,
            "metric": metric.name,
            "value": metric.value,
            "low": metric.low,
            "high": metric.high,
            "n": metric.n,
            **self.split.as_row(),
        }

    @property
    def cells(self) -> tuple[Shown, ...]:
        metric, split = self.split.metric, self.split
        whole = Side(metric.value, metric.low, metric.high, metric.n)
        if split.difference is None:
            difference = _NOTHING
        else:
            difference = Shown(_number(split.difference, "+"), _interval(split.low, split.high, sign="+"), "")
        return *map(_side, (whole, split.clean, split.flagged)), difference

    @property
    def note(self) -> str:
        """The reason for missing values, unscanned questions, and excluded parts."""
        split = self.split
        notes = [f"{how_many(split.not_scanned, 'question')} not scanned"] if split.not_scanned else []
        if split.parts is not None:
            notes.append(f"difference over {split.parts[0]} of {split.parts[1]} parts")
        return "; ".join([*notes, *([split.reason] if split.reason else [])])


class ContaminationView(NamedTuple):
    """Content of the page: scores, the searches behind them, and the questions that were found."""

    rows: list[SplitRow]
    flags: Sequence[Flags]
    flagged: list[tuple[Search, QuestionFlag]]
    flagged_in_all: int


def contamination_view(
    records: Iterable[Record], flags: Sequence[Flags], *, evaluation_path: str
) -> ContaminationView | None:
    """Returns the view of some records below a folder; None if there was no search."""
    if not flags:
        return None
    rows = split_rows(records, flags, evaluation_path=evaluation_path)
    flagged = [(each.search, flag) for each in flags for flag in each.questions.values() if flag.flagged]
    flagged.sort(key=lambda pair: (-(pair[1].score or 0.0), -(pair[1].longest or 0), pair[1].benchmark, pair[1].id))
    return ContaminationView(rows, flags, flagged[:_SHOWN_QUESTIONS], len(flagged))


def split_rows(records: Iterable[Record], flags: Sequence[Flags], *, evaluation_path: str) -> list[SplitRow]:
    """Returns a row for each score that the searches affect, in the order of the records."""
    splits = Splits(flags)
    pairs = [(record, split) for record in records for split in splits.of(found_below(evaluation_path, record))]
    last = {_column(record, split): record.checkpoint.step for record, split in pairs}
    return [SplitRow(record, split, record.checkpoint.step == last[_column(record, split)]) for record, split in pairs]


def _column(record: Record, split: Split) -> tuple[str, ...]:
    return record.checkpoint.run, record.evaluator, record.evaluation_hash, split.metric.benchmark, split.metric.name


def searched(search: Search) -> list[str]:
    """Returns facts about a search, a short text each."""
    facts = [f"{how_many(search.flagged, 'question')} flagged of {search.questions:,} looked for"]
    if search.text_files is not None and search.text_bytes is not None:
        size, documents, words = in_bytes(search.text_bytes), search.documents or 0, search.words or 0
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


def in_bytes(size: int) -> str:
    """Returns a size in the unit in which it is below 1000."""
    number, units = float(size), ["bytes", "kB", "MB", "GB"]
    while number >= 1000 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:,.{0 if units[0] == 'bytes' else 1}f} {units[0]}"


def _side(side: Side | None) -> Shown:
    if side is None:
        return _NOTHING
    return Shown(_number(side.value), _interval(side.low, side.high), f"n = {side.n:,}")


def _interval(low: float | None, high: float | None, *, sign: str = "") -> str:
    return "" if low is None or high is None else f"[{_number(low, sign)}, {_number(high, sign)}]"


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign}.{_DECIMALS}f}".replace("-", "−")
