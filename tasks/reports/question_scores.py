"""Scores of single questions, from the samples beside records: what two checkpoints are compared with."""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

from resources.storage import storage
from tasks.records.record import Metric
from tasks.records.samples import SAMPLES_NAME, read_samples
from tasks.records.search import FoundRecord

_TOLERANCE = 5e-4  # harnesses round the means they publish
_SCALES = (1.0, 100.0)  # some publish per cent over scores from 0 to 1


class Scores(NamedTuple):
    """Scores of one metric and digests of the prompts, by the id of the question; `scale` times their mean is the
    value that was published."""

    values: dict[str, float]
    prompts: dict[str, bytes]
    scale: float


class _Question(NamedTuple):
    identity: str
    prompt: bytes
    scores: dict[str, float]


class QuestionScores:
    """Looks up scores in the samples of records; every file is read once."""

    def __init__(self) -> None:
        self._read: dict[str, dict[str, list[_Question]] | None] = {}

    def of(self, found: FoundRecord, metric: Metric) -> Scores | str:
        """The scores that a metric is the mean of, or why there are none.

        Raises:
            StorageError: the samples are damaged, or cannot be read.
        """
        uri = storage.join(found.cell_uri, found.record.attempt, SAMPLES_NAME)
        if uri not in self._read:
            self._read[uri] = _by_benchmark(uri)
        benchmarks = self._read[uri]
        if benchmarks is None:
            return "no samples were kept"
        collected: dict[str, list[float]] = {}
        prompts: dict[str, bytes] = {}
        for question in benchmarks.get(metric.benchmark, ()):
            if math.isfinite(score := question.scores.get(metric.name, math.nan)):
                collected.setdefault(question.identity, []).append(score)
                prompts[question.identity] = question.prompt
        if not collected:
            return "single questions have no score in it"
        every = [score for scores in collected.values() for score in scores]
        mean = math.fsum(every) / len(every)
        for scale in _SCALES:
            if abs(mean * scale - metric.value) <= _TOLERANCE * scale * max(1.0, abs(mean)):
                values = {identity: math.fsum(scores) / len(scores) for identity, scores in collected.items()}
                return Scores(values, prompts, scale)
        return "its value is not the mean over single questions"


def _by_benchmark(uri: str) -> dict[str, list[_Question]] | None:
    """All samples of a file, without their texts, which together can be large; None if there is no such file."""
    benchmarks: dict[str, list[_Question]] = {}
    try:
        for sample in read_samples(uri):
            prompt = hashlib.sha256(sample.prompt.encode()).digest()[:8]
            benchmarks.setdefault(sample.benchmark, []).append(_Question(sample.id, prompt, sample.scores))
    except FileNotFoundError:
        return None
    return benchmarks
