"""A compact index of a run's records, kept beside them, so that planning reads one file and not a hundred thousand.

    <evaluation_path>/<run>/index/summary.json      what planning asks for
    <evaluation_path>/<run>/index/records.json      record by record, with its size and time, to see which are new
    <evaluation_path>/<run>/index/<number>.json     news: a record that was written since

Records stay the only truth. The index is compared with a listing of them, but no longer than a twentieth of the time:
one that took 3 s to compare is taken at its word for a minute, one that takes less than a second never is, and none for
more than five minutes. Lost or damaged, it is made anew; where it cannot be written, it is made each time.
"""

from __future__ import annotations

import errno
import hashlib
import marshal
import os
import secrets
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import Field, FiniteFloat, TypeAdapter

from resources.errors import IrregularFile, RecordStatus, StorageError
from resources.storage import storage
from resources.storage.regular_files import UnsafeFile, leads_out, open_within
from resources.storage.storage import FileInfo
from tasks.records.details import Whole
from tasks.records.record import RECORD_NAME, Record, failures_in_a_row, parsed_record
from tasks.records.usage import Costed, MonthSpent, Sums, Typical, Usage, Work, summed, usage_of
from tasks.spec.names import step_of

FOLDER = "index"  # in a run's
_SUMMARY = "summary.json"
_ROWS = "records.json"
_FORMAT = 5
_TRUSTED_PER_SECOND = 20.0
_WORTH_TRUSTING_SECONDS = 1.0
_TRUSTED_AT_MOST_SECONDS = 300.0  # a comparison may have read every record, and clocks are set while it lasts
_NEWS_KEPT_SECONDS = 3600.0  # longer than any reader takes between reading the index and writing it
_READ_AT_ONCE = 16
_REASON_CHARACTERS = 300
_NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_DAMAGED = (KeyError, TypeError, ValueError, IndexError, AttributeError)

Stamp = tuple[int, float, str | None]
"""Size, time and checksum of a record."""


class IndexedRecord(NamedTuple):
    """A record as planning needs it. `cell` is its folder relative to the run's; times in seconds since the epoch."""

    cell: str
    checkpoint: str
    evaluation_hash: str
    digest: str
    listing: str | None
    status: RecordStatus
    created: Annotated[float, Field(ge=-(2**35), lt=2**37)]  # times that `datetime` can hold
    seconds: FiniteFloat
    chip_seconds: FiniteFloat
    infra_failures: Whole
    reason: str | None
    usage: Usage

    @property
    def succeeded(self) -> bool:
        """True if its numbers are published."""
        return self.status == "succeeded"


_typed_done = TypeAdapter(list[tuple[str, str, str | None, tuple[int, ...], float]]).validate_python
_typed_rows = TypeAdapter(list[IndexedRecord]).validate_python
"""Rows from JSON, with everything of its type; raises `ValueError` where it is not."""


def row_of(cell: str, record: Record) -> IndexedRecord:
    """A record as the index has it."""
    failed = record.status == "infra_failed"
    return IndexedRecord(
        cell,
        record.checkpoint.name,
        record.evaluation_hash,
        record.checkpoint.digest,
        record.checkpoint.listing,
        record.status,
        record.created.timestamp(),
        round(sum(record.seconds.values()), 3),
        record.chip_seconds,
        failures_in_a_row(record.infra_failures) if failed else 0,
        " ".join(record.reason.split())[:_REASON_CHARACTERS] if record.reason else None,
        usage_of(record),
    )


def note_record(run_folder: str, cell_uri: str, record: Record) -> None:
    """Tells whoever plans next of a record that was just written; what fails here costs a later look."""
    row = row_of(cell_uri.removeprefix(f"{run_folder.rstrip('/')}/"), record)
    name = f"{int(record.created.timestamp())}-{secrets.token_hex(4)}.json"
    with suppress(StorageError):
        storage.write_bytes(storage.join(run_folder, FOLDER, name), orjson.dumps(row, default=tuple))


