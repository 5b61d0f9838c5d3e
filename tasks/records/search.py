"""Search of records: by patterns, and by the name or path of a checkpoint."""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import get_args

from pools.weights.merges import Merge, as_named, merge_of
from resources.errors import BadInput, RecordStatus
from resources.storage import storage
from resources.storage.hub import in_hub
from tasks.records.current import current_records, told_apart
from tasks.records.details import CheckpointReference
from tasks.records.record import RECORD_NAME, FoundRecord, Record, find_records, record_or_reason
from tasks.spec.evaluators import evaluator_title, evaluator_titles
from tasks.spec.labels import folder_of
from tasks.spec.names import how_many, name_of_source, step_of

_SHOWN_NAMES = 8
_ELSEWHERE = re.compile(r"(.+?):(?!//)((?:mean|ema|wsm|interpolate)\(.*\))|(.+):(?!//)([^/:]+)")


@dataclass(frozen=True)
class RecordFilter:
    """A filter for records and their metrics; empty fields match everything.

    Runs, benchmarks, metrics and tags are shell patterns (`mmlu*`), combined by OR. `latest` keeps only the newest
    record of each checkpoint, evaluator and set of benchmarks.
    """

    runs: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    evaluators: tuple[str, ...] = ()
    benchmarks: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    latest: bool = True

    def check(self) -> None:
        """Raises `BadInput` for evaluators and statuses that do not exist."""
        titles = evaluator_titles()
        _check("evaluator", self.evaluators, [*titles, *map(str.lower, titles.values())])
        _check("status", self.statuses, get_args(RecordStatus))

    def select(self, records: Sequence[Record]) -> list[Record]:
        """Returns the matching records in the given order.

        Tags select an evaluation, so they apply before the newest record is taken; statuses are outcomes, so they apply
        after.
        """
        meant = [record for record in records if self._means(record)]
        if self.latest:
            newest = {id(record) for record in current_records(meant)}
            meant = [record for record in meant if id(record) in newest]
        return [record for record in meant if not self.statuses or record.status in self.statuses]

    def takes(self, benchmark: str, metric: str, *, smooth: bool = False) -> bool:
        """Returns True if a metric (empty without scores) matches; smooth scores match only patterns of metrics."""
        return _matches(benchmark, self.benchmarks) and (_matches(metric, self.metrics) if self.metrics else not smooth)

    def _means(self, record: Record) -> bool:
        step = record.checkpoint.step if record.checkpoint.label is None else math.nan  # neither above nor below
        names = {record.evaluator, evaluator_title(record.evaluator).lower()}
        return (
            _matches(record.checkpoint.run, self.runs)
            and (self.first_step is None or step >= self.first_step)
            and (self.last_step is None or step <= self.last_step)
            and (not self.evaluators or not names.isdisjoint(map(str.lower, self.evaluators)))
            and (not self.tags or any(_matches(tag, self.tags) for tag in record.tags))
            and (
                any(self.takes(metric.benchmark, metric.name) for metric in record.metrics)
                or any(self.takes(benchmark, "") for benchmark in record.benchmarks)
            )
        )


