"""Records: the published outcome of a cell, written last, and only then the cell is done.

A record lies at `<evaluation_path>/<run>/step-<N>/<evaluator>/<cell>/record.json`, the harness's own output beside it
in a folder per attempt. Cell folders are named after what was measured and on which weights, so a checkpoint that was
written again, or a changed evaluation, never meets an old record.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import AwareDatetime, Field, FiniteFloat, ValidationError, model_validator

from resources.errors import IrregularFile, RecordStatus, StorageError
from resources.storage import storage
from resources.storage.conditional_writes import read_version, replace_bytes
from tasks.records.cost import Cost, Spent, spent_on
from tasks.records.details import (
    Asking,
    BenchmarkDetails,
    CheckpointReference,
    Counts,
    Described,
    InnerPath,
    Part,
    PathPart,
    Whole,
    bounded,
    misplaced,
    together,
)
from tasks.records.seals import Digests, sealed

RECORD_NAME = "record.json"
JOURNAL_FOLDER = "journal"
"""Folder in a cell's with a copy of its answers, while it has no record."""
SCOPE_NAME = "unfinished.json"
"""File in a cell's folder that stands there from the first attempt at an evaluation of it to the success."""
ENDPOINT_NAME = "endpoint.json"
"""File beside it with weights of fixed texts, by which the model at an endpoint of others is known."""
QUALIFICATIONS_FOLDER = "qualifications"
"""Folder below an evaluation path with verdicts on changes of builds, and with what was asked for them."""
_MOST_LEVELS = 8  # of groups in groups; those of lm-eval have three
_READ_AT_ONCE = 16  # from an object store; each read waits for the network


class Metric(Part):
    """One number of one benchmark."""

    benchmark: str
    """Name it is published under."""
    name: str
    """Metric as the harness calls it, such as acc or exact_match."""
    value: float
    """Its value, on the harness's own scale (accuracies from 0 to 1)."""
    stderr: float | None
    """Its standard error, where the harness gives one."""
    n: Whole
    """Questions it was taken over."""
    low: float | None = None
    """Lower end of its 95 % interval, over clusters of questions where they have some; empty where none is known."""
    high: float | None = None
    """Upper end of its 95 % interval."""
    parts: dict[str, float] = {}
    """Weights of the benchmarks whose values it is the mean of, together 1; empty where it is no group's."""
    higher_is_better: bool | None = True
    """Direction of improvement; empty where it is unknown."""
    smooth: bool = False
    """True for a score that comes along with those of a multiple-choice benchmark: its `bpb` or `choice_prob_norm`."""
    recomputed: bool = False
    """True if samples, or a group's parts, gave this value when it was published, so that they must ever after."""


class SinkState(Part):
    """The state of a record at one sink."""

    status: Literal["published", "failed"]
    """published if the sink has it."""
    where: str | None = None
    """Its address there."""
    reason: str | None = None
    """The reason why the sink does not have it."""
    at: AwareDatetime
    """Time that was found out, UTC."""


