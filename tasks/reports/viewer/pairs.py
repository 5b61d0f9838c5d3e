"""Comparison of two checkpoints: questions by outcome, and the test of `assay compare`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tasks.records.builds import build_of
from tasks.records.record import FoundRecord, Metric
from tasks.records.scores import KeptSamples
from tasks.reports.viewer.board_columns import BoardColumns
from tasks.reports.viewer.columns import NO_SCORE, Pair, Scale, is_right
from tasks.verdicts.statistics.composition import compare_compositions, composition_of
from tasks.verdicts.statistics.paired import mcnemar_p

if TYPE_CHECKING:
    import numpy as np

SamplesOf = Callable[[int], KeptSamples | None]
"""Returns the samples of a checkpoint."""


def pair_of(columns: BoardColumns, metric: int, first: int, second: int, *, samples_of: SamplesOf) -> Pair:
    """Compares the second of two checkpoints with the first in a metric; all are given by index."""
    scale = columns.scales[metric]
    before, after = (columns.scores_at(number, metric) for number in (first, second))
    won, lost, both, neither = _sorted(before, after, scale)
    entries = [columns.board.records[number] for number in (first, second)]
    benchmark = columns.board.shown.benchmark
    builds = [build_of(entry.record, benchmark) for entry in entries]
    counted = Pair(won, lost, both, neither, changes=builds[0].changes(builds[1]))
    compositions = []
    for entry, number in zip(entries, (first, second), strict=True):
        published = _published(entry, benchmark, scale.name)
        samples = samples_of(number)
        if published is None or samples is None:
            return replace(counted, reason="it has no published value" if samples else "its samples cannot be read")
        composition = composition_of(published, samples.questions, entry.record.metrics)
        if isinstance(composition, str):
            return replace(counted, reason=composition)
        compositions.append(composition)
    paired = compare_compositions(*compositions)
    if isinstance(paired, str):
        return replace(counted, reason=paired)
    finding = paired.finding
    return replace(
        counted,
        values=paired.values,
        difference=finding.difference,
        low=finding.low,
        high=finding.high,
        p=finding.p,
        exact_p=mcnemar_p(len(won), len(lost)).exact if finding.test == "McNemar, mid-p" else None,
        test=finding.test,
    )


def _sorted(before: np.ndarray, after: np.ndarray, scale: Scale) -> list[list[int]]:
    import numpy as np

    common = (before != NO_SCORE) & (after != NO_SCORE)
    more = (after.astype(int) - before) * (-1 if scale.higher_is_better is False else 1)
    right = is_right(after, scale)
    kinds = (more > 0, more < 0, (more == 0) & right, (more == 0) & ~right)
    return [np.flatnonzero(common & kind).tolist() for kind in kinds]


def _published(entry: FoundRecord, benchmark: str, name: str) -> Metric | None:
    return next((m for m in entry.record.metrics if (m.benchmark, m.name) == (benchmark, name)), None)
