"""Columns: the form in which a page gets questions and answers, loaded part by part.

The page asks for names below its own address, of a server or of the file that it stands in:

    index.json                          `Index`: which benchmarks there are; from records alone
    <key>/questions.json                `Questions`: a benchmark's questions and checkpoints, without texts
    <key>/scores/<metric>.bin           bytes, checkpoint after checkpoint: the score of each question, see below
    <key>/flags.bin                     bytes, checkpoint after checkpoint: the flags of each question
    <key>/part/<number>.json            `Part`: texts and answers of `questions_per_part` questions at every checkpoint
    <key>/pairs/<metric>-<a>-<b>.json   `Pair`: the second of two checkpoints against the first
    <key>/search.json?text=<text>       `Found`: questions that hold a text, of a server only

Questions, checkpoints and metrics are numbers, counted from 0 in the order of `Questions`. The byte of question q at
checkpoint c is number c × questions + q. A score's byte is 0 to 254, from `low` to `high` of its metric; 255 stands for
no score, and so do all bytes of a checkpoint without samples. Flags are a sum: `CUT`, `UNSCORED`, `SHORTENED`.

A server sends everything gzipped, with that content encoding. In a file, each name is the `data-name` of a
`<script type="application/octet-stream">` that holds the same, gzipped, in base64.

A server that has read some of a benchmark's samples answers for `questions.json` with what is there: checkpoints that
are `unread` have no score, and questions, metrics and their numbers may be others once more are read. With
`?unread=<how many>` behind their names, scores, flags and parts are those of that answer; the page asks for all of it
anew until none is unread. Pairs and searches, and everything while there is no score yet, are answered with status 202
and `Progress` until all are read; the page asks again.

What goes wrong has a status of 400 or more and `{"error": text}`. A name that is not there has status 404 on a server,
and no script in a file: pairs are in a file for neighbours, and for the first and last checkpoint with samples.

Two checkpoints are told apart by the bytes of a metric. The second has *won* a question where its score is the better
one, *lost* it where it is the worse one. Of those alike, *both* have it from the middle of the scale on, on the better
side, and *neither* the others. A metric without a direction counts as one whose higher values are better.

A question is *right* where both would have it. Over the checkpoints of a run that have a score of it, it was *learned*
at the first from which on it is right to the end, *lost* at the first from which on it is wrong to the end though it
was right before, and *flips* as often as right follows on wrong or wrong on right.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:  # it takes 0.1 s, which is for nothing in most processes
    import numpy as np

CUT = 1
"""Flag of an answer that ended at the length limit."""
UNSCORED = 2
"""Flag of a question that was asked and has no score, or whose record was withheld."""
SHORTENED = 4
"""Flag of a prompt that was cut on the left to fit."""
NO_SCORE = 255
"""Byte of a question without a score."""
_HIGHEST = 254


@dataclass(frozen=True)
class Score:
    """A published value, with its 95 % interval where one is known."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ViewedCheckpoint:
    """A checkpoint of one benchmark. `merge` says how it was made of others, `note` why it has no score.

    Those that a run has by one kind of merge are a run of their own, as in reports. `scores` are published values by
    metric, `samples` tells if its answers were kept.
    """

    run: str
    name: str
    step: int
    merge: str | None
    status: str
    note: str | None
    samples: bool
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class ViewedBenchmark:
    """A benchmark by one evaluator with one set of settings, and its checkpoints by run and step.

    `key` is made of letters, digits and `-`. `settings` are words for what tells it from others of its name, empty
    where there are none. `metrics` are those with published values, the first is to be shown first.
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
    """Everything that can be opened, from records alone. `searches` tells if `search.json` is there."""

    title: str
    searches: bool
    benchmarks: Sequence[ViewedBenchmark]


@dataclass(frozen=True)
class Scale:
    """A metric of single questions: its bytes go from `low` to `high`; `smooth` ones come along with others."""

    name: str
    higher_is_better: bool | None
    low: float
    high: float
    smooth: bool = False


@dataclass(frozen=True)
class Questions:
    """Questions of a benchmark by name; `part` numbers the benchmark of a group that each is of, by `parts`.

    `part` is empty where there is one. `clusters` are names of shared passages, empty where no question has one.
    `unreadable` says why the samples of a checkpoint could not be read, by its number. `unread` are the numbers of
    checkpoints whose samples are still to be read.
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
    """An answer of one checkpoint. `scores` are on the metric's own scale; `finish` is the reason for its end.

    `prompt` and `context` are given where they are other ones than the question's, as are `target` and `choices`.
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
    """A question as it was asked: `context` and then `prompt`. `answers` has a list for each checkpoint.

    A list is empty where the question was not asked, and holds several answers where it was asked repeatedly.
    """

    context: str
    prompt: str
    target: str | None
    choices: Sequence[str]
    answers: Sequence[Sequence[Answer]]


@dataclass(frozen=True)
class Part:
    """Questions in a row, the first of which has the number `first`."""

    first: int
    questions: Sequence[ViewedQuestion]


@dataclass(frozen=True)
class Pair:
    """The second of two checkpoints against the first: questions by what became of them, and if that is chance.

    `values`, `difference`, its 95 % interval and `p` are those of `assay compare` before it adjusts for the number of
    metrics, `test` is the test behind them. `exact_p` is McNemar's exact p, where that is the test. `reason` says why
    there is no test. `changes` are those of engine, harness or data between both.
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
    """Numbers of the questions that hold a text: in context, prompt, target or choices, or in any answer.

    `complete` is false where there were too many to go on.
    """

    in_questions: Sequence[int]
    in_answers: Sequence[int]
    complete: bool


@dataclass(frozen=True)
class Progress:
    """Files with samples of a benchmark that are read, of how many."""

    read: int
    of: int


def as_json(value: Any) -> bytes:
    """A value of this form as it is sent, before it is packed."""
    return orjson.dumps(value)


def packed(content: bytes) -> bytes:
    """Content as it is sent, or put in a file; the same content always gives the same bytes."""
    return gzip.compress(content, compresslevel=1, mtime=0)


def as_bytes(scores: np.ndarray, scale: Scale) -> np.ndarray:
    """Scores as bytes; those that are no number have none."""
    import numpy as np

    span = scale.high - scale.low
    shares = np.clip((scores - scale.low) / span, 0.0, 1.0) if span > 0 else np.where(np.isnan(scores), np.nan, 0.0)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(shares), NO_SCORE, np.rint(shares * _HIGHEST)).astype(np.uint8)


def is_right(scores: np.ndarray, scale: Scale) -> np.ndarray:
    """Tells of bytes which are on the better half of a scale; those without a score are not."""
    if scale.higher_is_better is False:
        return 2 * scores.astype(int) < _HIGHEST
    return (2 * scores.astype(int) >= _HIGHEST) & (scores != NO_SCORE)
