"""Comparison of two builds on the same checkpoint, question by question: identical, within noise, or different."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from resources.errors import BadInput
from tasks.records.builds import Qualification, QualifiedBenchmark, QualifiedMetric, Verdict, build_of
from tasks.records.record import FoundRecord, Record, now
from tasks.records.samples import Sample, samples_of
from tasks.records.search import RecordFilter
from tasks.records.verification import Verification
from tasks.verdicts.comparison import SIGNIFICANT, ComparedMetric, compare
from tasks.verdicts.statistics.paired import adjusted

MARGIN = 0.01
"""Default of the largest difference that counts as noise."""
_EVERYTHING = RecordFilter(benchmarks=("*",), latest=False)
_SHOWN_QUESTIONS = 20
_ROUNDING = 1e-9
_WORST: tuple[Verdict, ...] = ("identical", "within noise", "different")


@dataclass(frozen=True)
class _Question:
    name: str
    prompt: bool
    output: bool
    scores: tuple[str, ...]
    shift: float | None

    @property
    def differs(self) -> bool:
        return self.prompt or self.output or bool(self.scores) or bool(self.shift)

    @property
    def words(self) -> str:
        differences = [*self.scores, *(["another output"] if self.output else [])]
        differences += ["another prompt"] if self.prompt else []
        differences += [f"log-likelihoods by {self.shift:.2g}"] if self.shift else []
        return f"{self.name}: {', '.join(differences)}"


@dataclass(frozen=True)
class _Differences:
    both: tuple[_Question, ...]
    only_before: int
    only_after: int

    @property
    def none(self) -> bool:
        alike = not any(question.differs for question in self.both)
        return alike and bool(self.both) and not self.only_before and not self.only_after


def qualify(
    before: Sequence[FoundRecord], after: Sequence[FoundRecord], *, compared: tuple[str, str], margin: float = MARGIN
) -> Qualification:
    """Returns the verdict on a change of builds, from records of the same checkpoint with both; only successes count.

    `margin` is the largest difference that counts as noise, relative to values above 1. Raises `BadInput` for sides
    without a common evaluation, of several checkpoints, or with changed records.
    """
    pairs = _pairs(before, after, compared)
    tested = [
        (pair, compare([pair[0]], [pair[1]], labels=compared, filters=_EVERYTHING, adjustment="none", anyway=True))
        for pair in pairs
    ]
    _refuse_changed(result for _, comparison in tested for result in comparison.unverified)
    every = [metric for _, comparison in tested for metric in comparison.metrics]
    p_values = iter(adjusted([metric.finding.p for metric in every], by="holm"))
    benchmarks: list[QualifiedBenchmark] = []
    for pair, comparison in tested:
        by_benchmark: dict[str, list[ComparedMetric]] = defaultdict(list)
        for metric in comparison.metrics:
            by_benchmark[metric.benchmark].append(replace(metric, adjusted_p=next(p_values)))
        samples = [_samples(side) for side in pair]
        for benchmark, metrics in by_benchmark.items():
            differences = _differences(_parts(pair[0].record, benchmark), *samples)
            benchmarks.append(_qualified(pair, benchmark, metrics, differences, margin=margin))
    return Qualification(
        checkpoint=pairs[0][0].record.checkpoint,
        compared=compared,
        margin=margin,
        benchmarks=tuple(benchmarks),
        created=now(),
    )


def _pairs(
    before: Sequence[FoundRecord], after: Sequence[FoundRecord], compared: tuple[str, str]
) -> list[tuple[FoundRecord, FoundRecord]]:
    sides: list[dict[tuple[str, tuple[str, ...], object], FoundRecord]] = []
    for entries in (before, after):
        ordered = sorted((entry for entry in entries if entry.record.succeeded), key=lambda entry: entry.record.created)
        sides.append({_asked(entry.record): entry for entry in ordered})
    pairs = [(sides[0][key], sides[1][key]) for key in sides[0] if key in sides[1]]
    if not pairs or len({record.record.checkpoint.digest for pair in pairs for record in pair}) > 1:
        raise BadInput(
            expected="succeeded records of the same evaluations of a single checkpoint on both sides",
            found="; ".join(f"{label}: {_listed(side.values())}" for label, side in zip(compared, sides, strict=True)),
            remedy="ask the same checkpoint with both: name a pinned list in place of a folder of records",
        )
    return pairs


def _refuse_changed(results: Iterable[Verification]) -> None:
    if changed := [result.words for result in results if result.integrity == "changed"]:
        raise BadInput(
            expected="records that are what was written",
            found="\n".join(changed),
            remedy="delete record.json of each, and evaluate again",
        )


def _asked(record: Record) -> tuple[str, tuple[str, ...], object]:
    return record.evaluator, record.benchmarks, record.evaluation.get("max_eval_instances")


def _listed(entries: Iterable[FoundRecord]) -> str:
    names = {f"{entry.record.checkpoint.name} on {', '.join(entry.record.benchmarks)}" for entry in entries}
    return ", ".join(sorted(names)) or "nothing"


def _samples(entry: FoundRecord) -> dict[str, dict[str, list[Sample]]]:
    samples: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    smooth = {metric.name for metric in entry.record.metrics if metric.smooth}
    for sample in samples_of(entry):
        scores = {name: score for name, score in sample.scores.items() if name not in smooth}
        samples[sample.benchmark][sample.id].append(sample.model_copy(update={"scores": scores}))
    return samples


def _parts(record: Record, benchmark: str) -> list[str]:
    parts = (part for metric in record.metrics if metric.benchmark == benchmark for part in metric.parts)
    return list(dict.fromkeys((benchmark, *parts)))


def _differences(benchmarks: Sequence[str], *sides: dict[str, dict[str, list[Sample]]]) -> _Differences:
    both: list[_Question] = []
    only = [0, 0]
    for benchmark in benchmarks:
        before, after = (side.get(benchmark, {}) for side in sides)
        only[0] += len(before.keys() - after.keys())
        only[1] += len(after.keys() - before.keys())
        prefix = f"{benchmark} " if len(benchmarks) > 1 else ""
        both += [_question(f"{prefix}{name}", before[name], after[name]) for name in before if name in after]
    return _Differences(tuple(both), *only)


def _question(name: str, before: Sequence[Sample], after: Sequence[Sample]) -> _Question:
    prompt, output = len(before) != len(after), False
    scores: list[str] = []
    shifts: list[float] = []
    for first, second in zip(before, after, strict=False):
        prompt |= first.asked != second.asked
        output |= first.output != second.output
        for metric in first.scores | second.scores:
            values = first.scores.get(metric), second.scores.get(metric)
            if values[0] != values[1]:
                scores.append(f"{metric} {_shown(values[0])} → {_shown(values[1])}")
        both = zip_longest(first.log_likelihoods, second.log_likelihoods, fillvalue=0.0)
        shifts += [abs(likelihood - other) for likelihood, other in both]
    return _Question(name, prompt, output, tuple(dict.fromkeys(scores)), max(shifts, default=None))


def _shown(score: float | None) -> str:
    return "none" if score is None else f"{score:.4g}"


def _qualified(
    pair: tuple[FoundRecord, FoundRecord],
    benchmark: str,
    metrics: Sequence[ComparedMetric],
    differences: _Differences,
    *,
    margin: float,
) -> QualifiedBenchmark:
    judged = tuple(_judged(metric, differences, margin=margin) for metric in metrics)
    verdicts: list[Verdict] = [metric.verdict for metric in judged]
    verdicts.append("identical" if differences.none else "within noise")
    shifts = [question.shift for question in differences.both if question.shift is not None]
    differing = sorted((q for q in differences.both if q.differs), key=lambda q: (not q.scores, -(q.shift or 0.0)))
    return QualifiedBenchmark(
        evaluator=pair[0].record.evaluator,
        benchmark=benchmark,
        before=build_of(pair[0].record, benchmark),
        after=build_of(pair[1].record, benchmark),
        verdict=max(verdicts, key=_WORST.index),
        questions=len(differences.both),
        only_before=differences.only_before,
        only_after=differences.only_after,
        other_prompts=sum(question.prompt for question in differences.both),
        other_outputs=sum(question.output for question in differences.both),
        other_scores=sum(bool(question.scores) for question in differences.both),
        other_log_likelihoods=sum(bool(question.shift) for question in differences.both),
        largest_shift=max(shifts, default=None),
        evidence=tuple(question.words for question in differing[:_SHOWN_QUESTIONS]),
        metrics=judged,
    )


def _judged(metric: ComparedMetric, differences: _Differences, *, margin: float) -> QualifiedMetric:
    allowed = margin * max(1.0, abs(metric.recorded[0])) + _ROUNDING
    changes = (metric.recorded[1] - metric.recorded[0], metric.finding.difference)
    change = max(abs(change) for change in changes if math.isfinite(change))
    verdict: Verdict = "within noise"
    if differences.none and change == 0.0:
        verdict = "identical"
    elif change > allowed or (metric.adjusted_p is not None and metric.adjusted_p < SIGNIFICANT):
        verdict = "different"
    return QualifiedMetric(
        name=metric.metric,
        before=metric.recorded[0],
        after=metric.recorded[1],
        low=metric.finding.low,
        high=metric.finding.high,
        p=metric.adjusted_p,
        verdict=verdict,
    )