class Record(Part):
    """The outcome of one cell."""

    schema_version: Literal[1, 2, 3, 4] = 4
    """Version of this layout; 1 had no samples, links and sinks, 2 no details, asking and digests, 3 no cost."""
    status: RecordStatus
    """The outcome."""
    reason: str | None
    """Reason of a failure; empty for a success."""
    cell: PathPart
    """Name of the cell's folder."""
    checkpoint: CheckpointReference
    """The model state that was measured."""
    evaluator: PathPart
    """The harness."""
    benchmarks: tuple[str, ...]
    """The benchmarks, as they are published."""
    metrics: tuple[Metric, ...]
    """The numbers; empty unless it succeeded."""
    counts: Counts | None
    """Requested, answered, scored; empty if it never came to them."""
    details: dict[str, BenchmarkDetails] = {}
    """Details of each benchmark that asks questions itself, by the name it is published under."""
    asking: Asking = Asking()
    """The way questions were put."""
    evaluation: Described
    """The whole configuration."""
    evaluation_hash: str
    """Over everything but the checkpoint that can change a score."""
    git_commit: str | None
    """Commit of the code that ran, where it lies in a repository."""
    git_dirty: bool | None
    """True if that code had uncommitted changes."""
    versions: dict[str, str]
    """Versions of Assay, Python, engine and harness."""
    hardware: Described
    """Device, replicas, machine."""
    served: Described
    """The way the checkpoint came into the engine, or the endpoint used."""
    seconds: dict[str, FiniteFloat]
    """Wall seconds by phase."""
    chip_seconds: FiniteFloat
    """Accelerators times seconds of this cell; 0 on CPU, and where somebody else's endpoint answers."""
    cost: Cost | None = None
    """Its price, and what was expected; empty in records from before there was one."""
    requests: dict[str, Whole]
    """Requests of this cell as the proxy counted them; empty for a foreign endpoint."""
    tags: tuple[str, ...] = ()
    """Free labels."""
    samples: Whole | None = None
    """Questions in `samples.jsonl.gz` of the attempt; empty if there is no such file."""
    links: dict[str, InnerPath] = {}
    """Pages the harness made, such as HELM's site, by title; relative to the record's folder."""
    sinks: dict[str, SinkState] = {}
    """The state of this record at each sink it is for."""
    digests: Digests = Digests()
    """Digests by which it shows if this record, or its samples, were changed after they were written."""
    infra_failures: int | None = Field(default=None, ge=0, lt=2**63)
    """Outcomes in a row that were `infra_failed`, this one included unless it was interrupted."""
    interrupted: bool = False
    """True if the run was told to end from outside: that is no failure."""
    flow_run: str | None = None
    """Name of the flow run that wrote it."""
    attempt: PathPart
    """Folder beside the record that holds the harness's own output."""
    created: AwareDatetime
    """Time it was written, UTC."""

    @model_validator(mode="after")
    def _is_bounded(self) -> Record:
        inner = {metric.benchmark for metric in self.metrics}
        for _ in range(_MOST_LEVELS):
            groups = [metric for metric in self.metrics if metric.benchmark in inner]
            inner = {part for metric in groups for part in metric.parts if part != metric.benchmark}
        if inner:
            raise ValueError("groups that are parts of each other, or nest too deep")
        return bounded(self)

    @property
    def succeeded(self) -> bool:
        """True if its numbers are published."""
        return self.status == "succeeded"

    @property
    def spent(self) -> Spent:
        """Cost of this attempt and of the recorded ones before it."""
        by_others = self.served.get("by") == "endpoint"
        return spent_on(self.cost, chip_seconds=self.chip_seconds, by_others=by_others)

    def noticed(self, benchmark: str) -> BenchmarkDetails | None:
        """Details of a benchmark, or of a group those of its parts together; None where nothing is known of it."""
        if benchmark in self.details:
            return self.details[benchmark]
        groups = [metric for metric in self.metrics if metric.benchmark == benchmark and metric.parts]
        if not groups:
            return None
        known = {part: self.noticed(part) for part in groups[0].parts if part != benchmark}
        return together([details for details in known.values() if details is not None])


def now() -> datetime:
    """This moment, in UTC."""
    return datetime.now(UTC)


def record_uri(cell_uri: str) -> str:
    """The file of a cell's record."""
    return storage.join(cell_uri, RECORD_NAME)


def read_record(cell_uri: str) -> Record | None:
    """The record of a cell, or None if it has none that counts: see `record_or_reason`."""
    found = record_or_reason(cell_uri)
    return found if isinstance(found, Record) else None


def record_or_reason(cell_uri: str) -> Record | str | None:
    """The record of a cell, or the reason that the file does not count; None without a file."""
    try:
        return _read_in(storage.read_bytes(record_uri(cell_uri)), cell_uri)
    except IrregularFile as error:
        return f"record.json cannot be read: {error.found}"
    except FileNotFoundError:
        return None


def _read_in(content: bytes, cell_uri: str) -> Record | str:
    try:
        record = Record.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        wrong = ".".join(map(str, first["loc"])) or "its content"
        return f"record.json cannot be read: it is damaged, or of a newer Assay ({wrong}: {first['msg']:.300})"
    return misplaced(record, cell_uri) or record


def record_to_replace(cell_uri: str) -> Record | None:
    """The record of a cell that is to be evaluated, as `read_record` has it."""
    try:
        return _replaceable(record_uri(cell_uri), storage.read_bytes(record_uri(cell_uri)))
    except FileNotFoundError:
        return None


def _replaceable(uri: str, content: bytes) -> Record | None:
    try:
        record = Record.model_validate_json(content)
        return None if misplaced(record, storage.parent(uri)) else record
    except ValidationError as error:
        newer = {"extra_forbidden", "literal_error"} & {found["type"] for found in error.errors()}
    if newer and json.loads(content).get("status") == "succeeded":
        raise StorageError(
            expected=f"a record of version {Record.model_fields['schema_version'].default} or earlier at {uri}",
            found="the success of a newer Assay, with fields that this one does not know",
            remedy="evaluate with the newer Assay, or write to another evaluation_path",
        )
    return None


