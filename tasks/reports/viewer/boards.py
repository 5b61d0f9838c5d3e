"""Boards: benchmarks with their evaluated checkpoints, and columns of the questions that all share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import orjson

from tasks.records.current import (
    current_records,
    how_merged,
    is_full,
    newest_of_each_hash,
    told_apart,
    words_of_settings,
)
from tasks.records.details import CheckpointReference
from tasks.records.record import FoundRecord, Metric, Record, broken_seal
from tasks.reports.viewer.columns import (
    NO_SCORE,
    UNSCORED,
    Answer,
    Found,
    Questions,
    Scale,
    Score,
    ViewedBenchmark,
    ViewedCheckpoint,
    ViewedQuestion,
    as_bytes,
)
from tasks.reports.viewer.kept import HeldColumn, KeptColumns, place_of
from tasks.reports.viewer.reading import BLOCK
from tasks.spec.evaluators import evaluator_title

if TYPE_CHECKING:
    import numpy as np

_NO_SAMPLES = "no samples were kept"
_HASH_CHARACTERS = 8


@dataclass(frozen=True)
class Board:
    """A benchmark as shown, with the record of each checkpoint, and its published metrics."""

    shown: ViewedBenchmark
    records: Sequence[FoundRecord]
    metrics: Mapping[str, Metric]

    @property
    def with_samples(self) -> list[int]:
        return [number for number, checkpoint in enumerate(self.shown.checkpoints) if checkpoint.samples]


def boards_of(entries: Sequence[FoundRecord]) -> list[Board]:
    """Returns a board per requested benchmark, evaluator and settings, with the current record of each checkpoint."""
    places = {id(entry.record): entry for entry in entries}
    apart = told_apart([entry.record.checkpoint for entry in entries])
    held: dict[tuple[str, str, str], dict[str, Record]] = {}
    current = current_records([entry.record for entry in entries])
    for record in sorted(current, key=lambda record: (record.succeeded, is_full(record), record.created)):
        for benchmark in record.benchmarks:
            same = held.setdefault((record.evaluator, benchmark, record.evaluation_hash), {})
            same[apart(record.checkpoint).name] = record
    settings = _settings(held)
    keys: set[str] = set()
    boards = []
    for (evaluator, benchmark, evaluation_hash), named in held.items():
        records = sorted(named.values(), key=lambda record: (apart(record.checkpoint).run, record.checkpoint.order))
        metrics = _metrics(records, benchmark)
        shown = ViewedBenchmark(
            key=_key(evaluator, benchmark, evaluation_hash, taken=keys),
            evaluator=evaluator_title(evaluator),
            benchmark=benchmark,
            settings=settings[evaluator, benchmark, evaluation_hash],
            evaluation_hash=evaluation_hash,
            metrics=list(metrics),
            checkpoints=[_checkpoint(record, apart(record.checkpoint), benchmark) for record in records],
        )
        keys.add(shown.key)
        boards.append(Board(shown, [places[id(record)] for record in records], metrics))
    return sorted(boards, key=lambda board: (board.shown.evaluator, board.shown.benchmark, board.shown.settings))


def boards_of_sample(record: Record, benchmark: str) -> list[str]:
    """Returns a record's benchmarks that show the questions of `benchmark`: itself, and the groups that contain it."""
    groups = {metric.benchmark: metric.parts for metric in record.metrics if metric.parts}

    def holds(group: str) -> bool:
        parts = groups.get(group, {})
        return benchmark in parts or any(holds(part) for part in parts if part != group)

    named = sorted(record.benchmarks, key=len, reverse=True)
    by_name = (name for name in named if benchmark.startswith((f"{name}_", f"{name}.")))
    shown = [name for name in named if name == benchmark or holds(name)] or list(islice(by_name, 1))
    measured = {metric.benchmark for metric in record.metrics}
    left = [name for name in named if name not in measured] or named
    return shown or (left if len(left) == 1 else [])  # ambiguous if several remain


def _settings(held: Mapping[tuple[str, str, str], Mapping[str, Record]]) -> dict[tuple[str, str, str], str]:
    same: dict[tuple[str, str], list[Record]] = {}
    for (evaluator, benchmark, _), named in held.items():
        same.setdefault((evaluator, benchmark), []).extend(named.values())
    return {
        (*name, evaluation_hash): words
        for name, records in same.items()
        for evaluation_hash, words in words_of_settings(newest_of_each_hash(records), name[1]).items()
    }


def _metrics(records: Sequence[Record], benchmark: str) -> dict[str, Metric]:
    metrics = {
        metric.name: metric for record in records for metric in record.metrics if metric.benchmark == benchmark
    }  # fmt: skip
    return dict(sorted(metrics.items(), key=lambda item: item[1].smooth))


