"""Writes the samples of a harness's run, and completes its parsed results with them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tasks.evaluators.evaluator import Parsed
from tasks.records.details import BenchmarkDetails
from tasks.records.record import Metric
from tasks.records.samples import LENGTH, Question, Sample, agrees, question_of, scale_of, scores_in, write_samples
from tasks.verdicts.statistics.composition import with_interval


def with_samples(parsed: Parsed, samples: Iterable[Sample], path: Path) -> Parsed:
    """Writes samples to a new file, and completes parsed results with them."""
    questions: dict[str, list[Question]] = {}

    def noted() -> Iterator[Sample]:
        for sample in samples:
            questions.setdefault(sample.benchmark, []).append(question_of(sample))
            yield sample

    number = write_samples(path, noted())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    metrics = tuple(
        with_interval(metric, questions, parsed.metrics).model_copy(
            update={"recomputed": agrees(metric, questions, parsed.metrics)}
        )
        for metric in parsed.metrics
    )
    details = {
        benchmark: _completed(parsed.details.get(benchmark), asked, [m for m in metrics if m.benchmark == benchmark])
        for benchmark, asked in questions.items()
    }
    return replace(
        parsed, metrics=metrics, details={**parsed.details, **details}, samples=number, samples_digest=digest
    )


def _completed(
    details: BenchmarkDetails | None, asked: Sequence[Question], metrics: Sequence[Metric]
) -> BenchmarkDetails:
    if details is None:
        details = BenchmarkDetails(
            questions=sum(question.scored for question in asked),
            truncated=sum(question.truncated for question in asked),
        )
    finishes = Counter(question.finish for question in asked if question.finish)
    shown = {
        "finish_reasons": details.finish_reasons or dict(finishes),
        "at_limit": finishes[LENGTH] if details.at_limit is None and finishes else details.at_limit,
        "completed": details.completed or _over_completed(asked, metrics),
        "prompts": details.prompts or _digest(asked),
    }
    return details.model_copy(update=shown)


def _over_completed(asked: Sequence[Question], metrics: Sequence[Metric]) -> dict[str, float]:
    completed = [question for question in asked if question.finish != LENGTH]
    if len(completed) == len(asked):
        return {}
    values = {}
    for metric in metrics:
        scale, scores = scale_of(metric, scores_in(metric, asked)), scores_in(metric, completed)
        if scale is not None and scores:
            values[metric.name] = scale * math.fsum(scores) / len(scores)
    return values


def _digest(asked: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for name, prompt in sorted((question.id, question.prompt) for question in asked):
        digest.update(name.encode() + b"\0" + prompt)
    return digest.hexdigest()
