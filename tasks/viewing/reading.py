"""Samples read into columns: what a page shows of all questions at once, apart from texts and answers in blocks.

A file is read line by line, once. Texts are the same at most checkpoints, so blocks of them are known by their digest
and kept once; only answers are kept for each.
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

from tasks.records.samples import damaged_samples, sample_lines
from tasks.records.scores import LENGTH, ratio
from tasks.viewing.columns import CUT, SHORTENED, UNSCORED, packed

if TYPE_CHECKING:
    import numpy as np

BLOCK = 64
"""Questions of a block, which is read at once: 64 at 200 checkpoints are 12,800 answers, parsed in 0.05 s."""
_OF_AN_ANSWER = ("output", "scores", "log_likelihoods", "finish", "tokens", "truncated")
_MOST = 1e38  # float32 ends at 3.4e38; two of these still differ by a number
_OUTLIERS = (1.0, 99.0)  # percentiles between which perplexities are told apart: one text can have 1e30


@dataclass(frozen=True)
class ColumnMetric:
    """A metric of a column, with the ends of its scores."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Column:
    """One benchmark at one checkpoint, question by question in the order of its file.

    `questions` is the digest of their names, `texts` are those of blocks of their texts. `scores` are float32, metric
    after metric. `answers` are packed, each a line with a list: of the answers to one question.
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
    """A column as it grows."""

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
        columns = {metric: _mean_scores(found, len(self.numbers)) for metric, found in self.scores.items()}
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
    """The columns of a file with samples, by benchmark.

    Args:
        content: of the file.
        uri: where it lies.
        shown_by: the benchmarks that show a sample's own one, which may be a part of groups.
        keep: keeps names and texts, and returns their digest.
    """
    found: dict[str, _Reading] = {}
    try:
        for sample in map(orjson.loads, sample_lines(content, uri=uri)):
            for benchmark in shown_by(sample["benchmark"]):
                if benchmark not in found:
                    found[benchmark] = _Reading(keep)
                found[benchmark].add(sample)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_samples(uri, str(error)) from error
    return {benchmark: reading.column() for benchmark, reading in found.items()}


def digest_of(content: bytes) -> bytes:
    """The digest that texts are known by."""
    return hashlib.sha256(content).digest()[:16]


def _blocks(lines: list[bytes]) -> Iterator[list[bytes]]:
    rest = iter(lines)
    while block := list(islice(rest, BLOCK)):
        yield block


def _mean_scores(found: Mapping[int, list[float]], size: int) -> np.ndarray:
    import numpy as np

    column = np.full(size, np.nan, dtype=np.float32)
    for number, scores in found.items():
        column[number] = scores[0] if len(scores) == 1 else math.fsum(scores) / len(scores)
    return column


def _ends(column: np.ndarray, is_ratio: bool) -> tuple[float, float]:
    import numpy as np

    ends = np.nanpercentile(column, _OUTLIERS) if is_ratio else (np.nanmin(column), np.nanmax(column))
    return float(ends[0]), float(ends[1])
