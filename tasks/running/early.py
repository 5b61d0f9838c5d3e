"""Early decisions of cells: the decisions that a gate requests, and verdicts on exactly these."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from resources.errors import BadInput
from tasks.evaluators.early import NOT_EARLY, EarlyQuestion, WantedEarly, WantedScore
from tasks.records.builds import build_of
from tasks.records.record import FoundRecord, Metric, Record, find_records, read_record
from tasks.records.verdicts import EarlyVerdict, Reason, find_early, read_early
from tasks.running.cells import Cell, standing_record
from tasks.verdicts.baselines import Find, baseline_of
from tasks.verdicts.comparison import mean_metric
from tasks.verdicts.gate import BaselineRule, Gate
from tasks.verdicts.statistics.composition import Composition, QuestionScores
from tasks.verdicts.statistics.early import unit_score

_PER_CENT = ("bleu", "chrf", "rouge")
"""Prefixes of metrics with question scores up to 100."""


@dataclass(frozen=True)
class _Sought:
    rule: BaselineRule
    metric: Metric
    baseline: tuple[FoundRecord, ...]
    composition: Composition


def bound_of(metric: Metric) -> float:
    """Returns the largest score of a question."""
    return 100.0 if metric.name.startswith(_PER_CENT) else 1.0


def decided_early(
    gate: Gate, cells: Sequence[Cell], *, unfit: Callable[[Cell, BadInput], None] | None = None
) -> list[Cell]:
    """Returns the cells with the requested early decisions and the existing verdicts on exactly these.

    Args:
        cells: the scores of a checkpoint share the gate's error probability.
        unfit: called with each cell that cannot be decided early, which is returned unchanged; when None, BadInput is
            raised instead.
    """
    scores, find = QuestionScores(), cache(find_records)
    sought: dict[Cell, list[_Sought]] = {}
    for cell in (cell for cell in cells if not cell.done):
        try:
            baseline_scores = _sought(gate, cell, scores, find)
        except BadInput as error:
            if unfit is None:
                raise
            unfit(cell, error)
            continue
        if baseline_scores:
            sought[cell] = baseline_scores
    checkpoints: dict[str, int] = {}
    for cell, baseline_scores in sought.items():
        checkpoints[cell.reference.name] = checkpoints.get(cell.reference.name, 0) + len(baseline_scores)
    return [
        _wanting(cell, _wanted(gate, cell, sought[cell], alpha=gate.alpha / checkpoints[cell.reference.name]))
        if cell in sought
        else cell
        for cell in cells
    ]


def _wanting(cell: Cell, decisions: WantedEarly) -> Cell:
    cell = replace(cell, early=decisions)
    return replace(cell, early_verdict=standing_verdict(cell))


def standing_verdict(cell: Cell) -> EarlyVerdict | None:
    """Returns the verdict in a cell's folder if it is on exactly the requested early decisions."""
    standing = read_early(cell.uri)
    digest = cell.early.digest if cell.early is not None else None
    return standing if standing is not None and standing.wanted == digest else None


def unfinished_verdict(cell: Cell) -> EarlyVerdict | None:
    """Returns a cell's early verdict unless the whole evaluation has succeeded meanwhile."""
    if cell.early is None or ((current := standing_record(cell)) is not None and current.record.succeeded):
        return None
    return standing_verdict(cell)


def _sought(gate: Gate, cell: Cell, scores: QuestionScores, find: Find) -> list[_Sought]:
    if reason := NOT_EARLY.get(cell.config.evaluator.name):
        raise _refused(cell.config.evaluator.title, reason)
    baseline_scores: list[_Sought] = []
    asked: set[str] = set()
    for rule in gate.rules:
        assert isinstance(rule, BaselineRule), "as gates that decide early are checked"
        if rule.evaluator not in (None, cell.config.evaluator.name):
            continue
        path = cell.config.evaluation_path
        baseline = baseline_of(rule, cell.reference, evaluation_path=path, hashes={cell.evaluation_hash}, find=find)
        if isinstance(baseline, Reason):
            if baseline.go:
                return []
            raise _refused(rule.words, baseline.found)
        for key, score in baseline.scores.items():
            if not _is_of(cell, score.records[0].record):
                continue
            _check_alike(rule, cell, score.records, scores)
            metric = mean_metric(score.records, key)
            baseline_scores.append(_Sought(rule, metric, score.records, _composition(metric, score.questions(scores))))
            asked |= {metric.benchmark for metric in score.records[0].record.metrics if not metric.parts}
    covered = {part for item in baseline_scores for part in item.composition.asked}
    missing = sorted(asked - covered) if baseline_scores else [task.metric_key for task in cell.config.evals]
    if missing:
        raise _refused(
            ", ".join(missing), f"no rule of the gate {gate.name} is about a score of it that a baseline has"
        )
    return baseline_scores


