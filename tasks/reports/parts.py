"""Parts of the report page other than scores: evaluators, judges and pages, sinks, early verdicts, alerts, cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from resources.errors import StorageError
from resources.storage import storage
from tasks.records.cost import Cost, Spent, sum_of
from tasks.records.details import CheckpointReference
from tasks.records.numbers import NOTHING, evaluator_place, measured
from tasks.records.record import Counts, FoundRecord, Record, integrity
from tasks.records.samples import samples_of
from tasks.records.search import found_below
from tasks.records.verdicts import EarlyScore, EarlyVerdict, decided_words
from tasks.reports.table import Column, Results
from tasks.reports.texts import judge_of, links_of
from tasks.spec.evaluators import evaluator_title
from tasks.spec.names import how_many, in_few_words, suites_in
from tasks.verdicts.alert_files import read_alerts
from tasks.verdicts.alerts import Alert, Drop, QuestionName, improvements
from tasks.verdicts.statistics.composition import QuestionScores

_NOTES = {
    "lm_evaluation_harness": "Asks the served model, and scores its answers and log-likelihoods.",
    "helm": "Asks the served model. Its own pages show every question and answer; browsers show them only where a web "
    "server gives them out, such as `python -m http.server` in the folder of the records.",
    "alpaca_eval": "A judge compares each answer with a reference's. The win rate is the share that it prefers.",
    "inspect_ai": "Runs Inspect's tasks on the served model. `inspect view --log-dir` opens its logs, which hold "
    "every message.",
    "levanter_lm_evaluation_harness": (
        "Loads each checkpoint itself: no engine and no proxy in between. Log-likelihoods only."
    ),
}
_REMARKS = {
    "skipped": "left out, since their prompts are too long",
    "truncated": "asked with prompts that were cut to fit",
    "judge_errors": "without a usable verdict of the judge",
}


class Group(NamedTuple):
    """A value shared by some records, and a text that names the records, empty for all."""

    value: Any
    record_names: str


class EarlyPart(NamedTuple):
    """An early verdict on a score; `newest` is True for the last checkpoint of its run with a verdict.

    `whole` is the result of a full evaluation since then, None without it; `agrees` is None if it has no usable score.
    """

    checkpoint: CheckpointReference
    evaluator: str
    score: EarlyScore
    decided: str
    newest: bool
    whole: str | None
    agrees: bool | None

    @property
    def label(self) -> str:
        return f"{self.score.benchmark} · {self.score.metric}"

    @property
    def interval(self) -> str:
        return f"[{measured(self.score.low)}, {measured(self.score.high)}]"


def evaluator_parts(records: Sequence[Record], *, records_at: str | None, page: str | None) -> list[dict[str, Any]]:
    """Returns description, outcomes, judges and pages of each evaluator; the other arguments as in `links_of`.

    `address` of a page is None if it cannot be linked.
    """
    return [
        {
            "title": evaluator_title(evaluator),
            "note": _NOTES.get(evaluator, ""),
            "cells": len(mine),
            "succeeded": sum(record.succeeded for record in mine),
            "judges": [group for group in same(mine, judge_of) if group.value],
            "remarks": remarks([record.counts for record in mine]),
            "pages": [
                {
                    "name": f"{record.checkpoint.name}: {title}",
                    "address": address,
                    "place": f"{record.cell}/{record.links[title]}",
                }
                for record in mine
                for title, address in links_of(record, records_at=records_at, page=page)
            ],
        }
        for evaluator in _evaluators(records)
        if (mine := [record for record in records if record.evaluator == evaluator])
    ]


def sink_parts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns the number of records, their addresses, and reasons of failures for each sink."""
    parts: list[dict[str, Any]] = []
    for name in sorted({name for record in records for name in record.sinks}):
        states = [record.sinks[name] for record in records if name in record.sinks]
        failed = [state for state in states if state.status == "failed"]
        places = dict.fromkeys(state.where for state in states if state.where and state.status == "published")
        parts.append(
            {
                "name": name,
                "published": len(states) - len(failed),
                "failed": len(failed),
                "places": list(places),
                "reasons": list(dict.fromkeys(state.reason for state in failed if state.reason)),
            }
        )
    return parts


def early_parts(verdicts: Sequence[EarlyVerdict], records: Sequence[Record]) -> list[EarlyPart]:
    """Returns a part for each early score, by run and step, compared with the full evaluation if it exists."""
    ordered = sorted(verdicts, key=lambda verdict: (verdict.checkpoint.run, verdict.checkpoint.order, verdict.created))
    wholes = {_state(record): record for record in records if record.succeeded}
    scores = [(verdict, score) for verdict in ordered for score in verdict.scores]
    last = {_curve(verdict, score): verdict.checkpoint.order for verdict, score in scores}
    return [
        EarlyPart(
            verdict.checkpoint,
            verdict.evaluator,
            score,
            decided_words(score, verdict),
            verdict.checkpoint.order == last[_curve(verdict, score)],
            *_whole(score, wholes.get(_state(verdict))),
        )
        for verdict, score in scores
    ]


def _state(of: Record | EarlyVerdict) -> tuple[str, ...]:
    return of.checkpoint.run, of.checkpoint.folder, of.evaluator, of.cell, of.checkpoint.digest


def _curve(verdict: EarlyVerdict, score: EarlyScore) -> tuple[str, ...]:
    return verdict.checkpoint.run, verdict.evaluator, verdict.evaluation_hash, score.benchmark, score.metric


