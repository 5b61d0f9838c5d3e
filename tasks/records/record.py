"""Records: the published outcome of a cell, written last, and only then the cell is done.

A record lies at `<evaluation_path>/<run>/step-<N>/<evaluator>/<cell>/record.json`, the harness's own output beside it
in a folder per attempt. Cell folders are named after what was measured and on which weights, so a checkpoint that was
written again, or a changed evaluation, never meets an old record.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from resources.errors import RecordStatus, StorageError
from resources.storage import storage
from resources.storage.conditional_writes import read_version, replace_bytes
from tasks.spec.names import run_folder_of

RECORD_NAME = "record.json"
JOURNAL_FOLDER = "journal"
"""Folder in a cell's with a copy of its answers, while it has no record."""
SCOPE_NAME = "unfinished.json"
"""File in a cell's folder that stands there from the first attempt at an evaluation of it to the success."""
_READ_AT_ONCE = 16  # from an object store; each read waits for the network


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Metric(_Part):
    """One number of one benchmark."""

    benchmark: str
    """Name it is published under."""
    name: str
    """Metric as the harness calls it, such as acc or exact_match."""
    value: float
    """Its value, on the harness's own scale (accuracies from 0 to 1)."""
    stderr: float | None
    """Its standard error, where the harness gives one."""
    n: int
    """Questions it was taken over."""
    higher_is_better: bool | None = True
    """Direction of improvement; empty where it is unknown."""


class Counts(_Part):
    """Questions of a cell, counted in three places; a score is published only where they agree."""

    requested: int
    """Questions the evaluation asks."""
    answered: int
    """Questions to which every needed answer came back."""
    scored: int
    """Questions the harness scored."""
    skipped: int = 0
    """Questions left out because their prompts are too long; not among those requested."""
    truncated: int = 0
    """Questions whose prompts were cut on the left to fit."""
    judge_errors: int = 0
    """Answers without a usable verdict of the judge; tolerated ones are not among those requested."""


class CheckpointReference(_Part):
    """The model state that was measured."""

    uri: str
    """Its folder."""
    run: str
    """The training run that wrote it."""
    name: str
    """Its name in requests and reports, such as run-a-2000."""
    step: int
    """Training step."""
    digest: str
    """Over weights, config, tokenizer and chat template."""
    weights_digest: str
    """Over the weights alone."""
    listing: str | None = None
    """Over names, sizes, and checksums or times of its files, and of those that a native one refers to."""


class SinkState(_Part):
    """The state of a record at one sink."""

    status: Literal["published", "failed"]
    """published if the sink has it."""
    where: str | None = None
    """Its address there."""
    reason: str | None = None
    """The reason why the sink does not have it."""
    at: AwareDatetime
    """Time that was found out, UTC."""


class Record(_Part):
    """The outcome of one cell."""

    schema_version: Literal[1, 2] = 2
    """Version of this layout; 1 had no samples, links and sinks."""
    status: RecordStatus
    """The outcome."""
    reason: str | None
    """Reason of a failure; empty for a success."""
    cell: str
    """Name of the cell's folder."""
    checkpoint: CheckpointReference
    """The model state that was measured."""
    evaluator: str
    """The harness."""
    benchmarks: tuple[str, ...]
    """The benchmarks, as they are published."""
    metrics: tuple[Metric, ...]
    """The numbers; empty unless it succeeded."""
    counts: Counts | None
    """Requested, answered, scored; empty if it never came to them."""
    evaluation: dict[str, Any]
    """The whole configuration."""
    evaluation_hash: str
    """Over everything but the checkpoint that can change a score."""
    git_commit: str | None
    """Commit of the code that ran, where it lies in a repository."""
    git_dirty: bool | None
    """True if that code had uncommitted changes."""
    versions: dict[str, str]
    """Versions of Assay, Python, engine and harness."""
    hardware: dict[str, Any]
    """Device, replicas, machine."""
    served: dict[str, Any]
    """The way the checkpoint came into the engine, or the endpoint used."""
    seconds: dict[str, FiniteFloat]
    """Wall seconds by phase."""
    chip_seconds: FiniteFloat
    """Accelerators times seconds of this cell; 0 on CPU."""
    requests: dict[str, int]
    """Requests of this cell as the proxy counted them; empty for a foreign endpoint."""
    tags: tuple[str, ...] = ()
    """Free labels."""
    samples: int | None = None
    """Questions in `samples.jsonl.gz` of the attempt; empty if there is no such file."""
    links: dict[str, str] = {}
    """Pages the harness made, such as HELM's site, by title; relative to the record's folder."""
    sinks: dict[str, SinkState] = {}
    """The state of this record at each sink it is for."""
    infra_failures: int | None = Field(default=None, ge=0, lt=2**63)
    """Outcomes in a row that were `infra_failed`, this one included unless it was interrupted."""
    interrupted: bool = False
    """True if the run was told to end from outside: that is no failure."""
    attempt: str
    """Folder beside the record that holds the harness's own output."""
    created: AwareDatetime
    """Time it was written, UTC."""

    @property
    def succeeded(self) -> bool:
        """True if its numbers are published."""
        return self.status == "succeeded"