def _key(evaluator: str, benchmark: str, evaluation_hash: str, *, taken: set[str]) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", f"{evaluator}-{benchmark}".lower()).strip("-")
    key = f"{plain}-{re.sub('[^a-z0-9]', '', evaluation_hash.lower())[:_HASH_CHARACTERS]}"
    number = 2
    while key in taken:
        key, number = f"{key.removesuffix(f'-{number - 1}')}-{number}", number + 1
    return key


def _checkpoint(record: Record, named: CheckpointReference, benchmark: str) -> ViewedCheckpoint:
    scores = {
        metric.name: Score(metric.value, metric.low, metric.high)
        for metric in record.metrics
        if metric.benchmark == benchmark and math.isfinite(metric.value)
    }
    samples = bool(record.samples)
    note = record.reason or broken_seal(record) or (None if samples else _NO_SAMPLES)
    return ViewedCheckpoint(
        run=named.run,
        name=named.name,
        step=named.step,
        label=named.label,
        merge=how_merged(record.checkpoint),
        status=record.status,
        note=note,
        samples=samples,
        scores=scores,
    )


_ABSENT = -1
_Texts = tuple[str, str, str | None, list[str]]


class BoardColumns:
    """Everything shown of a board, as far as its samples are read.

    Questions are in the order of the longest column, followed by questions missing in it; `_places` has the index of
    each question in each column. `read` and `unreadable` use the keys of `place_of`.
    """

    def __init__(self, board: Board, kept: KeptColumns, *, read: Container[str], unreadable: Mapping[str, str]) -> None:
        self.board = board
        self._kept = kept
        self._unreadable = unreadable
        places = [place_of(entry) for entry in board.records]
        self._unread = [number for number in board.with_samples if places[number] not in read]
        loaded = set(board.with_samples).difference(self._unread)
        self._columns: list[HeldColumn | None] = [
            kept.column(place, board.shown.benchmark) if number in loaded else None
            for number, place in enumerate(places)
        ]
        self._names, self._places = _aligned(self._columns, kept)

    @cached_property
    def questions(self) -> Questions:
        names = list(self._names)
        parts = list(dict.fromkeys(part for part, _ in names)) or [self.board.shown.benchmark]
        number_of = {part: number for number, part in enumerate(parts)}
        clusters = list(self._names.values())
        return Questions(
            ids=[name for _, name in names],
            parts=parts,
            part=[number_of[part] for part, _ in names] if len(parts) > 1 else [],
            clusters=clusters if any(clusters) else [],
            metrics=self.scales,
            questions_per_part=1,
            unreadable={
                str(number): self._unreadable[place]
                for number, place in enumerate(map(place_of, self.board.records))
                if place in self._unreadable
            },
            unread=self._unread,
        )

    @cached_property
    def scales(self) -> list[Scale]:
        """Metrics of single questions, published first; the scale is [0, 1], or the range of scores beyond that."""
        ends: dict[str, list[float]] = {}
        for column in filter(None, self._columns):
            for metric in column.metrics:
                ends.setdefault(metric.name, []).extend((metric.low, metric.high))
        published = self.board.metrics
        names = [*(name for name in published if name in ends), *(name for name in ends if name not in published)]
        return [_scale(name, ends[name], self.board) for name in names]

    def scores(self, metric: int) -> np.ndarray:
        """Returns the bytes of a metric, checkpoints × questions."""
        import numpy as np

        return np.stack([self.scores_at(checkpoint, metric) for checkpoint in range(len(self._columns))])

    def scores_at(self, checkpoint: int, metric: int) -> np.ndarray:
        """Returns the bytes of a metric at a checkpoint, by question."""
        import numpy as np

        scale, column = self.scales[metric], self._columns[checkpoint]
        own = next((n for n, m in enumerate(column.metrics) if m.name == scale.name), None) if column else None
        if column is None or own is None:
            return np.full(len(self._names), NO_SCORE, dtype=np.uint8)
        values = np.frombuffer(self._kept.scores(column, own), dtype=np.float32)
        return self._spread(checkpoint, as_bytes(values, scale), absent=NO_SCORE)

    def flags(self) -> np.ndarray:
        """Returns the flags, checkpoints × questions; 0 for questions missing at a checkpoint."""
        import numpy as np

        all_flags = np.zeros((len(self._columns), len(self._names)), dtype=np.uint8)
        for number, column in enumerate(self._columns):
            if column is not None:
                withheld = UNSCORED if self.board.shown.checkpoints[number].status == "withheld" else 0
                flags = np.frombuffer(column.flags, dtype=np.uint8) | withheld
                all_flags[number] = self._spread(number, flags, absent=0)
        return all_flags

    def question(self, number: int) -> ViewedQuestion:
        asked: _Texts | None = None
        answers: list[list[Answer]] = []
        for checkpoint, column in enumerate(self._columns):
            place = int(self._places[checkpoint][number])
            if column is None or place == _ABSENT:
                answers.append([])
                continue
            texts = self._texts(column, place)
            asked = asked or texts
            other: dict[str, Any] = {
                name: text
                for name, text, usual in zip(("context", "prompt", "target", "choices"), texts, asked, strict=True)
                if text != usual
            }
            line = self._kept.answers(column, place // BLOCK).split(b"\n")[place % BLOCK]
            answers.append([Answer(**answer, **other) for answer in orjson.loads(line)])
        context, prompt, target, choices = asked or ("", "", None, [])
        return ViewedQuestion(context, prompt, target, choices, answers)

    def search(self, text: str, *, is_over: Callable[[], bool]) -> Found:
        """Searches prompts and answers for a text, ignoring case, until `is_over` returns True."""
        folded = text.casefold()
        escaped = orjson.dumps(folded)[1:-1].decode()
        in_questions: set[int] = set()
        in_answers: set[int] = set()
        seen: set[tuple[int, bytes]] = set()
        for checkpoint, column in enumerate(self._columns):
            if column is None:
                continue
            numbers = self._numbers(checkpoint, column)
            for block, digest in enumerate(column.texts):
                if is_over():
                    return Found(sorted(in_questions), sorted(in_answers), complete=False)
                if (numbers[block * BLOCK], digest) not in seen:
                    seen.add((numbers[block * BLOCK], digest))
                    for row, (context, prompt, target, choices) in _rows_with(self._kept.texts(digest), escaped):
                        if any(folded in part.casefold() for part in (context, prompt, target or "", *choices)):
                            in_questions.add(numbers[block * BLOCK + row])
                for row, answers in _rows_with(self._kept.answers(column, block), escaped):
                    if any(folded in answer["output"].casefold() for answer in answers):
                        in_answers.add(numbers[block * BLOCK + row])
        return Found(sorted(in_questions), sorted(in_answers), complete=True)

    def _spread(self, checkpoint: int, values: np.ndarray, *, absent: int) -> np.ndarray:
        import numpy as np

        return np.append(values, np.uint8(absent))[self._places[checkpoint]]  # the last, at `_ABSENT`

    def _numbers(self, checkpoint: int, column: HeldColumn) -> Sequence[int]:
        import numpy as np

        places = self._places[checkpoint]
        numbers = np.empty(column.size, dtype=np.int64)
        present = np.flatnonzero(places != _ABSENT)
        numbers[places[present]] = present
        return numbers.tolist()

    def _texts(self, column: HeldColumn, place: int) -> _Texts:
        line = self._kept.texts(column.texts[place // BLOCK]).split(b"\n")[place % BLOCK]
        return orjson.loads(line)


def _aligned(
    columns: Sequence[HeldColumn | None], kept: KeptColumns
) -> tuple[dict[tuple[str, str], str | None], list[np.ndarray]]:
    import numpy as np

    loaded = [column for column in columns if column is not None]
    fullest = [max(loaded, key=lambda column: column.size)] if loaded else []
    questions = dict.fromkeys(column.questions for column in (*fullest, *loaded))
    read = {digest: orjson.loads(kept.texts(digest)) for digest in questions}  # benchmark, id and cluster of each
    clusters: dict[tuple[str, str], str | None] = {}
    for part, name, cluster in chain.from_iterable(read.values()):
        clusters.setdefault((part, name), cluster)
    numbers = {name: number for number, name in enumerate(clusters)}
    nowhere = np.full(len(numbers), _ABSENT, dtype=np.int32)
    places: dict[bytes, np.ndarray] = {}
    for digest, named in read.items():
        places[digest] = nowhere.copy()
        places[digest][[numbers[part, name] for part, name, _ in named]] = np.arange(len(named))
    return clusters, [places[column.questions] if column is not None else nowhere for column in columns]


def _scale(name: str, ends: Sequence[float], board: Board) -> Scale:
    published = board.metrics.get(name)
    low, high = min(ends), max(ends)
    if low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0
    if published is None:
        return Scale(name, None, low, high)
    return Scale(name, published.higher_is_better, low, high, published.smooth)


def _rows_with(block: bytes, escaped: str) -> list[tuple[int, Any]]:
    lines = block.decode()
    if escaped not in lines.casefold():
        return []
    return [(row, orjson.loads(line)) for row, line in enumerate(lines.split("\n")) if escaped in line.casefold()]
