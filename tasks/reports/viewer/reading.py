"""Parsing of samples into columns: data of all questions at once, and texts and answers in blocks.

A file is read line by line, once. Texts are the same at most checkpoints, so blocks of texts are stored once by their
digest; only answers are stored for each checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

import orjson

from tasks.records.samples import LENGTH, damaged_samples, ratio, sample_lines
from tasks.reports.viewer.columns import CUT, SHORTENED, UNSCORED, packed

if TYPE_CHECKING:
    import numpy as np

BLOCK = 64
"""Questions per block, the unit of reading: 64 at 200 checkpoints are 12,800 answers, parsed in 0.05 s."""
_OF_AN_ANSWER = ("output", "scores", "log_likelihoods", "finish", "tokens", "truncated")
_MOST = 1e38  # below the largest float32, 3.4e38, so that differences stay finite
_OUTLIERS = (1.0, 99.0)  # percentile range of perplexities on the scale: a single text can have 1e30


@dataclass(frozen=True)
class ColumnMetric:
    """A metric of a column, with its range of scores."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Column:
    """A benchmark at a checkpoint, question by question in the order of its file.

    `questions` is the digest of the names; `texts` has a digest for each block of texts. `scores` are float32, metric
    after metric. `answers` are compressed blocks with a line per question: a list of its answers.
    """

    questions: bytes
    size: int
    metrics: tuple[ColumnMetric, ...]
    scores: bytes
    flags: bytes
    texts: tuple[bytes, ...]
    answers: tuple[bytes, ...]


@dataclass
class _Reading:
    keep: Callable[[bytes], bytes]
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    clusters: list[str | None] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    blocks: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    scores: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    ratios: set[str] = field(default_factory=set)
    flags: bytearray = field(default_factory=bytearray)

    def add(self, sample: dict[str, Any]) -> None:
        name = sample["benchmark"], sample["id"]
        number = self.numbers.setdefault(name, len(self.numbers))
        scores: dict[str, float | None] = sample["scores"]
        for metric, pair in (sample.get("ratios") or {}).items():
            self.ratios.add(metric)
            scores[metric] = ratio(metric, [pair])
        line = orjson.dumps({name: sample[name] for name in _OF_AN_ANSWER if sample.get(name) or name == "output"})
        flag = (CUT if sample.get("finish") == LENGTH else 0) | (SHORTENED if sample.get("truncated") else 0)
        usable = UNSCORED
        for metric, score in scores.items():
            if score is not None and isfinite(score):
                usable = 0
                self.scores.setdefault(metric, {}).setdefault(number, []).append(min(max(score, -_MOST), _MOST))
        if number == len(self.answers):
            self.answers.append(line)
            self.flags.append(flag | usable)
            self.clusters.append(sample.get("cluster"))
            self.texts.append(
                orjson.dumps(
                    [sample.get("context", ""), sample["prompt"], sample.get("target"), sample.get("choices") or []]
                )
            )
            if len(self.texts) == BLOCK:
                self._end_block()
        else:
            self.answers[number] += b"," + line
            self.flags[number] |= flag | usable

    def column(self) -> Column:
        import numpy as np

        if self.texts:
            self._end_block()
        names = [[*name, cluster] for name, cluster in zip(self.numbers, self.clusters, strict=True)]
        columns = {metric: _mean_scores(by_number, len(self.numbers)) for metric, by_number in self.scores.items()}
        return Column(
            questions=self.keep(orjson.dumps(names)),
            size=len(self.numbers),
            metrics=tuple(ColumnMetric(name, *_ends(column, name in self.ratios)) for name, column in columns.items()),
            scores=np.concatenate(list(columns.values())).tobytes() if columns else b"",
            flags=bytes(self.flags),
            texts=tuple(self.blocks),
            answers=tuple(packed(b"\n".join(b"[%b]" % line for line in block)) for block in _blocks(self.answers)),
        )

    def _end_block(self) -> None:
        self.blocks.append(self.keep(b"\n".join(self.texts)))
        self.texts = []


def columns_in(
    content: bytes, *, uri: str, shown_by: Callable[[str], Sequence[str]], keep: Callable[[bytes], bytes]
) -> dict[str, Column]:
    """Parses the content of a samples file into columns by benchmark.

    `shown_by` returns the benchmarks that show a sample's own benchmark, which may be part of groups; `keep` stores
    names and texts and returns their digest.
    """
    readings: dict[str, _Reading] = {}
    try:
        for sample in map(orjson.loads, sample_lines(content, uri=uri)):
            for benchmark in shown_by(sample["benchmark"]):
                if benchmark not in readings:
                    readings[benchmark] = _Reading(keep)
                readings[benchmark].add(sample)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_samples(uri, str(error)) from error
    return {benchmark: reading.column() for benchmark, reading in readings.items()}


def digest_of(content: bytes) -> bytes:
    """Returns the digest that identifies texts."""
    return hashlib.sha256(content).digest()[:16]


def _blocks(lines: list[bytes]) -> Iterator[list[bytes]]:
    rest = iter(lines)
    while block := list(islice(rest, BLOCK)):
        yield block


def _mean_scores(by_number: Mapping[int, list[float]], size: int) -> np.ndarray:
    import numpy as np

    column = np.full(size, np.nan, dtype=np.float32)
    for number, scores in by_number.items():
        column[number] = scores[0] if len(scores) == 1 else math.fsum(scores) / len(scores)
    return column


def _ends(column: np.ndarray, is_ratio: bool) -> tuple[float, float]:
    import numpy as np

    ends = np.nanpercentile(column, _OUTLIERS) if is_ratio else (np.nanmin(column), np.nanmax(column))
    return float(ends[0]), float(ends[1])
