"""Records: the published outcomes of cells. A cell is done once its record, the last file written, exists.

Records are stored at `<evaluation_path>/<run>/step-<N>/<evaluator>/<cell>/record.json`, next to a folder of harness
output for each attempt. The name of a cell's folder has a hash of evaluation and weights, so rewritten checkpoints and
changed evaluations get new folders. Their seal is a digest that reveals changes, and a signature if the team has a key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import AwareDatetime, Field, FiniteFloat, ValidationError, model_validator

from resources.errors import IrregularFile, RecordStatus, StorageError
from resources.settings import settings
from resources.storage import storage
from resources.storage.conditional_writes import read_version, replace_bytes
from tasks.records.cost import Cost, Spent, spent_on
from tasks.records.details import (
    Asking,
    BenchmarkDetails,
    Counts,
    Described,
    Digests,
    InnerPath,
    OfCell,
    Part,
    Whole,
    bounded,
    misplaced,
    together,
)

RECORD_NAME = "record.json"
JOURNAL_FOLDER = "journal"
"""Subfolder of a cell with a copy of its journaled answers, until the cell has its record."""
SCOPE_NAME = "unfinished.json"
"""File in a cell's folder, from the first attempt at its evaluation until the success."""
ENDPOINT_NAME = "endpoint.json"
"""File next to it with log-likelihoods of fixed texts, which identify the model at a foreign endpoint."""
QUALIFICATIONS_FOLDER = "qualifications"
"""Subfolder of an evaluation path with verdicts on changes of builds, and the cells evaluated for them."""
_MOST_LEVELS = 8  # of nested groups; lm-eval has at most 3
_READ_AT_ONCE = 16  # concurrent reads from an object store


class Metric(Part):
    """A score of a benchmark."""

    benchmark: str
    """Benchmark name, as published."""
    name: str
    """Name of the metric in the harness, such as acc or exact_match."""
    value: float
    """Value on the harness's own scale (accuracies from 0 to 1)."""
    stderr: float | None
    """Standard error, where the harness gives it."""
    n: Whole
    """Number of questions behind the value."""
    low: float | None = None
    """Lower end of the 95 % interval, over clusters of questions where they exist; empty without an interval."""
    high: float | None = None
    """Upper end of the 95 % interval."""
    parts: dict[str, float] = {}
    """For a group: weights of the averaged benchmarks, which sum to 1; otherwise empty."""
    higher_is_better: bool | None = True
    """Direction of improvement; empty where it is unknown."""
    smooth: bool = False
    """True for the smooth scores of a multiple-choice benchmark: its `bpb` or `choice_prob_norm`."""
    recomputed: bool = False
    """True if samples, or a group's parts, reproduced the value when published, so verification requires it."""


class SinkState(Part):
    """State of a record at a sink."""

    status: Literal["published", "failed"]
    """published if the sink has the record."""
    where: str | None = None
    """Address of the record at the sink."""
    reason: str | None = None
    """Reason why the sink does not have the record."""
    at: AwareDatetime
    """Time of this state, UTC."""


class Record(OfCell):
    """The outcome of a cell."""

    schema_version: Literal[4] = 4
    """Version of this layout."""
    status: RecordStatus
    """The outcome."""
    reason: str | None
    """Reason of a failure; empty for a success."""
    metrics: tuple[Metric, ...]
    """Scores; empty unless the cell succeeded."""
    counts: Counts | None
    """Numbers of requested, answered and scored questions; empty if the cell failed before they were counted."""
    details: dict[str, BenchmarkDetails] = {}
    """Details of each benchmark with questions of its own (not groups), by published name."""
    asking: Asking = Asking()
    """Construction of the requests, as far as the configuration does not define it."""
    evaluation: Described
    """The whole configuration."""
    git_commit: str | None
    """Commit of the code that ran; empty outside a repository."""
    git_dirty: bool | None
    """True if that code had uncommitted changes."""
    versions: dict[str, str]
    """Versions of Assay, Python, engine and harness."""
    hardware: Described
    """Device, replicas, machine."""
    served: Described
    """The load of the checkpoint into the engine, or the endpoint used."""
    seconds: dict[str, FiniteFloat]
    """Wall seconds by phase."""
    chip_seconds: FiniteFloat
    """Accelerators times seconds of this cell; 0 on CPU and for a foreign endpoint."""
    cost: Cost = Cost()
    """Price and predicted cost."""
    requests: dict[str, Whole]
    """Requests of this cell as counted by the proxy; empty for a foreign endpoint."""
    tags: tuple[str, ...] = ()
    """Free labels."""
    samples: Whole | None = None
    """Questions in `samples.jsonl.gz` of the attempt; empty without that file."""
    links: dict[str, InnerPath] = {}
    """Pages made by the harness, such as HELM's site: title to path relative to the record's folder."""
    sinks: dict[str, SinkState] = {}
    """State of this record at each of its sinks."""
    digests: Digests = Digests()
    """Digests that show if this record, or its samples, were changed after they were written."""
    infra_failures: int | None = Field(default=None, ge=0, lt=2**63)
    """Consecutive `infra_failed` outcomes; counts this record unless it was interrupted."""
    interrupted: bool = False
    """True if the run was stopped from outside, which does not count as a failure."""

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
        return self.status == "succeeded"

    @property
    def spent(self) -> Spent:
        """Cost of this attempt and of the recorded attempts before it."""
        return spent_on(self.cost, chip_seconds=self.chip_seconds)

    def noticed(self, benchmark: str) -> BenchmarkDetails | None:
        """Returns the details of a benchmark, for a group the sum over its parts; None if there are none."""
        if benchmark in self.details:
            return self.details[benchmark]
        groups = [metric for metric in self.metrics if metric.benchmark == benchmark and metric.parts]
        if not groups:
            return None
        known = {part: self.noticed(part) for part in groups[0].parts if part != benchmark}
        return together([details for details in known.values() if details is not None])