def now() -> datetime:
    """This moment, in UTC."""
    return datetime.now(UTC)


def record_uri(cell_uri: str) -> str:
    """The file of a cell's record."""
    return storage.join(cell_uri, RECORD_NAME)


def read_record(cell_uri: str) -> Record | None:
    """The record of a cell, or None if it has none or only something unreadable (which counts as not done)."""
    try:
        return parsed_record(storage.read_bytes(record_uri(cell_uri)))
    except FileNotFoundError:
        return None


def record_to_replace(cell_uri: str) -> Record | None:
    """The record of a cell that is to be evaluated, as `read_record` has it.

    Raises:
        StorageError: it is the success of a newer Assay, which must not be replaced.
    """
    try:
        return _replaceable(record_uri(cell_uri), storage.read_bytes(record_uri(cell_uri)))
    except FileNotFoundError:
        return None


def _replaceable(uri: str, content: bytes) -> Record | None:
    try:
        return Record.model_validate_json(content)
    except ValidationError as error:
        newer = {"extra_forbidden", "literal_error"} & {found["type"] for found in error.errors()}
    if newer and json.loads(content).get("status") == "succeeded":
        raise StorageError(
            expected=f"a record of version {Record.model_fields['schema_version'].default} or earlier at {uri}",
            found="the success of a newer Assay, with fields that this one does not know",
            remedy="evaluate with the newer Assay, or write to another evaluation_path",
        )
    return None


def parsed_record(content: bytes) -> Record | None:
    """The record that some bytes are, or None if they are none."""
    try:
        return Record.model_validate_json(content)
    except ValidationError:
        return None


def failures_in_a_row(recorded: int | None) -> int:
    """Failures in a row by an `infra_failed` record; those from before it was counted stand for one."""
    return 1 if recorded is None else recorded


def write_record(cell_uri: str, record: Record) -> Record:
    """Publishes the outcome of a cell; of two runs that finish the same cell, the first success stands.

    Returns:
        The record that stands: this one, or the success of another run that was there before.

    Raises:
        StorageError: it could not be written, nothing half-written stands; or a newer Assay's success stands there.
    """
    uri = record_uri(cell_uri)
    while True:
        standing = read_version(uri)
        before = _replaceable(uri, standing.content) if standing is not None else None
        if before is not None and before.succeeded:
            return before
        if record.status == "infra_failed":
            earlier = failures_in_a_row(before.infra_failures) if before and before.status == "infra_failed" else 0
            record = record.model_copy(update={"infra_failures": earlier + (0 if record.interrupted else 1)})
        content = record.model_dump_json(indent=2).encode()
        if storage.create_bytes(uri, content) if standing is None else replace_bytes(uri, content, standing=standing):
            return record


def note_sinks(cell_uri: str, states: dict[str, SinkState]) -> Record | None:
    """Says in a cell's record what became of it at some sinks; the record, or None if there is none.

    Raises:
        StorageError: it could not be written; the record stands as it was.
    """
    uri = record_uri(cell_uri)
    while True:
        standing = read_version(uri)
        record = parsed_record(standing.content) if standing is not None else None
        if standing is None or record is None or not states:
            return record
        noted = record.model_copy(update={"sinks": {**record.sinks, **states}})
        if replace_bytes(uri, noted.model_dump_json(indent=2).encode(), standing=standing):
            return noted


