"""A compact index of a run's records, stored next to them, so that planning reads 1 file instead of 100,000.

    <evaluation_path>/<run>/index/summary.json      what planning needs
    <evaluation_path>/<run>/index/records.json      a row per record, with size and time, to detect changed records
    <evaluation_path>/<run>/index/<number>.json     news: a record written since the last comparison

Records stay the only source of truth. The index is compared with a listing of them, for at most 1/20 of the time: after
a comparison of 3 s the index is used without another for 1 minute, in any case for at most 5 minutes. If a comparison
takes at most 1 s, every use compares. A lost or damaged index is rebuilt; where it cannot be written, it is rebuilt
each time.
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
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter

from resources.errors import IrregularFile, StorageError
from resources.storage import storage
from resources.storage.regular_files import leads_out
from resources.storage.storage import FileInfo
from tasks.records.record import RECORD_NAME, Record, records_or_reasons
from tasks.records.usage import IndexedRecord, MonthSpent, Sums, Typical, Work, summed, usage_of
from tasks.spec.labels import place_in

FOLDER = "index"  # in a run's
_SUMMARY = "summary.json"
_ROWS = "records.json"
_FORMAT = 6
_TRUSTED_PER_SECOND = 20.0
_WORTH_TRUSTING_SECONDS = 1.0
_TRUSTED_AT_MOST_SECONDS = 300.0  # limits the error if the clock is set during a long comparison
_NEWS_KEPT_SECONDS = 3600.0  # longer than any reader needs from reading to writing the index
_REASON_CHARACTERS = 300
_NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_DAMAGED = (KeyError, TypeError, ValueError, IndexError, AttributeError)

Stamp = tuple[int, float, str | None]
"""Size in bytes, modification time and checksum of a record's file."""


_typed_done = TypeAdapter(list[tuple[str, str, str | None, tuple[int, ...], float]]).validate_python
_typed_rows = TypeAdapter(list[IndexedRecord]).validate_python
_typed_sums = TypeAdapter(Sums).validate_python
"""These validate the types of values from JSON; they raise `ValueError`."""


def row_of(cell: str, record: Record) -> IndexedRecord:
    """Returns the index row of a record."""
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
        (record.infra_failures or 0) if failed else 0,
        " ".join(record.reason.split())[:_REASON_CHARACTERS] if record.reason else None,
        usage_of(record),
    )


def note_record(run_folder: str, cell_uri: str, record: Record) -> None:
    """Adds a newly written record to the index. Ignores errors: the next comparison finds the record."""
    row = row_of(cell_uri.removeprefix(f"{run_folder.rstrip('/')}/"), record)
    name = f"{int(record.created.timestamp())}-{secrets.token_hex(4)}.json"
    with suppress(StorageError):
        storage.write_bytes(storage.join(run_folder, FOLDER, name), orjson.dumps(row, default=_plain))


@dataclass(frozen=True)
class Evaluated:
    """A state of a checkpoint with the hashes of its successes; `newest` is the time of the last in epoch seconds."""

    digest: str
    listing: str | None
    hashes: frozenset[str]
    newest: float = 0.0


@dataclass(frozen=True)
class RunRecords:
    """The records of a run: successes by checkpoint, all others record by record.

    `typical` is the median cost of a success by evaluation hash; `work` sums successes by benchmarks and engine;
    `spent` is the cost of all records by policies and month, as of the last comparison with the records.
    """

    done: Mapping[str, Sequence[Evaluated]]
    others: Sequence[IndexedRecord]
    typical: Mapping[str, Typical]
    work: Sequence[Work] = ()
    spent: Sequence[MonthSpent] = ()

    def has(self, checkpoint: str, listing: str) -> bool:
        return any(state.listing == listing for state in self.done.get(checkpoint, ()))