def now() -> datetime:
    """Returns the current time in UTC."""
    return datetime.now(UTC)


def record_uri(cell_uri: str) -> str:
    """Returns the URI of a cell's record."""
    return storage.join(cell_uri, RECORD_NAME)


def read_record(cell_uri: str) -> Record | None:
    """Returns the record of a cell, or None if there is none that counts: see `record_or_reason`."""
    record = record_or_reason(cell_uri)
    return record if isinstance(record, Record) else None


def record_or_reason(cell_uri: str) -> Record | str | None:
    """Returns the record of a cell, the reason why its file does not count, or None without a file."""
    try:
        return _read_in(storage.read_bytes(record_uri(cell_uri)), cell_uri)
    except IrregularFile as error:
        return f"record.json cannot be read: {error.found}"
    except FileNotFoundError:
        return None


def records_or_reasons(cells: Sequence[str]) -> Iterator[Record | str | None]:
    """Yields `record_or_reason` of each of some cells; reads several at once from an object store."""
    if not cells or storage.is_local(cells[0]):
        yield from map(record_or_reason, cells)
        return
    with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
        yield from threads.map(record_or_reason, cells)


def _read_in(content: bytes, cell_uri: str) -> Record | str:
    try:
        record = Record.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        wrong = ".".join(map(str, first["loc"])) or "its content"
        return f"record.json cannot be read: it is damaged, or of a newer Assay ({wrong}: {first['msg']:.300})"
    return misplaced(record, cell_uri) or record


def record_to_replace(cell_uri: str) -> Record | None:
    """Returns the record that a new evaluation of the cell would replace, or None if there is none that counts.

    Raises `StorageError` if it is a success written by a newer Assay, with unknown fields.
    """
    try:
        return _replaceable(record_uri(cell_uri), storage.read_bytes(record_uri(cell_uri)))
    except FileNotFoundError:
        return None


def _replaceable(uri: str, content: bytes) -> Record | None:
    try:
        record = Record.model_validate_json(content)
        return None if misplaced(record, storage.parent(uri)) else record
    except ValidationError as error:
        newer = {"extra_forbidden", "literal_error"} & {problem["type"] for problem in error.errors()}
    if newer and json.loads(content).get("status") == "succeeded":
        raise StorageError(
            expected=f"a record of version {Record.model_fields['schema_version'].default} at {uri}",
            found="the success of a newer Assay, with unknown fields",
            remedy="evaluate with the newer Assay, or write to another evaluation_path",
        )
    return None


def write_record(cell_uri: str, record: Record) -> Record:
    """Publishes the outcome of a cell and returns it, unless the cell has a success already: then returns that."""
    uri = record_uri(cell_uri)
    while True:
        standing = read_version(uri)
        before = _replaceable(uri, standing.content) if standing is not None else None
        if before is not None and before.succeeded:
            return before
        if record.status == "infra_failed":
            earlier = (before.infra_failures or 0) if before and before.status == "infra_failed" else 0
            record = record.model_copy(update={"infra_failures": earlier + (0 if record.interrupted else 1)})
        if before is not None and before.attempt != record.attempt:
            cost = record.cost.model_copy(update={"earlier": before.spent})
            record = record.model_copy(update={"cost": cost})
        record = record.model_copy(update={"digests": seal(record)})
        content = record.model_dump_json(indent=2).encode()
        if storage.create_bytes(uri, content) if standing is None else replace_bytes(uri, content, standing=standing):
            return record


