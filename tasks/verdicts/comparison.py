"""Comparison of two checkpoints: their common metrics, tested question by question if there are samples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from resources.errors import AssayError, BadInput
from tasks.records.builds import (
    Qualification,
    build_of,
    qualifications_of,
    qualified_steps,
    qualified_words,
    unqualified_changes,
)
from tasks.records.current import flat, is_full
from tasks.records.numbers import evaluator_place
from tasks.records.record import Metric, Record
from tasks.records.search import FoundRecord, RecordFilter
from tasks.records.verification import Verification
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import evaluator_title
from tasks.verdicts.statistics.composition import QuestionScores, compare_compositions, mean_composition
from tasks.verdicts.statistics.paired import Adjustment, Finding, adjusted, compare_means

SIGNIFICANT = 0.05
"""Adjusted p-value below which a difference is significant."""
Verdict = Literal["better", "worse", "different", "no clear difference", "not tested"]
_PLACES = ("model_path", "model_name", "evaluation_path", "benchmarks_path", "timeout_seconds", "wandb_tags", "sinks",
           "protect")  # fmt: skip
_SHOWN_DIFFERENCES = 12


@dataclass(frozen=True)
class Pairing:
    """Numbers of questions with scores on both sides, on only either side, and with different prompts."""

    pairs: int
    only_first: int
    only_second: int
    other_prompts: int


@dataclass(frozen=True)
class ComparedMetric:
    """A common metric. `first` and `second` are over the compared questions; without pairing, as recorded."""

    evaluator: str
    benchmark: str
    metric: str
    higher_is_better: bool | None
    first: float
    second: float
    recorded: tuple[float, float]
    n: tuple[int, int]
    pairing: Pairing | None
    unpaired_because: str | None
    finding: Finding
    adjusted_p: float | None = None

    @property
    def verdict(self) -> Verdict:
        if self.adjusted_p is None:
            return "not tested"
        if self.adjusted_p >= SIGNIFICANT:
            return "no clear difference"
        if self.higher_is_better is None:
            return "different"
        return "better" if (self.finding.difference > 0) == self.higher_is_better else "worse"


class ScoreKey(NamedTuple):
    """A metric of a benchmark by an evaluator."""

    evaluator: str
    benchmark: str
    metric: str

    def __str__(self) -> str:
        return f"{evaluator_title(self.evaluator)}: {self.benchmark} · {self.metric}"


@dataclass(frozen=True)
class Comparison:
    """All common metrics. `differences` lists differences of the measurement by benchmark."""

    first: str
    second: str
    metrics: tuple[ComparedMetric, ...]
    only_first: tuple[ScoreKey, ...]
    only_second: tuple[ScoreKey, ...]
    differences: dict[str, tuple[str, ...]]
    adjustment: Adjustment
    qualified: dict[str, tuple[str, ...]]
    """Qualified changes of engine, harness or data between both, with their bounds, by benchmark."""
    unverified: tuple[Verification, ...] = ()
    """Records that were changed, or cannot be verified."""


def compare(
    first: Sequence[FoundRecord],
    second: Sequence[FoundRecord],
    *,
    labels: tuple[str, str],
    filters: RecordFilter,
    adjustment: Adjustment = "bh",
    anyway: bool = False,
) -> Comparison:
    """Tests all metrics with a success on both sides; `anyway` accepts changed records and differing measurements.

    Parts of a benchmark are compared only if named in `filters`. Raises `BadInput` without a common metric, or for
    changed records and differing measurements without `anyway`.
    """
    sides = [by_metric(entries, label, filters) for entries, label in zip((first, second), labels, strict=True)]
    shared = sorted((key for key in sides[0] if key in sides[1]), key=lambda key: evaluator_place(key.evaluator))
    if not shared:
        raise BadInput(
            expected=f"a metric that {labels[0]} and {labels[1]} both have",
            found=f"{_listed(sides[0])} and {_listed(sides[1])}",
            remedy="evaluate both on the same benchmarks",
        )
    pairs = {key: _alike(sides[0][key], sides[1][key]) for key in shared}
    comparison = compare_chosen(
        {key: ((before,), after) for key, (before, after) in pairs.items()},
        labels=labels,
        adjustment=adjustment,
        anyway=anyway,
    )
    return replace(
        comparison,
        only_first=tuple(key for key in sides[0] if key not in sides[1]),
        only_second=tuple(key for key in sides[1] if key not in sides[0]),
    )


def compare_chosen(
    chosen: Mapping[ScoreKey, tuple[Sequence[FoundRecord], FoundRecord]],
    *,
    labels: tuple[str, str],
    adjustment: Adjustment = "bh",
    anyway: bool = False,
    scores: QuestionScores | None = None,
) -> Comparison:
    """Tests metrics of given records as `compare` does; several records on the first side are averaged."""
    scores = scores or QuestionScores()
    unverified = _unverified(
        (entry for firsts, second in chosen.values() for entry in (*firsts, second)), scores=scores, anyway=anyway
    )
    metrics = [_compared(key, *chosen[key], scores=scores) for key in chosen]
    qualifications = qualifications_of(entry for firsts, second in chosen.values() for entry in (*firsts, second))
    differences: dict[str, tuple[str, ...]] = {}
    qualified: dict[str, tuple[str, ...]] = {}
    for metric, (firsts, second) in zip(metrics, chosen.values(), strict=True):
        pairs = [(first.record, second.record) for first in firsts]
        if reasons := [d for pair in pairs for d in _not_measured_alike(*pair, metric, qualifications)]:
            differences[metric.benchmark] = tuple(dict.fromkeys(reasons))
        elif changes := [change for pair in pairs for change in _changes(*pair, metric.benchmark)]:
            changes = [*qualified.get(metric.benchmark, ()), *changes]
            changes += [
                _qualified(*pair, metric, qualifications) for pair in pairs if _changes(*pair, metric.benchmark)
            ]
            qualified[metric.benchmark] = tuple(dict.fromkeys(changes))
    if differences and not anyway:
        raise _not_alike(differences, labels)
    p_values = adjusted([metric.finding.p for metric in metrics], by=adjustment)
    return Comparison(
        *labels,
        metrics=tuple(replace(metric, adjusted_p=p) for metric, p in zip(metrics, p_values, strict=True)),
        only_first=(),
        only_second=(),
        differences=differences,
        qualified=qualified,
        adjustment=adjustment,
        unverified=unverified,
    )


def _unverified(chosen: Iterable[FoundRecord], *, scores: QuestionScores, anyway: bool) -> tuple[Verification, ...]:
    records = {(entry.cell_uri, entry.record.attempt): entry for entry in chosen}
    unverified = tuple(result for result in map(scores.verified, records.values()) if result.findings)
    changed = [result.words for result in unverified if result.integrity == "changed"]
    if changed and not anyway:
        raise BadInput(
            expected="records that are what was written",
            found="\n".join(changed),
            remedy="delete record.json of each, evaluate again, and compare then; or add --anyway",
        )
    return unverified


def by_metric(side: Sequence[FoundRecord], label: str, filters: RecordFilter) -> dict[ScoreKey, list[FoundRecord]]:
    """Returns succeeded records by metric, full evaluations first, then newest; raises `BadInput` if none matches."""
    meant = {id(record) for record in replace(filters, latest=False).select([item.record for item in side])}
    usable = [item for item in side if id(item.record) in meant and item.record.succeeded]
    if not usable:
        statuses = ", ".join(sorted({f"{item.record.evaluator} {item.record.status}" for item in side})) or "no record"
        raise BadInput(
            expected=f"a succeeded record of {label} that is wanted here",
            found=statuses,
            remedy="evaluate it, or take back --evaluator, --benchmark or --metric",
        )
    usable.sort(key=lambda item: (is_full(item.record), item.record.created), reverse=True)
    having: dict[ScoreKey, list[FoundRecord]] = {}
    for item in usable:
        for metric in item.record.metrics:
            whole = metric.benchmark in item.record.benchmarks or bool(filters.benchmarks)
            if whole and filters.takes(metric.benchmark, metric.name, smooth=metric.smooth):
                key = ScoreKey(item.record.evaluator, metric.benchmark, metric.name)
                having.setdefault(key, []).append(item)
    return having


def _alike(first: Sequence[FoundRecord], second: Sequence[FoundRecord]) -> tuple[FoundRecord, FoundRecord]:
    for candidate in first:
        for other in second:
            if candidate.record.evaluation_hash == other.record.evaluation_hash:
                return candidate, other
    return first[0], second[0]


def _not_alike(differences: dict[str, tuple[str, ...]], labels: tuple[str, str]) -> BadInput:
    lines = [f"{benchmark}: {difference}" for benchmark, reasons in differences.items() for difference in reasons]
    more = len(lines) - _SHOWN_DIFFERENCES
    return BadInput(
        expected=f"{labels[0]} and {labels[1]} to be measured in the same way",
        found="differences:\n" + "\n".join(lines[:_SHOWN_DIFFERENCES]) + (f"\nand {more} more" if more > 0 else ""),
        remedy="evaluate one of them again as the other, requalify a change of versions (assay requalify), name a "
        "--benchmark that was measured alike, or add --anyway",
    )


def _not_measured_alike(
    first: Record, second: Record, metric: ComparedMetric, qualifications: Sequence[Qualification]
) -> Iterator[str]:
    if first.evaluation_hash != second.evaluation_hash:
        yield from _other_settings(first, second)
    unqualified = unqualified_changes(first, second, qualifications, benchmark=metric.benchmark)
    yield from (f"{change}, and no `assay requalify` says how little it changes" for change in unqualified)
    covered = first.evaluation_hash == second.evaluation_hash and _changes(first, second, metric.benchmark)
    if metric.pairing and metric.pairing.other_prompts and not (covered and not unqualified):
        yield f"{metric.pairing.other_prompts:,} of {metric.pairing.pairs:,} questions were put in other words"


def _qualified(first: Record, second: Record, metric: ComparedMetric, qualifications: Sequence[Qualification]) -> str:
    builds = build_of(first, metric.benchmark), build_of(second, metric.benchmark)
    steps = qualified_steps(*builds, qualifications, evaluator=metric.evaluator, benchmark=metric.benchmark)
    return qualified_words(steps or (), metric.metric)


def _changes(first: Record, second: Record, benchmark: str) -> tuple[str, ...]:
    return build_of(first, benchmark).changes(build_of(second, benchmark))


def _other_settings(first: Record, second: Record) -> Iterator[str]:
    before, after = _settings(first), _settings(second)
    different = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    yield from (f"{name} is {_shown(before.get(name))}, then {_shown(after.get(name))}" for name in different)
    if not different:
        yield "the files of the benchmarks folder, or something else that the configuration does not name"


def _settings(record: Record) -> dict[str, Any]:
    try:
        measured = EvaluationConfig.model_validate(record.evaluation).score_inputs()
    except (ValidationError, FileNotFoundError, AssayError):  # another version's configuration, or its files are gone
        measured = {name: value for name, value in record.evaluation.items() if name not in _PLACES}
    evals = {task.get("task_alias") or task.get("name"): task for task in measured.pop("evals", [])}
    return dict(flat({**measured, "evals": evals}))


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, default=str)


def metric_in(entry: FoundRecord, key: ScoreKey) -> Metric:
    """Returns the metric in a record that has it."""
    names = (key.benchmark, key.metric)
    return next(metric for metric in entry.record.metrics if (metric.benchmark, metric.name) == names)


def mean_metric(entries: Sequence[FoundRecord], key: ScoreKey) -> Metric:
    """Averages a metric over records with the same questions; its standard error is the mean of theirs."""
    metrics = [metric_in(entry, key) for entry in entries]
    errors = [metric.stderr for metric in metrics if metric.stderr is not None]
    value = math.fsum(metric.value for metric in metrics) / len(metrics)
    stderr = math.fsum(errors) / len(errors) if len(errors) == len(metrics) else None
    return metrics[-1].model_copy(update={"value": value, "stderr": stderr})


def _compared(
    key: ScoreKey, firsts: Sequence[FoundRecord], after: FoundRecord, *, scores: QuestionScores
) -> ComparedMetric:
    first, second = mean_metric(firsts, key), metric_in(after, key)
    base = mean_composition([scores.of(entry, metric_in(entry, key)) for entry in firsts])
    mine = scores.of(after, second)
    recorded = (first.value, second.value)
    tested = base if isinstance(base, str) else mine if isinstance(mine, str) else compare_compositions(base, mine)
    why, paired = (tested, None) if isinstance(tested, str) else (None, tested)
    return ComparedMetric(
        evaluator=key.evaluator,
        benchmark=key.benchmark,
        metric=key.metric,
        higher_is_better=second.higher_is_better,
        first=(paired.values if paired else recorded)[0],
        second=(paired.values if paired else recorded)[1],
        recorded=recorded,
        n=(first.n, second.n),
        pairing=Pairing(paired.pairs, paired.only_first, paired.only_second, paired.other_prompts) if paired else None,
        unpaired_because=why,
        finding=paired.finding if paired else compare_means(*recorded, stderrs=(first.stderr, second.stderr)),
    )


def _listed(keys: Iterable[ScoreKey]) -> str:
    return ", ".join(dict.fromkeys(key.benchmark for key in keys)) or "nothing"