def parsed_record(content: bytes, cell_uri: str) -> Record | None:
    """The record that some bytes in a cell's folder are, or None if they are none, or that of another cell."""
    found = _read_in(content, cell_uri)
    return found if isinstance(found, Record) else None


def failures_in_a_row(recorded: int | None) -> int:
    """Failures in a row by an `infra_failed` record; those from before it was counted stand for one."""
    return 1 if recorded is None else recorded


def write_record(cell_uri: str, record: Record) -> Record:
    """Publishes the outcome of a cell; of two runs that finish the same cell, the first success stands.

    Returns:
        The record that stands: this one, or the success of another run that was there before.
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
        record = sealed(_with_earlier_cost(record, before))
        content = record.model_dump_json(indent=2).encode()
        if storage.create_bytes(uri, content) if standing is None else replace_bytes(uri, content, standing=standing):
            return record


def _with_earlier_cost(record: Record, before: Record | None) -> Record:
    if record.cost is None or before is None or before.attempt == record.attempt:
        return record
    return record.model_copy(update={"cost": record.cost.model_copy(update={"earlier": before.spent})})


def note_sinks(cell_uri: str, states: dict[str, SinkState]) -> Record | None:
    """Says in a cell's record what became of it at some sinks; the record, or None if there is none."""
    uri = record_uri(cell_uri)
    while True:
        standing = read_version(uri)
        record = parsed_record(standing.content, cell_uri) if standing is not None else None
        if standing is None or record is None or not states:
            return record
        noted = record.model_copy(update={"sinks": {**record.sinks, **states}})
        if replace_bytes(uri, noted.model_dump_json(indent=2).encode(), standing=standing):
            return noted


def begin_scope(cell_uri: str) -> str:
    """Name of the present evaluation of a cell, the same for every attempt until one succeeds.

    Answers of an unfinished evaluation are used again when it goes on, also on another machine. One that was finished,
    and is to be done again because its record was deleted, gets a new name, so that sampled answers are new too.
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
    """Ends the present evaluation of a cell, which has its record, or whose answers are not to be used again."""
    for name in (SCOPE_NAME, ENDPOINT_NAME):
        storage.delete(storage.join(cell_uri, name))


def end_scope_and_answers(cell_uri: str) -> None:
    """Ends the present evaluation of a cell, and deletes what was kept of its answers beside its record."""
    end_scope(cell_uri)
    for file in storage.list_files(storage.join(cell_uri, JOURNAL_FOLDER)):
        storage.delete(file.uri)


def weighed_at_first(cell_uri: str, weighed: Sequence[float]) -> list[float]:
    """Weights of fixed texts at the first attempt of the present evaluation of a cell; these are kept if it is this."""
    uri = storage.join(cell_uri, ENDPOINT_NAME)
    if storage.create_bytes(uri, json.dumps(list(weighed)).encode()):
        return list(weighed)
    try:
        return [float(value) for value in json.loads(storage.read_bytes(uri))]
    except (FileNotFoundError, ValueError, TypeError):
        return []


@dataclass(frozen=True)
class FoundRecord:
    """A record and the folder of its cell."""

    cell_uri: str
    record: Record


def find_records(evaluation_path: str, *, rejected: dict[str, str] | None = None) -> list[FoundRecord]:
    """Every record below a folder with where it lies, by run, step and time of writing; each is read once.

    What was asked to qualify a change of builds is left out, unless the folder is that. Takes into `rejected` each cell
    whose record does not count, and why: it is damaged, of a newer Assay, or of another cell.
    """
    aside = f"{storage.join(evaluation_path, QUALIFICATIONS_FOLDER)}/"
    cells = [
        storage.parent(file.uri)
        for file in storage.list_files(evaluation_path)
        if storage.basename(file.uri) == RECORD_NAME and not file.uri.startswith(aside)
    ]
    if storage.is_local(evaluation_path):
        read: Iterable[Record | str | None] = map(record_or_reason, cells)
    else:
        with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
            read = list(threads.map(record_or_reason, cells))
    both = list(zip(cells, read, strict=True))
    found = [FoundRecord(cell, record) for cell, record in both if isinstance(record, Record)]
    if rejected is not None:
        rejected |= {cell: reason for cell, reason in both if isinstance(reason, str)}
    return sorted(
        found, key=lambda item: (item.record.checkpoint.run, item.record.checkpoint.step, item.record.created)
    )


def read_records(evaluation_path: str) -> list[Record]:
    """Every readable record below a folder, in the order of `find_records`."""
    return [found.record for found in find_records(evaluation_path)]
