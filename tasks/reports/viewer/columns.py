"""Columns: the data format between the page and its server or file, loaded part by part.

The page requests these names relative to its own address, from the server or its own file:

    index.json                          `Index`: the benchmarks, from records alone
    <key>/questions.json                `Questions`: a benchmark's questions and checkpoints, without texts
    <key>/scores/<metric>.bin           bytes, checkpoint after checkpoint: the score of each question, see below
    <key>/flags.bin                     bytes, checkpoint after checkpoint: the flags of each question
    <key>/part/<number>.json            `Part`: texts and answers of `questions_per_part` questions at every checkpoint
    <key>/pairs/<metric>-<a>-<b>.json   `Pair`: the second of two checkpoints against the first
    <key>/search.json?text=<text>       `Found`: questions that contain a text, from a server only

Questions, checkpoints and metrics are identified by index from 0, in the order of `Questions`. Question q at checkpoint
c has byte number c × questions + q. A score byte of 0 to 254 spans `low` to `high` of its metric; 255 means no score,
as for all bytes of a checkpoint without samples. Flags are a sum of `CUT`, `UNSCORED` and `SHORTENED`.

A server sends everything gzipped, with that content encoding. In a file, each name is the `data-name` of a
`<script type="application/octet-stream">` with the same gzipped content in base64.

While a server reads a benchmark's samples, `questions.json` has the current state: `unread` checkpoints have no score,
and questions, metrics and their indices may change as more is read. With `?unread=<number>` appended, scores, flags and
parts match the `questions.json` of that state; the page reloads everything until no checkpoint is unread. Until all
samples are read, pairs and searches, and without any score every request, get status 202 and `Progress`; the page
repeats the request.

Errors have a status of 400 or more and `{"error": text}`. A missing name has status 404 on a server, and no script in a
file: a file has pairs of neighbors, and of the first and last checkpoint with samples.

Two checkpoints are compared by the bytes of a metric. The second has *won* a question with a better score, and *lost* a
question with a worse score. Equal scores count as *both* on the better half of the scale (including its middle), else
as *neither*. For a metric without a direction, higher counts as better.

A question is *right* on that better half. Over the checkpoints of a run that have a score of it, it was *learned* at
the first checkpoint from which it stays right to the end, and *lost* at the first from which it stays wrong to the end
after being right before. *Flips* counts the changes between right and wrong.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the import takes 0.1 s, which most processes do not need
    import numpy as np

CUT = 1
"""Flag of an answer that ended at the length limit."""
UNSCORED = 2
"""Flag of a requested question without a score, or with a withheld record."""
SHORTENED = 4
"""Flag of a prompt cut on the left to fit."""
NO_SCORE = 255
"""Byte of a question without a score."""
_HIGHEST = 254


@dataclass(frozen=True)
class Score:
    """A published value, with its 95 % interval if known."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ViewedCheckpoint:
    """A checkpoint of a benchmark, without a step if it has a `label`. `merge` describes its inputs if merged, `note`
    the reason for a missing score.

    Merged checkpoints are a run of their own for each kind of merge, as in reports. `scores` has published values by
    metric; `samples` is True if its answers were stored.
    """

    run: str
    name: str
    step: int
    merge: str | None
    status: str
    note: str | None
    samples: bool
    scores: Mapping[str, Score]
    label: str | None = None


@dataclass(frozen=True)
class ViewedBenchmark:
    """A benchmark by an evaluator with a set of settings, and its checkpoints by run and step.

    `key` has letters, digits and `-`. `settings` is a label that distinguishes benchmarks of the same name, otherwise
    empty. `metrics` are the published metrics, the default first.
    """

    key: str
    evaluator: str
    benchmark: str
    settings: str
    evaluation_hash: str
    metrics: Sequence[str]
    checkpoints: Sequence[ViewedCheckpoint]


@dataclass(frozen=True)
class Index:
    """All benchmarks, from records alone. `searches` is True if `search.json` is available."""

    title: str
    searches: bool
    benchmarks: Sequence[ViewedBenchmark]


