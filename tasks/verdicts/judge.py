"""The verdict of a gate on checkpoints: GO or NO-GO, with a reason for each rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import NamedTuple

from resources.errors import BadInput
from resources.storage import storage
from tasks.records.current import current_records, is_full, newest_settings, told_apart
from tasks.records.details import CheckpointReference
from tasks.records.numbers import margin, measured
from tasks.records.record import RECORD_NAME, Metric, Record, find_records
from tasks.records.search import FoundRecord
from tasks.records.verdicts import EarlyVerdict, Reason, Verdict, agreement, early_words, read_early
from tasks.records.verification import Verification, verified
from tasks.spec.evaluators import evaluator_title
from tasks.spec.labels import InRun, latest_of, order_of, place_in
from tasks.spec.names import how_many, suites_in
from tasks.verdicts.baselines import Baseline, Find, baseline_of, wanted_scores
from tasks.verdicts.comparison import ComparedMetric, Comparison, ScoreKey
from tasks.verdicts.gate import EVERYTHING, BaselineRule, BoundRule, Gate, NamedCheckpoint
from tasks.verdicts.statistics.composition import QuestionScores
from tasks.verdicts.statistics.paired import spent

_WITHOUT_SCORE = ("failed", "infra_failed", "gone")


@dataclass(frozen=True)
class JudgedCheckpoint(InRun):
    """A checkpoint with its records; counts requested cells without record, and unjudged records of other settings."""

    name: str
    step: int
    records: tuple[FoundRecord, ...]
    without_record: int = 0
    other_settings: int = 0
    early: tuple[EarlyVerdict, ...] = ()
    """Early verdicts on cells without a succeeded record."""
    label: str | None = None
    """Its label, if it has no step."""

    @property
    def gone(self) -> bool:
        return bool(self.records) and all(item.record.status == "gone" for item in self.records)


def judge(gate: Gate, checkpoints: Sequence[JudgedCheckpoint], *, evaluation_path: str) -> Verdict:
    """Applies a gate to checkpoints of a single run; baseline names are resolved below `evaluation_path`.

    Checkpoints that were removed before any evaluation are left out if others remain.
    """
    present = [each for each in checkpoints if not each.gone] or checkpoints
    ordered = sorted(present, key=lambda checkpoint: checkpoint.order)
    latest = latest_of(checkpoint.order for checkpoint in ordered)
    judged = [each for each in ordered if gate.checkpoints == "every" or each.order == latest]
    find = cache(find_records)
    reasons = (reason for checkpoint in judged for reason in _reasons(gate, checkpoint, evaluation_path, find=find))
    return Verdict(gate.name, tuple(dict.fromkeys(reasons)))  # two rules may have the same finding


def judged_checkpoints(records: Sequence[FoundRecord], early: Sequence[EarlyVerdict] = ()) -> list[JudgedCheckpoint]:
    """Groups the newest records of each benchmark by checkpoint; limited evaluations do not replace full evaluations.

    Early verdicts are for cells without a succeeded record, and are dropped if a full evaluation of that checkpoint
    name succeeded since.
    """
    since: dict[tuple[str, str, tuple[str, ...]], datetime] = {}
    for record in (item.record for item in records if item.record.succeeded and is_full(item.record)):
        since[_asked(record)] = max(record.created, since.get(_asked(record), record.created))
    early = [verdict for verdict in early if (at := since.get(_asked(verdict))) is None or verdict.created > at]
    current = current_records([item.record for item in records])
    judged = {id(record) for record in newest_settings(current)}
    others = {id(record) for record in current} - judged
    apart = told_apart([item.record.checkpoint for item in records])
    by_name: dict[str, list[FoundRecord]] = {}
    passed_over: Counter[str] = Counter()
    for item in records:
        name = apart(item.record.checkpoint).name
        passed_over[name] += id(item.record) in others
        if id(item.record) in judged:
            by_name.setdefault(name, []).append(item)
    decided: dict[str, list[EarlyVerdict]] = {}
    for verdict in early:
        decided.setdefault(verdict.checkpoint.name, []).append(verdict)
    places = {verdict.checkpoint.name: verdict.checkpoint for verdict in early}
    places |= {name: items[0].record.checkpoint for name, items in by_name.items()}
    return [
        JudgedCheckpoint(
            name,
            place.step,
            tuple(by_name.get(name, ())),
            other_settings=passed_over[name],
            early=tuple(decided.get(name, ())),
            label=place.label,
        )
        for name, place in places.items()
    ]


def with_rejected(
    judged: Sequence[JudgedCheckpoint], rejected: Mapping[str, str], *, run: str, folder: str | None
) -> list[JudgedCheckpoint]:
    """Adds rejected records as cells without a record, for all checkpoints of a run or for that of a single folder."""
    places = [cell.rstrip("/").split("/")[-4:-2] for cell in rejected]
    at = Counter(place[1] for place in places if place[:1] == [run] and folder in (None, place[1]))
    known = [replace(each, without_record=each.without_record + at.pop(each.folder, 0)) for each in judged]
    new = [
        JudgedCheckpoint(f"{run}-{name.partition('-')[2]}", place[0], (), without_record=cells, label=place[1])
        for name, cells in at.items()
        if (place := place_in(name)) is not None
    ]
    return [*known, *new]


def _asked(by: Record | EarlyVerdict) -> tuple[str, str, tuple[str, ...]]:
    return by.checkpoint.name, by.evaluator, by.benchmarks


def _reasons(gate: Gate, checkpoint: JudgedCheckpoint, evaluation_path: str, *, find: Find) -> Iterator[Reason]:
    yield from _cells(gate, checkpoint)
    yield from _verified(checkpoint.name, map(verified, checkpoint.records))
    if checkpoint.other_settings:
        ignored = f"{how_many(checkpoint.other_settings, 'record')} of these benchmarks with other settings not judged"
        yield Reason(checkpoint.name, "the newest settings", ignored, go=True)
    yield from _finished(checkpoint)
    compared: list[_Compared] = []
    scores = QuestionScores()
    for rule in gate.rules:
        decided = list(_decided(rule, checkpoint))
        yield from decided
        if decided and not _scores(rule, checkpoint):
            continue
        if isinstance(rule, BoundRule):
            yield from _bounded(rule, checkpoint)
        elif isinstance(comparison := _compared(rule, checkpoint, evaluation_path, find=find, scores=scores), Reason):
            yield comparison
        else:
            compared.append(comparison)
    if not compared:
        return
    decisions = max(1, sum(len(item.comparison.metrics) for item in compared))
    false_alarms = false_alarms_of(gate, checkpoint.records[0].record.checkpoint, evaluation_path) / decisions
    for item in compared:
        yield from _judged_by(item, checkpoint, false_alarms=false_alarms, scores=scores)


def _judged_by(
    item: _Compared, checkpoint: JudgedCheckpoint, *, false_alarms: float, scores: QuestionScores
) -> Iterator[Reason]:
    (rule, baseline, comparison), name = item, checkpoint.name
    early = {
        ScoreKey(verdict.evaluator, score.benchmark, score.metric)
        for verdict in checkpoint.early
        for score in verdict.scores
        if score.rule == rule.words
    }
    yield from _verified(name, comparison.unverified)
    for benchmark, changes in comparison.qualified.items():
        yield Reason(name, rule.words, f"{benchmark}: {', '.join(changes)}", go=True)
    for key in comparison.only_first:
        if key in early:
            continue
        yield Reason(name, rule.words, f"{key}: only the baseline has this score", go=False)
    for key in comparison.only_second:
        yield Reason(name, rule.words, *baseline.without(key))
    for metric in comparison.metrics:
        score = baseline.scores[ScoreKey(metric.evaluator, metric.benchmark, metric.metric)]
        shared = false_alarms / score.chosen_from
        left_out = 1.0 if rule.anyway else MOST_LEFT_OUT
        finding, go = judged_by_margin(metric, margin=rule.by_more_than, false_alarms=shared, left_out=left_out)
        against = "" if isinstance(rule.baseline, NamedCheckpoint) else f"against {score.words(scores)}: "
        yield Reason(name, rule.words, f"{metric.benchmark} · {metric.metric}: {against}{finding}", go)


def _decided(rule: BoundRule | BaselineRule, checkpoint: JudgedCheckpoint) -> Iterator[Reason]:
    for verdict in checkpoint.early:
        for score in (score for score in verdict.scores if score.rule == rule.words):
            go = score.verdict == "not worse" and not score.unlike
            yield Reason(checkpoint.name, rule.words, early_words(score, verdict), go, score)


def _finished(checkpoint: JudgedCheckpoint) -> Iterator[Reason]:
    for item in checkpoint.records:
        if item.record.succeeded and (verdict := read_early(item.cell_uri)) is not None:
            for score, finding in agreement(verdict, item.record):
                yield Reason(checkpoint.name, score.rule, finding, go=True)


def _verified(checkpoint: str, results: Iterable[Verification]) -> Iterator[Reason]:
    for result in results:
        if result.findings:
            yield Reason(checkpoint, "records as they were written", result.words, result.integrity != "changed")


def _cells(gate: Gate, checkpoint: JudgedCheckpoint) -> Iterator[Reason]:
    statuses = Counter(item.record.status for item in checkpoint.records)
    failed = sum(statuses[status] for status in _WITHOUT_SCORE) + checkpoint.without_record
    cells = len(checkpoint.records) + checkpoint.without_record + len(checkpoint.early)
    without = f", {checkpoint.without_record} of them without a record" if checkpoint.without_record else ""
    yield Reason(
        checkpoint.name,
        "every cell succeeded" if gate.max_failed == 0 else f"at most {how_many(gate.max_failed, 'cell')} failed",
        f"{failed} of {cells} failed{without}{_which(checkpoint.records, *_WITHOUT_SCORE)}",
        cells > 0 and failed <= gate.max_failed,
    )
    withheld = statuses["withheld"]
    yield Reason(
        checkpoint.name,
        "no score withheld" if gate.max_withheld == 0 else f"at most {how_many(gate.max_withheld, 'score')} withheld",
        f"{withheld} of {cells} withheld{_which(checkpoint.records, 'withheld')}",
        withheld <= gate.max_withheld,
    )


def _which(records: Sequence[FoundRecord], *statuses: str) -> str:
    named = [
        f"{evaluator_title(r.evaluator)}: {', '.join(r.benchmarks)}" for r in _records(records) if r.status in statuses
    ]
    return f" ({'; '.join(named)})" if named else ""


def _records(records: Sequence[FoundRecord]) -> list[Record]:
    return [item.record for item in records]


def _bounded(rule: BoundRule, checkpoint: JudgedCheckpoint) -> Iterator[Reason]:
    scores = _scores(rule, checkpoint)
    if not scores:
        yield Reason(checkpoint.name, rule.words, _missing(rule, checkpoint), go=False)
    for (metric, _), origin in zip(scores, _origins(scores), strict=True):
        passed = (
            math.isfinite(metric.value)
            and (rule.at_least is None or metric.value >= rule.at_least)
            and (rule.at_most is None or metric.value <= rule.at_most)
        )
        value = " ".join(filter(None, (measured(metric.value), margin(metric))))
        shown = f"{metric.benchmark} · {metric.name} = {value} (n = {metric.n:,}){origin}"
        yield Reason(checkpoint.name, rule.words, shown, passed)


def _scores(rule: BoundRule | BaselineRule, checkpoint: JudgedCheckpoint) -> list[tuple[Metric, Record]]:
    selection = wanted_scores(rule)
    newest: dict[tuple[str, str, str], tuple[Metric, Record]] = {}
    for record in sorted(selection.select(_records(checkpoint.records)), key=lambda record: record.created):
        for metric in record.metrics if record.succeeded else ():
            if selection.takes(metric.benchmark, metric.name, smooth=metric.smooth):
                newest[metric.benchmark, metric.name, record.evaluation_hash] = (metric, record)
    return list(newest.values())


def _origins(scores: Sequence[tuple[Metric, Record]]) -> list[str]:
    times = Counter((metric.benchmark, metric.name) for metric, _ in scores)
    described = [_origin(record) for _, record in scores]
    alike = Counter((m.benchmark, m.name, words) for (m, _), words in zip(scores, described, strict=True))
    origins: list[str] = []
    for (metric, record), words in zip(scores, described, strict=True):
        if alike[metric.benchmark, metric.name, words] > 1:
            words += f", evaluation {record.evaluation_hash[:8]}"
        origins.append(f", {words}" if times[metric.benchmark, metric.name] > 1 else "")
    return origins


def _origin(record: Record) -> str:
    words = [*(f"suite {suite}" for suite in suites_in(record.tags)), evaluator_title(record.evaluator)]
    if (most := record.evaluation.get("max_eval_instances")) is not None:
        words.append(f"{most:,} questions at most")
    return ", ".join(words)


def _missing(rule: BoundRule | BaselineRule, checkpoint: JudgedCheckpoint) -> str:
    asked = wanted_scores(rule.model_copy(update={"metric": EVERYTHING})).select(_records(checkpoint.records))
    if not asked:
        return "no such score: it was not asked"
    statuses = ", ".join(sorted({record.status for record in asked}))
    names = sorted({metric.name for record in asked for metric in record.metrics})
    return f"no such score: {statuses}" + (f", with {', '.join(names)}" if names else "")


class _Compared(NamedTuple):
    rule: BaselineRule
    baseline: Baseline
    comparison: Comparison


def _compared(
    rule: BaselineRule, checkpoint: JudgedCheckpoint, evaluation_path: str, *, find: Find, scores: QuestionScores
) -> _Compared | Reason:
    if not _scores(rule, checkpoint):
        return Reason(checkpoint.name, rule.words, _missing(rule, checkpoint), go=False)
    reference = checkpoint.records[0].record.checkpoint
    hashes = {item.record.evaluation_hash for item in checkpoint.records}
    baseline = baseline_of(rule, reference, evaluation_path=evaluation_path, hashes=hashes, find=find)
    if isinstance(baseline, Reason):
        return replace(baseline, checkpoint=checkpoint.name)
    try:
        compared = baseline.compared(rule, checkpoint.records, name=checkpoint.name, scores=scores)
    except BadInput as error:
        return Reason(checkpoint.name, rule.words, f"cannot be compared: {error.found}", go=False)
    return _Compared(rule, baseline, compared)


FALSE_ALARMS = 0.05
"""Share of runs, or checkpoints, no worse than the baseline that a gate may refuse by chance."""

MOST_LEFT_OUT = 0.05
"""Largest share of questions with answers from a single side, as for truncated prompts (`max_truncated`)."""


def false_alarms_of(gate: Gate, checkpoint: CheckpointReference, evaluation_path: str) -> float:
    """Returns a checkpoint's part of the run's allowed false alarms, by its number among the recorded, labels last."""
    if gate.false_alarms == "per checkpoint":
        return FALSE_ALARMS
    cells = (
        storage.parent(f.uri)
        for f in storage.list_files(storage.join(evaluation_path, checkpoint.run))
        if storage.basename(f.uri) == RECORD_NAME
    )
    folders = {checkpoint.folder, *(storage.basename(storage.parent(storage.parent(cell))) for cell in cells)}
    orders = {name: order_of(*place) for name in folders if (place := place_in(name)) is not None}
    before = sum(order < orders[checkpoint.folder] for order in orders.values())
    return FALSE_ALARMS * spent(before + 1)


def judged_by_margin(
    metric: ComparedMetric, *, margin: float, false_alarms: float, left_out: float = MOST_LEFT_OUT
) -> tuple[str, bool]:
    """Returns the finding on a score against the baseline, and True if it passes.

    `false_alarms` is the chance of refusing an equal score; `left_out` the largest share of questions with answers from
    a single side.
    """
    n = f"{how_many(metric.pairing.pairs, 'question')} of both" if metric.pairing else metric.unpaired_because
    shown = f"{measured(metric.first)} → {measured(metric.second)} ({n})"
    apart = metric.pairing.only_first + metric.pairing.only_second if metric.pairing else 0
    if metric.pairing and apart:
        shown += f"; left out: {how_many(metric.pairing.only_first, 'question')} of the baseline alone, "
        shown += f"{metric.pairing.only_second:,} of this checkpoint alone"
        if apart > left_out * (apart + metric.pairing.pairs):
            return f"{shown}, more than {left_out:.0%} of all", False
    if metric.higher_is_better is None:
        return f"{shown}; nothing says which direction is better", False
    if not math.isfinite(metric.finding.difference):
        return f"{shown}; not a number", False
    end = metric.finding.low if metric.higher_is_better else metric.finding.high
    detectable = metric.finding.detectable(false_alarms)
    if end is None or detectable is None:
        why = "all questions are in the same cluster" if metric.pairing else "nor are there standard errors of both"
        return f"{shown}; not tested: {why}", False
    lowest = end if metric.higher_is_better else -end
    shown += f"; worse by {-lowest:.3g} at most" if lowest < 0 else f"; better by {lowest:.3g} at least"
    shown += f"; equal scores pass margins from {detectable:.3g} on"
    if lowest <= -margin and margin < detectable:
        needed = math.ceil((detectable / margin) ** 2 * (metric.pairing.pairs if metric.pairing else min(metric.n)))
        shown += f", but may not pass {margin:g}: that takes about {how_many(needed, 'question')}"
    return shown, lowest > -margin
