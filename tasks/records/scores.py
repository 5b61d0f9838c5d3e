"""Scores of single questions without their texts: the source of published values, which they can reproduce."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from resources.storage import storage
from tasks.records.record import FoundRecord, Metric
from tasks.records.samples import SAMPLES_NAME, Sample, parsed_samples, samples_content

LENGTH = "length"
"""Finish reason of an answer that ended at the length limit."""
_TOLERANCE = 5e-4  # harnesses round the means they publish
_SCALES = (1.0, 100.0)  # some publish percent of scores from 0 to 1


class Question(NamedTuple):
    """A sample without its texts; `prompt` is a digest."""

    id: str
    prompt: bytes
    cluster: str | None
    finish: str | None
    truncated: bool
    scores: Mapping[str, float]
    ratios: Mapping[str, tuple[float, float]]

    @property
    def scored(self) -> bool:
        """False for a question that was left out or has no usable result."""
        return bool(self.scores or self.ratios)


Questions = Mapping[str, Sequence[Question]]
"""Samples of a record by benchmark."""


def question_of(sample: Sample) -> Question:
    """Returns a sample without its texts, which can be large in total."""
    prompt = hashlib.sha256(sample.asked.encode()).digest()[:8]
    kept = sample.cluster, sample.finish, sample.truncated, sample.scores, sample.ratios
    return Question(sample.id, prompt, *kept)


class KeptSamples(NamedTuple):
    """The samples of a record, and the digest of their file."""

    digest: str
    questions: Questions


def kept_samples(entry: FoundRecord) -> KeptSamples | None:
    """Returns a record's samples without texts, or None; raises `StorageError` if they are damaged or unreadable."""
    uri = storage.join(entry.cell_uri, entry.record.attempt, SAMPLES_NAME)
    questions: dict[str, list[Question]] = {}
    try:
        content = samples_content(uri)
    except FileNotFoundError:
        return None
    for sample in parsed_samples(content, uri=uri):
        questions.setdefault(sample.benchmark, []).append(question_of(sample))
    return KeptSamples(hashlib.sha256(content).hexdigest(), questions)


def scale_of(metric: Metric, scores: Sequence[float]) -> float | None:
    """Returns the factor between the mean of some scores and a metric's value (1 or 100); None if neither fits."""
    mean = math.fsum(scores) / len(scores) if scores else math.nan
    return next(
        (scale for scale in _SCALES if abs(mean * scale - metric.value) <= _TOLERANCE * scale * max(1.0, abs(mean))),
        None,
    )


def scores_in(metric: Metric, questions: Iterable[Question]) -> list[float]:
    """Returns the finite scores of questions for a metric."""
    scores = (question.scores.get(metric.name, math.nan) for question in questions)
    return [score for score in scores if math.isfinite(score)]


def ratio(name: str, parts: Sequence[tuple[float, float]]) -> float:
    """Returns a perplexity, or bits per byte, from pairs of log-likelihood and number of words or bytes."""
    units = math.fsum(number for _, number in parts)
    per_unit = -math.fsum(likelihood for likelihood, _ in parts) / units if units else math.nan
    try:
        return per_unit / math.log(2) if name.startswith("bits_per") else math.exp(per_unit)
    except OverflowError:
        return math.inf


def given(metric: Metric, questions: Questions, metrics: Iterable[Metric]) -> list[float]:
    """Returns the values computed from samples, or from a group's parts, a value per scale; empty if there are none."""
    if metric.parts:
        values = {other.benchmark: other.value for other in metrics if other.name == metric.name}
        known = values.keys() >= metric.parts.keys()
        return [math.fsum(weight * values[part] for part, weight in metric.parts.items())] if known else []
    asked = questions.get(metric.benchmark, ())
    if parts := [question.ratios[metric.name] for question in asked if metric.name in question.ratios]:
        return [ratio(metric.name, parts)]
    scores = scores_in(metric, asked)
    return [scale * math.fsum(scores) / len(scores) for scale in _SCALES] if scores else []


def agrees(metric: Metric, questions: Questions, metrics: Iterable[Metric]) -> bool:
    """Returns True if samples, or a group's parts, reproduce the published value; see `given`."""
    values = zip(given(metric, questions, metrics), _SCALES, strict=False)
    return any(is_close(value, metric.value, scale=scale) for value, scale in values)


def is_close(computed: float, value: float, *, scale: float = 1.0) -> bool:
    """Returns True if a value equals the published value up to the rounding of harnesses."""
    return math.isclose(computed, value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale)