def begin_scope(cell_uri: str) -> str:
    """Name of the present evaluation of a cell, the same for every attempt until one succeeds.

    Answers of an unfinished evaluation are used again when it goes on, also on another machine. One that was finished,
    and is to be done again because its record was deleted, gets a new name, so that sampled answers are new too.

    Raises:
        StorageError: the cell's folder cannot be written.
    """
    uri = storage.join(cell_uri, SCOPE_NAME)
    name = f"{storage.basename(cell_uri)[-40:].lstrip('._+=@-')}-{secrets.token_hex(6)}"
    if storage.create_bytes(uri, json.dumps({"scope": name}).encode()):
        return name
    try:
        return str(json.loads(storage.read_bytes(uri))["scope"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return name


def end_scope(cell_uri: str) -> None:
    """Ends the present evaluation of a cell, which has its record."""
    storage.delete(storage.join(cell_uri, SCOPE_NAME))


@dataclass(frozen=True)
class FoundRecord:
    """A record and the folder of its cell."""

    cell_uri: str
    record: Record


def find_records(evaluation_path: str) -> list[FoundRecord]:
    """Every readable record below a folder with where it lies, by run, step and time of writing; each is read once.

    Raises:
        StorageError: the folder cannot be listed.
    """
    cells = [
        storage.parent(file.uri)
        for file in storage.list_files(evaluation_path)
        if storage.basename(file.uri) == RECORD_NAME and file.regular
    ]
    if storage.is_local(evaluation_path):
        read: Iterable[Record | None] = map(read_record, cells)
    else:
        with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
            read = list(threads.map(read_record, cells))
    found = [FoundRecord(cell, record) for cell, record in zip(cells, read, strict=True) if record is not None]
    return sorted(
        found, key=lambda item: (item.record.checkpoint.run, item.record.checkpoint.step, item.record.created)
    )


def read_records(evaluation_path: str) -> list[Record]:
    """Every readable record below a folder, in the order of `find_records`."""
    return [found.record for found in find_records(evaluation_path)]


def current_records(records: list[Record]) -> list[Record]:
    """Of several records for the same checkpoint and benchmarks, the newest; a quick look never hides a full one.

    A quick look is an evaluation that was limited to some questions (`max_eval_instances`). A checkpoint that was
    rewritten in its place is the same one, another of its name elsewhere is not.
    """
    apart = told_apart([record.checkpoint for record in records])
    newest: dict[tuple[str, str, tuple[str, ...]], Record] = {}
    for record in sorted(records, key=lambda record: (_is_full(record), record.created)):
        newest[(apart(record.checkpoint).name, record.evaluator, record.benchmarks)] = record
    return sorted(newest.values(), key=lambda record: (apart(record.checkpoint).run, record.checkpoint.step))


def told_apart(checkpoints: Iterable[CheckpointReference]) -> Callable[[CheckpointReference], CheckpointReference]:
    """Names for reports: those of records, with the end of its place behind a run's name that stands for several runs.

    Runs of one name are several if they have a checkpoint of one name in different folders, which are nowhere the same.
    Checkpoints of one name in one run, such as step-1 and checkpoint-1, have their folders behind their names.
    """
    checkpoints = list(checkpoints)
    by_run: dict[str, dict[str, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for checkpoint in checkpoints:
        by_run[checkpoint.run][run_folder_of(checkpoint.uri)].add((checkpoint.name, checkpoint.digest))
    labels = {
        (run, folder): label
        for run, states in by_run.items()
        if len(states) > 1
        for folder, label in _labels(run, states).items()
    }

    twins: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for checkpoint in checkpoints:
        places = twins[run_folder_of(checkpoint.uri), checkpoint.name]
        places[storage.basename(checkpoint.uri)].add(checkpoint.digest)

    def named(checkpoint: CheckpointReference) -> CheckpointReference:
        held = twins[run_folder_of(checkpoint.uri), checkpoint.name].values()
        if sum(map(len, held)) == len(set().union(*held)) and len(held) > 1:
            name = f"{checkpoint.name} ({storage.basename(checkpoint.uri)})"
            checkpoint = checkpoint.model_copy(update={"name": name})
        label = labels and labels.get((checkpoint.run, run_folder_of(checkpoint.uri)))
        if not label:
            return checkpoint
        name = f"{label}{checkpoint.name.removeprefix(checkpoint.run)}"
        return checkpoint.model_copy(update={"run": label, "name": name})

    return named


def _labels(run: str, states: dict[str, set[tuple[str, str]]]) -> dict[str, str]:
    """A name for each folder, if they hold several runs; `states` are names and digests of the checkpoints in each."""
    groups: list[tuple[list[str], set[tuple[str, str]]]] = []
    for folder, held in sorted(states.items()):
        same = [group for group in groups if group[1] & held]
        groups = [group for group in groups if not group[1] & held]
        groups.append(([*(name for names, _ in same for name in names), folder], held.union(*(h for _, h in same))))
    names = Counter(name for _, held in groups for name in {name for name, _ in held})
    if max(names.values()) == 1:
        return {}
    parts = [folders[0].split("/") for folders, _ in groups]
    longest = max(map(len, parts))
    length = next((n for n in range(2, longest) if len({tuple(part[-n:]) for part in parts}) == len(parts)), longest)
    return {
        folder: f"{run} ({'/'.join(part[-length:])})"
        for part, (folders, _) in zip(parts, groups, strict=True)
        for folder in folders
    }


def _is_full(record: Record) -> bool:
    return record.evaluation.get("max_eval_instances") is None