def _whole(score: EarlyScore, record: Record | None) -> tuple[str | None, bool | None]:
    if record is None:
        return None, None
    if integrity(record) == "changed":
        return "its record was changed since it was written", None
    value = score.value_in(record)
    return ("without this score", None) if value is None else (measured(value), score.agrees_with(value))


def remarks(counts: Sequence[Counts | None]) -> list[str]:
    """Returns the remarks on counted questions; empty if all prompts were complete, and all answers judged."""
    totals = Counter({name: sum(getattr(count, name) for count in counts if count) for name in _REMARKS})
    return [f"{total:,} {_REMARKS[name]}" for name, total in totals.items() if total]


def same(records: Sequence[Record], value_of: Callable[[Record], Any]) -> list[Group]:
    """Groups records by the distinct values of `value_of`."""
    groups: dict[str, tuple[Any, list[Record]]] = {}
    for record in records:
        value = value_of(record)
        groups.setdefault(json.dumps(value, sort_keys=True, default=str), (value, []))[1].append(record)
    alone = len(groups) == 1
    several = len(_evaluators(records)) > 1
    return [Group(value, "" if alone else _record_names(group, several=several)) for value, group in groups.values()]


def _record_names(records: Sequence[Record], *, several: bool) -> str:
    texts = []
    for evaluator in _evaluators(records):
        names = list(dict.fromkeys(record.checkpoint.name for record in records if record.evaluator == evaluator))
        many = f"{names[0]} … {names[-1]} ({len(names)} checkpoints)"
        texts.append(
            (f"{evaluator_title(evaluator)}: " if several else "") + (", ".join(names) if len(names) <= 3 else many)
        )
    return "; ".join(texts)


def _evaluators(records: Sequence[Record]) -> list[str]:
    return sorted({record.evaluator for record in records}, key=evaluator_place)


_SHOWN_QUESTIONS = 20
_PROMPT_CHARACTERS = 160


class LostQuestions(NamedTuple):
    """Questions with a worse score than before the drop: numbers lost and won of all `asked` in both, and examples."""

    lost: int
    won: int
    asked: int
    shown: tuple[tuple[str, str], ...]
    """Name and first line of each listed question."""


class AlertPart(NamedTuple):
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
        words = {k: "unknown" if v is None else f"± {measured(v)} (standard {m})" for k, (v, m) in noises.items()}
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
        AlertPart(drop.alert, results.named(column), _lost(drop, scores, records_at), words.get(drop.alert.id))
        for column in results.columns
        for drop in results.drops_of(column)
    ]
    return sorted(parts, key=lambda part: (part.acknowledged is not None, -part.alert.step))


def words_of_acknowledgements(records: Sequence[Record], *, records_at: str) -> dict[str, str]:
    """Returns the comments of acknowledged alerts by alert id; lists files once per run."""
    return {
        key: known.acknowledged.words
        for run in dict.fromkeys(record.checkpoint.run for record in records)
        for key, known in read_alerts(storage.join(records_at, run)).items()
        if known.acknowledged is not None
    }


def alert_lines(results: Results, column: Column) -> list[str]:
    """Returns a line per alert of a column."""
    return [
        f"Alert: {results.named(column)} of {alert.run} at step {alert.step:,}: {_numbers(alert)}"
        for alert in (drop.alert for drop in results.drops_of(column))
    ]


def _numbers(alert: Alert) -> str:
    sign = "−" if alert.found < alert.expected else "+"
    expected, value = measured(alert.expected), measured(alert.found)
    return f"expected {expected}, found {value} ({sign}{measured(abs(alert.found - alert.expected))})"


def _lost(drop: Drop, scores: QuestionScores, records_at: str | None) -> LostQuestions | str:
    if records_at is None:
        return "it is not known where their samples lie"
    try:
        changes = improvements(drop, evaluation_path=records_at, scores=scores)
        if isinstance(changes, str):
            return changes
        lost = sorted(changes, key=lambda name: (changes[name], *name))[: sum(c < 0 for c in changes.values())]
        won = sum(change > 0 for change in changes.values())
        shown = _with_prompts(lost[:_SHOWN_QUESTIONS], found_below(records_at, drop.record))
        return LostQuestions(len(lost), won, len(changes), shown)
    except StorageError as error:
        return error.found


def _with_prompts(names: Sequence[QuestionName], entry: FoundRecord) -> tuple[tuple[str, str], ...]:
    prompts = dict.fromkeys(names, "")
    for sample in samples_of(entry) if names else ():
        if (sample.benchmark, sample.id) in prompts:
            own = sample.prompt.strip().rpartition("\n\n")[2].strip()
            prompts[sample.benchmark, sample.id] = own.partition("\n")[0][:_PROMPT_CHARACTERS]
    return tuple((name, text) for (_, name), text in prompts.items())


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
    priced = [record.cost for record in records if record.cost.usd_per_hour is not None and record.cost.as_of]
    return {
        "total": _row("all", records),
        "checkpoints": _rows(records, lambda record: record.checkpoint.name),
        "evaluations": _rows(records, _evaluation),
        "lists": list(dict.fromkeys(map(_list_of, priced))),
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


def _list_of(cost: Cost) -> str:
    place = f"{cost.zone or cost.region}, {'preemptible' if cost.preemptible else 'on demand'}"
    return f"{cost.usd_per_hour:.2f} USD an hour of a replica in {place}: {cost.source or 'no source'}, {cost.as_of}"