@dataclass(frozen=True)
class Evaluated:
    """One state of a checkpoint, and by the hashes of which evaluations it has succeeded records.

    `newest` is when the last of these was written, seconds since the epoch.
    """

    digest: str
    listing: str | None
    hashes: frozenset[str]
    newest: float = 0.0


@dataclass(frozen=True)
class RunRecords:
    """The records of a run: successes by checkpoint, everything else record by record.

    `typical` is what a success of each evaluation took, by its hash; `work` the same by benchmarks and engine; `spent`
    what all records cost, by policies and month, as it was when the index was last compared with them.
    """

    done: Mapping[str, Sequence[Evaluated]]
    others: Sequence[IndexedRecord]
    typical: Mapping[str, Typical]
    work: Sequence[Work] = ()
    spent: Sequence[MonthSpent] = ()

    def has(self, checkpoint: str, listing: str) -> bool:
        """Tells if a checkpoint has a success in the state that a listing shows."""
        return any(state.listing == listing for state in self.done.get(checkpoint, ()))


def indexed_records(run_folder: str, *, use_index: bool = True, now: Callable[[], float] = time.time) -> RunRecords:
    """Returns the records below `<evaluation_path>/<run>`, by a recent index or read one by one.

    `use_index=False` reads the records; `now` is a clock in seconds since the epoch.

    Raises:
        StorageError: the folder cannot be listed.
    """
    began = now()
    short, records = _read_summary(run_folder)
    if short is not None and use_index and _is_trusted(began - short["compared"], took=short["took"]):
        return _with_news(records, run_folder, since=short["compared"])
    if short is None and storage.is_local(run_folder) and not storage.exists(storage.join(run_folder, FOLDER, _ROWS)):
        rows, stamps = _read_anew(run_folder)
        signature, summary = _signature(stamps), _summary(rows)
    else:
        stamps = dict(record_stamps(run_folder))
        signature = _signature(stamps)
        unchanged = short is not None and short["stamps"] == signature
        summary = short if short is not None and unchanged else _summary(_updated_rows(run_folder, stamps))
    if stamps or short is not None:
        with suppress(StorageError):
            _write(run_folder, _SUMMARY, {**summary, "stamps": signature, "compared": began, "took": now() - began})
            for file in _news(run_folder, since=0.0):
                if file.modified < began - _NEWS_KEPT_SECONDS:
                    storage.delete(file.uri)
    return records if summary is short else _from_summary(summary)


def _signature(stamps: Mapping[str, Stamp]) -> str:
    return hashlib.blake2b(marshal.dumps(list(stamps.items()), 2), digest_size=16).hexdigest()


def _read_anew(run_folder: str) -> tuple[list[IndexedRecord], dict[str, Stamp]]:
    root = str(storage.local_path(run_folder).absolute())
    rows: list[IndexedRecord] = []
    stamps: dict[str, Stamp] = {}
    with storage.reported(run_folder, "read"):
        for cell in _local_cells(root):
            try:
                file = open_within(f"{cell}/{RECORD_NAME}")
            except OSError as error:
                if isinstance(error, UnsafeFile) or error.errno in _NO_FILE:
                    continue
                raise
            try:
                status = os.fstat(file)
                content = os.read(file, status.st_size + 1)
            finally:
                os.close(file)
            name = cell[len(root) + 1 :]
            stamps[name] = (status.st_size, status.st_mtime, None)
            row = _row_in(content, run_folder, name)
            rows += [row] if row is not None else []
    if rows:
        with suppress(StorageError):
            keep_rows(run_folder, rows, stamps)
    return rows, stamps