@dataclass(frozen=True)
class Scale:
    """A metric of single questions, with bytes from `low` to `high`; `smooth` as in records."""

    name: str
    higher_is_better: bool | None
    low: float
    high: float
    smooth: bool = False


@dataclass(frozen=True)
class Questions:
    """Questions of a benchmark by name; for a group, `part` has the index in `parts` of each question's benchmark.

    `part` is empty for a single benchmark. `clusters` are names of shared passages, empty without any. `unreadable` has
    read errors of samples by checkpoint index. `unread` has the indices of checkpoints with samples not yet read.
    """

    ids: Sequence[str]
    parts: Sequence[str]
    part: Sequence[int]
    clusters: Sequence[str | None]
    metrics: Sequence[Scale]
    questions_per_part: int
    unreadable: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[int] = ()


@dataclass(frozen=True)
class Answer:
    """An answer of a checkpoint. `scores` are on the metric's own scale; `finish` is the finish reason.

    `prompt`, `context`, `target` and `choices` are given only if they differ from the question's.
    """

    output: str
    scores: Mapping[str, float | None] = field(default_factory=dict)
    log_likelihoods: Sequence[float] = ()
    finish: str | None = None
    tokens: int | None = None
    truncated: bool = False
    prompt: str | None = None
    context: str | None = None
    target: str | None = None
    choices: Sequence[str] | None = None


@dataclass(frozen=True)
class ViewedQuestion:
    """A question: its prompt is `context` followed by `prompt`. `answers` has a list for each checkpoint.

    A list is empty if the checkpoint lacks the question, and has several answers to a repeated question.
    """

    context: str
    prompt: str
    target: str | None
    choices: Sequence[str]
    answers: Sequence[Sequence[Answer]]


@dataclass(frozen=True)
class Part:
    """Consecutive questions, the first with index `first`."""

    first: int
    questions: Sequence[ViewedQuestion]


@dataclass(frozen=True)
class Pair:
    """The second of two checkpoints against the first: indices of questions by outcome, and a significance test.

    `values`, `difference`, its 95 % interval, `p` and `test` are those of `assay compare` before the adjustment for the
    number of metrics. `exact_p` is the exact p-value if the test is McNemar's. `reason` is the reason for no test.
    `changes` are the changes of engine, harness or data between both.
    """

    won: Sequence[int]
    lost: Sequence[int]
    both: Sequence[int]
    neither: Sequence[int]
    values: tuple[float, float] | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    exact_p: float | None = None
    test: str | None = None
    reason: str | None = None
    changes: Sequence[str] = ()


@dataclass(frozen=True)
class Found:
    """Indices of questions with a text: in context, prompt, target or choices, or in any answer.

    `complete` is False if the search ended early.
    """

    in_questions: Sequence[int]
    in_answers: Sequence[int]
    complete: bool


@dataclass(frozen=True)
class Progress:
    """Number of sample files of a benchmark that are read, and in total."""

    read: int
    of: int


def packed(content: bytes) -> bytes:
    """Compresses content for sending or for a file; equal content gives equal bytes."""
    return gzip.compress(content, compresslevel=1, mtime=0)


def as_bytes(scores: np.ndarray, scale: Scale) -> np.ndarray:
    """Converts scores to bytes; NaN becomes `NO_SCORE`."""
    import numpy as np

    span = scale.high - scale.low
    shares = np.clip((scores - scale.low) / span, 0.0, 1.0) if span > 0 else np.where(np.isnan(scores), np.nan, 0.0)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(shares), NO_SCORE, np.rint(shares * _HIGHEST)).astype(np.uint8)


def is_right(scores: np.ndarray, scale: Scale) -> np.ndarray:
    """Returns for each byte if it is on the better half of its scale; False without a score."""
    if scale.higher_is_better is False:
        return 2 * scores.astype(int) < _HIGHEST
    return (2 * scores.astype(int) >= _HIGHEST) & (scores != NO_SCORE)