def _check(field: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name.lower() not in known]
    if unknown:
        raise BadInput(
            expected=f"{field} to be one of {', '.join(known)}", found=", ".join(unknown), remedy=f"correct --{field}"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def found_below(evaluation_path: str, record: Record) -> FoundRecord:
    """Combines a record with the folder of its cell below an evaluation path."""
    checkpoint = record.checkpoint
    cell = storage.join(evaluation_path, checkpoint.run, checkpoint.folder, record.evaluator, record.cell)
    return FoundRecord(cell, record)


def records_of_checkpoints(
    texts: Sequence[str], *, evaluation_path: str, rejected: dict[str, str] | None = None
) -> list[list[FoundRecord]]:
    """Returns all records of the checkpoint that each text refers to; each folder is read once.

    A text is a `NAME` as in records (run-a-2000), `RUN@STEP`, `RUN@LABEL`, the name of a merged checkpoint
    (`mean(RUN@last:5)`), the folder or file of a record, or `PATH:NAME` for a checkpoint with records below another
    folder than `evaluation_path`. `rejected` receives the cells with a record that does not count, and why.
    """
    find = cache(partial(find_records, rejected=rejected))
    return [_of_checkpoint(text, evaluation_path=evaluation_path, find=find) for text in texts]


def _meant_by(name: str, checkpoints: Sequence[CheckpointReference]) -> list[CheckpointReference]:
    if (merge := merge_of(name)) is not None:
        inputs = _inputs(merge, checkpoints)
        return [checkpoint for checkpoint in checkpoints if _is_made_so(checkpoint, merge, inputs)]
    run, _, place = name.rpartition("@")
    step = step_of(f"step-{place}")
    named, location = (run, folder_of(step or 0, place if step is None else None)), as_named(name)
    return [
        each
        for each in checkpoints
        if each.name == name or each.uri == location or (not each.merge and (each.run, each.folder) == named)
    ]


def _inputs(merge: Merge, checkpoints: Iterable[CheckpointReference]) -> list[tuple[str, int]]:
    known: dict[str, set[int]] = defaultdict(set)
    for checkpoint in checkpoints:
        for runs, step in _made_of(checkpoint):
            for run in runs:
                known[run].add(step)
    inputs: list[tuple[str, int]] = []
    for source in merge.sources:
        run, _, step = name_of_source(source)
        inputs += [(run, step) for step in (source.taken(known[run]) if source.steps else [step])]
    return inputs


def _made_of(checkpoint: CheckpointReference) -> list[tuple[set[str], int]]:
    if checkpoint.merge is None:
        return [({checkpoint.run}, checkpoint.step)]
    own = checkpoint.merge.inputs[-1].run
    inputs = checkpoint.merge.inputs
    return [({each.run, checkpoint.run} if each.run == own else {each.run}, each.step) for each in inputs]


def _is_made_so(checkpoint: CheckpointReference, merge: Merge, inputs: Sequence[tuple[str, int]]) -> bool:
    made, of = checkpoint.merge, _made_of(checkpoint)
    return (
        made is not None
        and (made.kind, made.parameter, len(of)) == (merge.kind, merge.parameter, len(inputs))
        and all(run in runs and step == other for (run, step), (runs, other) in zip(inputs, of, strict=True))
    )


def _of_checkpoint(text: str, *, evaluation_path: str, find: Callable[[str], list[FoundRecord]]) -> list[FoundRecord]:
    cell = (storage.parent(text) if storage.basename(text) == RECORD_NAME else text) or "."
    record = record_or_reason(cell) if not in_hub(text) else None
    if isinstance(record, Record):
        return [FoundRecord(cell, record)]
    if record is not None:
        remedy = "move the folder back, or evaluate the cell again"
        raise BadInput(expected=f"the record of the cell {cell}", found=record, remedy=remedy)
    folder, name = evaluation_path, text
    if merge_of(text) is None and (elsewhere := _ELSEWHERE.fullmatch(text)):
        folder, name = filter(None, elsewhere.groups())
    entries = find(folder)
    meant = _meant_by(name, [entry.record.checkpoint for entry in entries])
    same = [entry for entry in entries if entry.record.checkpoint in meant]
    apart = told_apart([entry.record.checkpoint for entry in same])
    places = {apart(entry.record.checkpoint).run: entry.record.checkpoint.uri for entry in same}
    if len(places) > 1:
        raise BadInput(
            expected=f"a single checkpoint called {name} below {folder}",
            found=" and ".join(sorted(places.values())),
            remedy="name the folder of a record of the intended checkpoint",
        )
    if same:
        return same
    names = list(dict.fromkeys(entry.record.checkpoint.name for entry in entries))
    close = difflib.get_close_matches(name, names, n=_SHOWN_NAMES, cutoff=0.5) or names[:_SHOWN_NAMES]
    raise BadInput(
        expected=f"a checkpoint with records below {folder}, as NAME, RUN@STEP, RUN@LABEL, mean(RUN@STEPS), "
        "PATH:NAME or the folder of a record",
        found=f"{name}; there are records of {how_many(len(names), 'checkpoint')}: {', '.join(close) or 'none'}",
        remedy="name one of these, or say where its records lie: PATH:NAME",
    )
