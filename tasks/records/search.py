"""Search of records: by patterns, by the name or path of a checkpoint, and under its former names.

Records under the names that earlier versions gave to checkpoints are found again by their digests. By the former rule a
checkpoint was `$RUN-$N` of `$RUN` only if its folder was `$RUN/step-$N`, `$RUN/hf/step-$N` or `$RUN/step-$N/hf`; any
other folder was a run of its own at step 0. The name of a cell's folder ends in a digest over checkpoint and settings,
so the former place of a cell follows from the path of its checkpoint.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import get_args

from pools.weights.merges import Merge, as_named, merge_of
from pools.weights.overrides import override_of
from resources.errors import BadInput, RecordStatus
from resources.storage import storage
from resources.storage.hub import in_hub
from tasks.records.current import current_records, told_apart
from tasks.records.details import CheckpointReference
from tasks.records.index import note_record
from tasks.records.record import (
    RECORD_NAME,
    FoundRecord,
    Record,
    broken_seal,
    find_records,
    read_record,
    record_or_reason,
    write_record,
)
from tasks.records.samples import SAMPLES_NAME
from tasks.spec.evaluators import EVALUATORS, evaluator_title
from tasks.spec.labels import folder_of
from tasks.spec.names import how_many, name_of, name_of_source, parts_of, step_of

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
        titles = [evaluator_title(name).lower() for name in EVALUATORS]
        _check("evaluator", self.evaluators, [*EVALUATORS, *titles])
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


_STEP = re.compile(r"(?:global_)?(?:step|checkpoint|iter)[-_]?([0-9]{1,18})")


def former_name_of(uri: str) -> tuple[str, int]:
    """Returns the run and the step that a checkpoint's path had by the former rule."""
    parts = parts_of(uri)
    if len(parts) > 1 and parts[-1] == "hf" and _STEP.fullmatch(parts[-2]):
        parts = parts[:-1]
    stepped = _STEP.fullmatch(parts[-1]) if parts else None
    parts = parts[:-1] if stepped else parts
    parts = parts[:-1] if parts[-1:] == ["hf"] else parts
    run = re.sub(r"[^A-Za-z0-9._+=@-]", "-", parts[-1] if parts else "").lstrip("._+=@-") or "model"
    return run, int(stepped[1]) if stepped else 0


def former_record(
    cell_uri: str, reference: CheckpointReference, model_path: str, *, is_folder: Callable[[str], bool]
) -> Record | None:
    """Returns the success of a cell under a former name of its checkpoint, copied with its samples to the cell's folder
    and renamed; None if there is none, or if it was changed since it was written.

    `model_path` is the path of the evaluation: the run was named after it, or after the checkpoint. `is_folder` tells
    if a folder exists; of many checkpoints it is asked about the same few.
    """
    new_kind = override_of(reference.uri) is not None or reference.uri.startswith("hf://")
    if new_kind or merge_of(reference.uri) is not None:
        return None
    run, step = former_name_of(reference.uri)
    cell = cell_uri.rstrip("/").split("/")[-2:]
    run_uri = storage.parent(storage.parent(storage.parent(cell_uri)))
    whole = name_of(model_path)[0]
    by_path = (run, former_name_of(model_path)[0]) if reference.run == whole else ()
    places = [(name, folder_of(step, None)) for name in (reference.run, *by_path)]
    if reference.run.startswith(f"{whole}-"):  # a series, which was the whole run before another lay next to it
        places += [(whole, reference.folder), (run, folder_of(step, None))]
    for name, folder in dict.fromkeys(places):
        outer = storage.join(storage.parent(run_uri), name, folder)
        place = storage.join(outer, *cell)
        if place == cell_uri or not is_folder(outer) or (record := read_record(place)) is None:
            continue
        if record.succeeded and record.checkpoint.digest == reference.digest and broken_seal(record) is None:
            with suppress(FileNotFoundError):  # its samples
                return _copied(record, place, cell_uri, reference, run_uri)
    return None


def _copied(record: Record, place: str, cell_uri: str, reference: CheckpointReference, run_uri: str) -> Record:
    if record.samples is not None:
        samples = (record.attempt, SAMPLES_NAME)
        content = storage.read_bytes(storage.join(place, *samples), within=place)
        storage.write_bytes(storage.join(cell_uri, *samples), content)
    renamed = write_record(cell_uri, record.model_copy(update={"checkpoint": reference, "sinks": {}, "links": {}}))
    note_record(run_uri, cell_uri, renamed)
    return renamed