def _updated_rows(run_folder: str, stamps: Mapping[str, Stamp]) -> list[IndexedRecord]:
    content = _read(storage.join(run_folder, FOLDER, _ROWS)) or {"rows": [], "stamps": []}
    try:
        known = dict(zip((row[0] for row in content["rows"]), range(len(content["rows"])), strict=True))
        indexed = list(map(tuple, content["stamps"]))
        kept = [known[cell] for cell, stamp in stamps.items() if cell in known and indexed[known[cell]] == stamp]
        rows = _typed_rows([content["rows"][number] for number in kept])
    except _DAMAGED:
        known, rows = {}, []
    same = {row.cell for row in rows}
    rows += _rows(run_folder, [cell for cell in stamps if cell not in same])
    if len(same) != len(known) or len(same) != len(rows):
        with suppress(StorageError):
            keep_rows(run_folder, rows, stamps)
    return rows


def keep_rows(run_folder: str, rows: Sequence[IndexedRecord], stamps: Mapping[str, Stamp]) -> None:
    """Writes what is known record by record, each with the stamp of the record that it was read from.

    Raises:
        StorageError: the folder cannot be written.
    """
    full = {"rows": rows, "stamps": [stamps[row.cell] for row in rows]}
    _write(run_folder, _ROWS, full)


def indexed_cells(run_folder: str) -> set[str]:
    """Cells that had a record when the index was last compared with them, or since, relative to the run's folder."""
    cells: set[str] = set()
    with suppress(*_DAMAGED):
        cells |= {str(row[0]) for row in (_read(storage.join(run_folder, FOLDER, _ROWS)) or {})["rows"]}
    for file in _news(run_folder, since=0.0):
        with suppress(FileNotFoundError, StorageError, *_DAMAGED):
            cells.add(str(orjson.loads(storage.read_bytes(file.uri))[0]))
    return cells


def _is_trusted(age_seconds: float, *, took: float) -> bool:
    trusted_seconds = min(_TRUSTED_PER_SECOND * took, _TRUSTED_AT_MOST_SECONDS)
    return took > _WORTH_TRUSTING_SECONDS and 0 <= age_seconds < trusted_seconds


def _write(run_folder: str, name: str, content: dict[str, Any]) -> None:
    full = orjson.dumps({"format": _FORMAT, **content}, default=tuple)
    storage.write_bytes(storage.join(run_folder, FOLDER, name), full)