def indexed_records(run_folder: str, *, use_index: bool = True, now: Callable[[], float] = time.time) -> RunRecords:
    """Returns the records below `<evaluation_path>/<run>`, from a recent index or from the records themselves.

    `use_index=False` always compares the index with the records; `now` is a clock in seconds since the epoch. Raises
    `StorageError` if the folder cannot be listed.
    """
    began = now()
    short, records = _read_summary(run_folder)
    if short is not None and use_index and _is_trusted(began - short["compared"], took=short["took"]):
        return _with_news(records, run_folder, since=short["compared"])
    stamps = dict(record_stamps(run_folder))
    signature = hashlib.blake2b(marshal.dumps(list(stamps.items()), 2), digest_size=16).hexdigest()
    unchanged = short is not None and short["stamps"] == signature
    summary = short if short is not None and unchanged else _summary(_updated_rows(run_folder, stamps))
    if stamps or short is not None:
        with suppress(StorageError):
            _write(run_folder, _SUMMARY, {**summary, "stamps": signature, "compared": began, "took": now() - began})
            for file in _news(run_folder, since=0.0):
                if file.modified < began - _NEWS_KEPT_SECONDS:
                    storage.delete(file.uri)
    return records if summary is short else _from_summary(summary)


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
    """Writes rows with the stamps of the record files that they were read from; raises `StorageError` on failure."""
    _write(run_folder, _ROWS, {"rows": rows, "stamps": [stamps[row.cell] for row in rows]})


def indexed_cells(run_folder: str) -> set[str]:
    """Returns cells, relative to the run's folder, with a record at the index's last comparison or since."""
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
    full = orjson.dumps({"format": _FORMAT, **content}, default=_plain)
    storage.write_bytes(storage.join(run_folder, FOLDER, name), full)


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else tuple(value)


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
    for row in rows:
        if row.succeeded:
            state = row.checkpoint, row.digest, row.listing
            newest[state] = max(row.created, newest[state])
            done[state].append(numbers.setdefault(row.evaluation_hash, len(numbers)))
    return {
        "hashes": list(numbers),
        "done": [(*key, sorted(hash_numbers), newest[key]) for key, hash_numbers in done.items()],
        "others": [row for row in rows if not row.succeeded],
        **summed(rows)._asdict(),
    }


def _from_summary(content: Mapping[str, Any]) -> RunRecords:
    hashes = content["hashes"]
    sets: dict[tuple[int, ...], frozenset[str]] = {}  # few different sets: most checkpoints have the same evaluations
    done: dict[str, list[Evaluated]] = defaultdict(list)
    for checkpoint, digest, listing, key, newest in _typed_done(content["done"]):
        if key not in sets:
            sets[key] = frozenset(hashes[number] for number in key)
        done[checkpoint].append(Evaluated(digest, listing, sets[key], newest))
    return RunRecords(done, _typed_rows(content["others"]), *_typed_sums([content[name] for name in Sums._fields]))


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
    """Yields cell folder (relative to the run's) and stamp of each record, always in the same order."""
    if storage.is_local(run_folder):
        root = str(storage.local_path(run_folder).absolute())
        start = len(root) + 1
        for cell in _local_cells(root):
            record = f"{cell}/{RECORD_NAME}"
            try:
                status = os.lstat(record)  # creating 200,000 Path objects takes 1 s
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
    if objects is not None:  # half the time of full listings at 200,000 objects
        start = len(run_folder.rstrip("/").split("://", 1)[-1].partition("/")[2]) + 1
        for blob in objects:
            if blob["name"].endswith(f"/{RECORD_NAME}"):
                checksum = blob.get("md5Hash") or blob.get("crc32c") or blob.get("updated")
                yield blob["name"][start:].removesuffix(f"/{RECORD_NAME}"), (int(blob["size"]), 0.0, checksum)
        return
    start = len(run_folder.rstrip("/")) + 1
    for file in storage.list_files(run_folder):
        if file.uri.endswith(f"/{RECORD_NAME}"):
            yield storage.parent(file.uri)[start:], (file.size, file.modified, file.checksum)


def _local_cells(root: str) -> Iterator[str]:
    for checkpoint in _subfolders(root):
        if place_in(checkpoint.rpartition("/")[2]) is not None:
            for evaluator in _subfolders(checkpoint):
                yield from _subfolders(evaluator)


def _subfolders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted([entry.path for entry in entries if entry.is_dir()])
    except (FileNotFoundError, NotADirectoryError):
        return []


def _rows(run_folder: str, cells: Sequence[str]) -> list[IndexedRecord]:
    read = records_or_reasons([f"{run_folder.rstrip('/')}/{cell}" for cell in cells])
    return [row_of(cell, record) for cell, record in zip(cells, read, strict=True) if isinstance(record, Record)]