def note_sinks(cell_uri: str, states: dict[str, SinkState]) -> Record | None:
    """Updates the states of some sinks in a cell's record; returns the record, or None if there is none."""
    uri = record_uri(cell_uri)
    while True:
        standing = read_version(uri)
        record = _read_in(standing.content, cell_uri) if standing is not None else None
        if standing is None or not isinstance(record, Record):
            return None
        if not states:
            return record
        noted = record.model_copy(update={"sinks": {**record.sinks, **states}})
        if replace_bytes(uri, noted.model_dump_json(indent=2).encode(), standing=standing):
            return noted


def begin_scope(cell_uri: str) -> str:
    """Returns the name of a cell's current evaluation, which all attempts share until an attempt succeeds.

    The name is the key of journaled answers, so an unfinished evaluation reuses them, also on another machine. A
    finished evaluation that is repeated because its record was deleted gets a new name, hence new sampled answers.
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
    """Ends the current evaluation of a cell: it has its record, or its answers must not be reused."""
    for name in (SCOPE_NAME, ENDPOINT_NAME):
        storage.delete(storage.join(cell_uri, name))


def end_scope_and_answers(cell_uri: str) -> None:
    """Ends the current evaluation of a cell and deletes the copy of its answers."""
    end_scope(cell_uri)
    for file in storage.list_files(storage.join(cell_uri, JOURNAL_FOLDER)):
        storage.delete(file.uri)


def weighed_at_first(cell_uri: str, weighed: Sequence[float]) -> list[float]:
    """Returns the evaluation's first log-likelihoods of fixed texts; stores `weighed` if there are none yet."""
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
    """Returns all records below a folder, each read once, sorted by run, step and time of writing.

    Skips the `qualifications` subfolder. Adds to `rejected` each cell with a record that does not count, and why: it
    is damaged, written by a newer Assay, or belongs to another cell.
    """
    aside = f"{storage.join(evaluation_path, QUALIFICATIONS_FOLDER)}/"
    cells = [
        storage.parent(file.uri)
        for file in storage.list_files(evaluation_path)
        if storage.basename(file.uri) == RECORD_NAME and not file.uri.startswith(aside)
    ]
    both = list(zip(cells, records_or_reasons(cells), strict=True))
    entries = [FoundRecord(cell, record) for cell, record in both if isinstance(record, Record)]
    if rejected is not None:
        rejected |= {cell: reason for cell, reason in both if isinstance(reason, str)}
    return sorted(
        entries, key=lambda entry: (entry.record.checkpoint.run, entry.record.checkpoint.order, entry.record.created)
    )


def read_records(evaluation_path: str) -> list[Record]:
    """Returns all readable records below a folder, in the order of `find_records`."""
    return [entry.record for entry in find_records(evaluation_path)]


def seal(record: Record) -> Digests:
    """Returns the record's digests with a digest of its content and, if this machine has the key, a signature."""
    content = _content(record)
    digest = hashlib.sha256(content).hexdigest()
    return record.digests.model_copy(update={"record": digest, "signature": _signature(content)})


def broken_seal(record: Record) -> str | None:
    """Returns the evidence that a record was changed, formatted; None if there is none.

    If this machine has a key, a missing signature is evidence too.
    """
    content, kept = _content(record), record.digests
    signature = _signature(content)
    if kept.record is None:
        return "record.json has no digest, which records are written with"
    if kept.record != hashlib.sha256(content).hexdigest():
        return "record.json was changed after it was written: its digest is that of another content"
    if signature is None or (kept.signature and hmac.compare_digest(signature, kept.signature)):
        return None
    return "record.json " + (
        "was signed with another key, or changed" if kept.signature else "is not signed, and ASSAY_RECORDS_KEY is set"
    )


def integrity(record: Record) -> Literal["intact", "changed"]:
    """Returns the integrity of a record by its own digests."""
    return "changed" if broken_seal(record) else "intact"


def _content(record: Record) -> bytes:
    written = json.loads(record.model_dump_json(exclude={"sinks", "digests"}, exclude_defaults=True))
    written |= {"schema_version": record.schema_version, "samples_digest": record.digests.samples}
    return json.dumps(written, sort_keys=True, separators=(",", ":")).encode()


def _signature(content: bytes) -> str | None:
    key = settings().records_key
    return hmac.new(key.get_secret_value().encode(), content, hashlib.sha256).hexdigest() if key else None