def _read(uri: str) -> dict[str, Any] | None:
    try:
        content = orjson.loads(storage.read_bytes(uri))
    except (FileNotFoundError, StorageError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == _FORMAT else None


def _read_summary(run_folder: str) -> tuple[dict[str, Any] | None, RunRecords]:
    content = _read(storage.join(run_folder, FOLDER, _SUMMARY))
    if content is not None:
        with suppress(*_DAMAGED):
            content |= {"compared": float(content["compared"]), "took": float(content["took"])}
            return {"stamps": None, **content}, _from_summary(content)
    return None, RunRecords({}, (), {})


def _summary(rows: Sequence[IndexedRecord]) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    done: dict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    newest: dict[tuple[str, str, str | None], float] = defaultdict(float)
    others, costed = [], []
    for row in rows:
        _, checkpoint, evaluation_hash, digest, listing, status, created, seconds, chip_seconds, *_, usage = row
        success = status == "succeeded"
        costed.append(Costed(evaluation_hash, success, created, seconds, chip_seconds, usage))
        if success:
            newest[checkpoint, digest, listing] = max(created, newest[checkpoint, digest, listing])
            done[checkpoint, digest, listing].append(numbers.setdefault(evaluation_hash, len(numbers)))
        else:
            others.append(row)
    return {
        "hashes": list(numbers),
        "done": [(*key, sorted(found), newest[key]) for key, found in done.items()],
        "others": others,
        **summed(costed),
    }


def _from_summary(content: Mapping[str, Any]) -> RunRecords:
    hashes = content["hashes"]
    sets: dict[tuple[int, ...], frozenset[str]] = {}  # few different ones: most checkpoints were asked the same
    done: dict[str, list[Evaluated]] = defaultdict(list)
    for checkpoint, digest, listing, key, newest in _typed_done(content["done"]):
        if key not in sets:
            sets[key] = frozenset(hashes[number] for number in key)
        done[checkpoint].append(Evaluated(digest, listing, sets[key], newest))
    return RunRecords(done, _typed_rows(content["others"]), *Sums.read(content))


def _with_news(records: RunRecords, run_folder: str, *, since: float) -> RunRecords:
    rows: dict[str, IndexedRecord] = {}
    for file in _news(run_folder, since=since):
        with suppress(FileNotFoundError, IrregularFile, ValueError):
            [row] = _typed_rows([orjson.loads(storage.read_bytes(file.uri))])
            if row.cell not in rows or row.created >= rows[row.cell].created:
                rows[row.cell] = row
    if not rows:
        return records
    done = {name: list(states) for name, states in records.done.items()}
    for row in rows.values():
        if row.succeeded:
            state = Evaluated(row.digest, row.listing, frozenset((row.evaluation_hash,)), row.created)
            done.setdefault(row.checkpoint, []).append(state)
    others = [row for row in records.others if row.cell not in rows]
    others += [row for row in rows.values() if not row.succeeded]
    return replace(records, done=done, others=others)


def _news(run_folder: str, *, since: float) -> list[FileInfo]:
    listed = storage.list_files(storage.join(run_folder, FOLDER))
    return [
        file
        for file in listed
        if file.regular
        and storage.basename(file.uri) not in (_SUMMARY, _ROWS)
        and (not file.modified or file.modified > since - 60.0)
    ]


def record_stamps(run_folder: str) -> Iterator[tuple[str, Stamp]]:
    """The stamp of each record by the folder of its cell relative to the run's; always in the same order."""
    if storage.is_local(run_folder):
        root = str(storage.local_path(run_folder).absolute())
        start = len(root) + 1
        for cell in _local_cells(root):
            record = f"{cell}/{RECORD_NAME}"
            try:
                status = os.lstat(record)  # a Path for each of 200,000 takes a second
                if stat.S_ISLNK(status.st_mode) and not leads_out(record, os.path.realpath(record)):
                    status = os.stat(record)  # noqa: PTH116
            except OSError as error:
                if error.errno in _NO_FILE:
                    continue
                raise
            if stat.S_ISREG(status.st_mode):
                yield cell[start:], (status.st_size, status.st_mtime, None)
        return
    objects = storage.bucket_objects(run_folder)
    if objects is not None:  # 200,000 of them, in half the time that their full descriptions take
        start = len(run_folder.rstrip("/").split("://", 1)[-1].partition("/")[2]) + 1
        for found in objects:
            if found["name"].endswith(f"/{RECORD_NAME}"):
                checksum = found.get("md5Hash") or found.get("crc32c") or found.get("updated")
                yield found["name"][start:].removesuffix(f"/{RECORD_NAME}"), (int(found["size"]), 0.0, checksum)
        return
    start = len(run_folder.rstrip("/")) + 1
    for file in storage.list_files(run_folder):
        if file.uri.endswith(f"/{RECORD_NAME}"):
            yield storage.parent(file.uri)[start:], (file.size, file.modified, file.checksum)


def _local_cells(root: str) -> Iterator[str]:
    for step in _subfolders(root):
        if step_of(step.rpartition("/")[2]) is not None:
            for evaluator in _subfolders(step):
                yield from _subfolders(evaluator)


def _subfolders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted([entry.path for entry in entries if entry.is_dir()])
    except (FileNotFoundError, NotADirectoryError):
        return []


def _rows(run_folder: str, cells: Sequence[str]) -> list[IndexedRecord]:
    folder = run_folder.rstrip("/")

    def read(cell: str) -> IndexedRecord | None:
        try:
            return _row_in(storage.read_bytes(f"{folder}/{cell}/{RECORD_NAME}"), folder, cell)
        except (FileNotFoundError, IrregularFile):
            return None

    if storage.is_local(run_folder):
        return [row for row in map(read, cells) if row is not None]
    with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
        return [row for row in threads.map(read, cells) if row is not None]


def _row_in(content: bytes, run_folder: str, cell: str) -> IndexedRecord | None:
    record = parsed_record(content, storage.join(run_folder, cell))
    return row_of(cell, record) if record is not None else None
