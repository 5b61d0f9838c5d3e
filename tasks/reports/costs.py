"""Cost part of the report page: cost by checkpoint and by evaluation, predicted and actual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tasks.records.cost import Spent, sum_of
from tasks.records.numbers import NOTHING
from tasks.records.record import Record
from tasks.spec.evaluators import evaluator_title
from tasks.spec.names import how_many, in_few_words, suites_in


class _CostRow(NamedTuple):
    title: str
    spent: Spent
    predicted: str
    guesses: str
    took: str
    ratio: str


def cost_part(records: Sequence[Record]) -> dict[str, Any]:
    """Returns predicted and actual cost of some records, formatted, with price lists and reasons for unknown prices."""
    whys = [record.cost.why_unknown for record in records]
    return {
        "total": _row("all", records),
        "checkpoints": _rows(records, lambda record: record.checkpoint.name),
        "evaluations": _rows(records, _evaluation),
        "lists": list(dict.fromkeys(filter(None, map(_list_of, records)))),
        "unknown": [f"{how_many(whys.count(why), 'cell')}: {why}" for why in dict.fromkeys(filter(None, whys))],
    }


def _rows(records: Sequence[Record], title_of: Callable[[Record], str]) -> list[_CostRow]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(title_of(record), []).append(record)
    return [_row(title, group) for title, group in groups.items()]


def _evaluation(record: Record) -> str:
    suites = suites_in(record.tags)
    asked = f"{evaluator_title(record.evaluator)}: {in_few_words(record.benchmarks)}"
    return f"{', '.join(suites)} · {asked}" if suites else asked


def _row(title: str, records: Sequence[Record]) -> _CostRow:
    both = [(record, record.cost.predicted) for record in records if record.cost.predicted is not None]
    expected = sum(predicted.seconds for _, predicted in both)
    seconds = sum(sum(record.seconds.values()) for record, _ in both)
    priced = [
        (predicted.usd, record.cost.usd)
        for record, predicted in both
        if predicted.usd is not None and record.cost.usd is not None
    ]
    whole = bool(priced) and len(priced) == len(both)  # otherwise USD would cover fewer cells than the seconds
    usd = (sum(expected for expected, _ in priced), sum(actual for _, actual in priced)) if whole else None
    guesses = sum(predicted.how == "guess" for _, predicted in both)
    return _CostRow(
        title=title,
        spent=sum_of(record.spent for record in records),
        predicted=_amount(expected, usd and usd[0]) if both else NOTHING,
        guesses=f"{guesses:,} of {how_many(len(both), 'cell')} a guess" if guesses else "",
        took=_amount(seconds, usd and usd[1]) if both else NOTHING,
        ratio=f"{seconds / expected:.2f}" if both and expected else NOTHING,
    )


def _amount(seconds: float, usd: float | None) -> str:
    return f"{seconds:,.1f} s" + (f", {usd:.3g} USD" if usd is not None else "")


def _list_of(record: Record) -> str | None:
    cost = record.cost
    if cost.usd_per_hour is None or cost.as_of is None:
        return None
    place = f"{cost.zone or cost.region}, {'preemptible' if cost.preemptible else 'on demand'}"
    return f"{cost.usd_per_hour:.2f} USD an hour of a replica in {place}: {cost.source or 'no source'}, {cost.as_of}"
