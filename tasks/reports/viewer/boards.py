"""Boards: benchmarks with their evaluated checkpoints, from records alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from tasks.records.current import (
    current_records,
    how_merged,
    is_full,
    newest_of_each_hash,
    told_apart,
    words_of_settings,
)
from tasks.records.details import CheckpointReference
from tasks.records.record import FoundRecord, Metric, Record
from tasks.records.seals import broken_seal
from tasks.reports.viewer.columns import Score, ViewedBenchmark, ViewedCheckpoint
from tasks.spec.evaluators import evaluator_title

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
    for record in sorted(current_records([entry.record for entry in entries]), key=_counts):
        for benchmark in record.benchmarks:
            same = held.setdefault((record.evaluator, benchmark, record.evaluation_hash), {})
            same[apart(record.checkpoint).name] = record
    settings = _settings(held)
    keys: set[str] = set()
    boards = []
    for (evaluator, benchmark, evaluation_hash), named in held.items():
        records = sorted(named.values(), key=lambda record: (apart(record.checkpoint).run, record.checkpoint.step))
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


def _counts(record: Record) -> tuple[bool, bool, float]:
    return record.succeeded, is_full(record), record.created.timestamp()


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
        merge=how_merged(record.checkpoint),
        status=record.status,
        note=note,
        samples=samples,
        scores=scores,
    )