def _is_of(cell: Cell, record: Record) -> bool:
    asked = {task.metric_key for task in cell.config.evals}
    return record.evaluator == cell.config.evaluator.name and set(record.benchmarks) == asked


def _check_alike(rule: BaselineRule, cell: Cell, records: Sequence[FoundRecord], scores: QuestionScores) -> None:
    if rule.anyway:
        return
    names = [item.record.checkpoint.name for item in records if item.record.evaluation_hash != cell.evaluation_hash]
    if names:
        raise _refused(rule.words, f"{', '.join(names)} measured with other settings")
    changed = [result.words for item in records if (result := scores.verified(item)).integrity == "changed"]
    if changed:
        raise _refused(rule.words, "; ".join(changed))


def _composition(metric: Metric, composition: Composition | str) -> Composition:
    name = f"{metric.benchmark} · {metric.name}"
    if isinstance(composition, str):
        raise _refused(name, composition)
    if composition.form is not None:
        raise _refused(name, "it is a ratio of sums over tokens or bytes, no mean over questions")
    if metric.higher_is_better is None:
        raise _refused(name, "nothing says which direction is better")
    bound = bound_of(metric)
    values = [question.sum for asked in composition.asked.values() for question in asked.values()]
    if min(values) < 0 or max(values) > bound:
        raise _refused(name, f"its questions have scores from {min(values):g} to {max(values):g}, not from 0 to 1")
    return composition


def _refused(name: str, reason: str) -> BadInput:
    return BadInput(
        expected=f"scores that can be decided early, which {name} cannot",
        found=reason,
        remedy="leave it out, name another metric in the gate, or evaluate it whole: without --early",
    )


def _wanted(gate: Gate, cell: Cell, sought: Sequence[_Sought], *, alpha: float) -> WantedEarly:
    asked: dict[tuple[str, str], str] = {}
    prompts: dict[tuple[str, str], str | None] = {}
    for item in sought:
        for part, questions in item.composition.asked.items():
            for name, question in questions.items():
                asked[part, name] = f"{part}\0{question.cluster}"
                prompts[part, name] = None if item.rule.anyway else question.prompt.hex()
    clusters: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(asked):
        clusters.setdefault(asked[key], []).append(key)
    order = list(clusters)
    random.Random(cell.uri.rstrip("/").rsplit("/", 1)[1]).shuffle(order)
    questions = tuple(
        EarlyQuestion(*key, draw, prompts[key]) for draw, name in enumerate(order) for key in clusters[name]
    )
    places = {(question.benchmark, question.id): place for place, question in enumerate(questions)}
    scores = tuple(_score(item, places, alpha=alpha) for item in sought)
    return WantedEarly(gate=gate.name, alpha=gate.alpha, questions=questions, scores=scores)


def _score(item: _Sought, places: Mapping[tuple[str, str], int], *, alpha: float) -> WantedScore:
    composition, higher, bound = item.composition, bool(item.metric.higher_is_better), bound_of(item.metric)
    ordered = sorted(
        (places[part, name], composition.weights[part] / len(asked), question.sum)
        for part, asked in composition.asked.items()
        for name, question in asked.items()
    )
    return WantedScore(
        benchmark=item.metric.benchmark,
        metric=item.metric.name,
        rule=item.rule.words,
        baseline=", ".join(each.record.checkpoint.name for each in item.baseline),
        margin=item.rule.by_more_than,
        higher_is_better=higher,
        alpha=alpha,
        scale=composition.scale * bound,
        bound=bound,
        questions=tuple(place for place, _, _ in ordered),
        shares=tuple(share for _, share, _ in ordered),
        predictions=tuple(unit_score(value, bound=bound, mirrored=not higher) for _, _, value in ordered),
        builds=()
        if item.rule.anyway
        else tuple(build_of(each.record, item.metric.benchmark) for each in item.baseline),
    )


def early_below(evaluation_path: str) -> list[EarlyVerdict]:
    """Returns the early verdicts below a folder for cells without a succeeded record; the newest per checkpoint."""
    verdicts = [(read_record(cell), verdict) for cell, verdict in find_early(evaluation_path)]
    left = [verdict for record, verdict in verdicts if record is None or not record.succeeded]
    newest = {
        (verdict.checkpoint.name, verdict.evaluator, verdict.evaluation_hash): verdict
        for verdict in sorted(left, key=lambda verdict: verdict.created)
    }
    return list(newest.values())


def require_whole(gate: Gate | None, *, by: str) -> None:
    """Raises if a gate decides early, for callers that do not support it."""
    if gate is not None and gate.decide == "early":
        raise BadInput(
            expected=f"a gate that decides by whole evaluations, for {by}",
            found=f"decide: early in the gate {gate.name}",
            remedy="take it out; assay evaluate --gate decides early, and so does a policy's own gate",
        )
