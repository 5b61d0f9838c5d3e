"""Scores of single questions without their texts: what published values are taken over, and can be recomputed from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from resources.storage import storage
from tasks.records.record import FoundRecord, Metric
from tasks.records.samples import SAMPLES_NAME, Sample, parsed_samples, samples_content

LENGTH = "length"
"""The reason an engine gives for an answer that ended at the limit."""
_TOLERANCE = 5e-4  # harnesses round the means they publish
_SCALES = (1.0, 100.0)  # some publish per cent over scores from 0 to 1


class Question(NamedTuple):
    """One sample, with a digest of its prompt in place of all texts."""

    id: str
    prompt: bytes
    cluster: str | None
    finish: str | None
    truncated: bool
    scores: Mapping[str, float]
    ratios: Mapping[str, tuple[float, float]]

    @property
    def scored(self) -> bool:
        """True unless it was left out, or nothing usable came of it."""
        return bool(self.scores or self.ratios)


Questions = Mapping[str, Sequence[Question]]
"""Samples of one record by benchmark."""


def question_of(sample: Sample) -> Question:
    """A sample without its texts, which together can be large."""
    prompt = hashlib.sha256(sample.asked.encode()).digest()[:8]
    kept = sample.cluster, sample.finish, sample.truncated, sample.scores, sample.ratios
    return Question(sample.id, prompt, *kept)


class KeptSamples(NamedTuple):
    """The samples of a record, and the digest of their file."""

    digest: str
    questions: Questions


def kept_samples(found: FoundRecord) -> KeptSamples | None:
    """The samples beside a record, without their texts; None if there are none.

    Raises:
        StorageError: they are damaged, or cannot be read.
    """
    uri = storage.join(found.cell_uri, found.record.attempt, SAMPLES_NAME)
    questions: dict[str, list[Question]] = {}
    try:
        content = samples_content(uri)
    except FileNotFoundError:
        return None
    for sample in parsed_samples(content, uri=uri):
        questions.setdefault(sample.benchmark, []).append(question_of(sample))
    return KeptSamples(hashlib.sha256(content).hexdigest(), questions)


def scale_of(metric: Metric, scores: Sequence[float]) -> float | None:
    """The number that the mean of some scores is multiplied with to give a metric's value; None if there is none."""
    mean = math.fsum(scores) / len(scores) if scores else math.nan
    return next(
        (scale for scale in _SCALES if abs(mean * scale - metric.value) <= _TOLERANCE * scale * max(1.0, abs(mean))),
        None,
    )


def scores_in(metric: Metric, questions: Iterable[Question]) -> list[float]:
    """The scores of questions in a metric, those that are numbers."""
    scores = (question.scores.get(metric.name, math.nan) for question in questions)
    return [score for score in scores if math.isfinite(score)]


def ratio(name: str, parts: Sequence[tuple[float, float]]) -> float:
    """A perplexity, or bits per byte, from log-likelihoods and the words or bytes that they are of."""
    units = math.fsum(number for _, number in parts)
    per_unit = -math.fsum(likelihood for likelihood, _ in parts) / units if units else math.nan
    try:
        return per_unit / math.log(2) if name.startswith("bits_per") else math.exp(per_unit)
    except OverflowError:
        return math.inf


def given(metric: Metric, questions: Questions, metrics: Iterable[Metric]) -> list[float]:
    """The values that samples, or the parts of a group, give: one on each scale; empty where they give none."""
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
    """Tells if samples, or the parts of a group, give the value that was published; see `given`."""
    values = zip(given(metric, questions, metrics), _SCALES, strict=False)
    return any(is_close(found, metric.value, scale=scale) for found, scale in values)


def is_close(found: float, value: float, *, scale: float = 1.0) -> bool:
    """Tells if a value is the one that was published, but for the rounding of harnesses."""
    return math.isclose(found, value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale)
