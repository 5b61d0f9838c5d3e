"""A compact index of a run's records, kept beside them, so that planning reads one file and not a hundred thousand.

    <evaluation_path>/<run>/index/summary.json      what planning asks for
    <evaluation_path>/<run>/index/records.json      record by record, with its size and time, to see which are new
    <evaluation_path>/<run>/index/<number>.json     news: a record that was written since

Records stay the only truth. The index is compared with a listing of them, but no longer than a twentieth of the time:
one that took 3 s to compare is taken at its word for a minute, one that takes less than a second never is. Lost or
damaged, it is made anew; where it cannot be written, it is made each time.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import orjson

from resources import storage
from resources.errors import RecordStatus, StorageError
from resources.storage import FileInfo
from tasks.names import step_of
from tasks.records import RECORD_NAME, Record, read_record

_FOLDER = "index"
_SUMMARY = "summary.json"
_ROWS = "records.json"
_FORMAT = 1
_TRUSTED_PER_SECOND = 20.0
_WORTH_TRUSTING_SECONDS = 1.0
_NEWS_KEPT_SECONDS = 3600.0  # longer than any reader takes between reading the index and writing it
_READ_AT_ONCE = 16
_REASON_CHARACTERS = 300


class IndexedRecord(NamedTuple):
    """What planning asks of a record. `cell` is its folder relative to the run's; times in seconds since the epoch."""

    cell: str
    checkpoint: str
    evaluation_hash: str
    digest: str
    listing: str | None
    status: RecordStatus
    created: float
    seconds: float
    chip_seconds: float
    infra_failures: int
    reason: str | None

    @property
    def succeeded(self) -> bool:
        """Whether its numbers are published."""
        return self.status == "succeeded"


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
        (record.infra_failures or 1) if failed else 0,
        " ".join(record.reason.split())[:_REASON_CHARACTERS] if record.reason else None,
    )


def note_record(run_folder: str, cell_uri: str, record: Record) -> None:
    """Tells whoever plans next of a record that was just written; what fails here costs a later look."""
    row = row_of(cell_uri.removeprefix(f"{run_folder.rstrip('/')}/"), record)
    name = f"{int(record.created.timestamp())}-{secrets.token_hex(4)}.json"
    with suppress(StorageError):
        storage.write_bytes(storage.join(run_folder, _FOLDER, name), orjson.dumps(tuple(row)))


@dataclass(frozen=True)
class Evaluated:
    """One state of a checkpoint, and by the hashes of which evaluations it has succeeded records."""

    digest: str
    listing: str | None
    hashes: frozenset[str]


@dataclass(frozen=True)
class RunRecords:
    """What the records of a run say: successes by checkpoint, everything else record by record.

    `typical` is what a success of each evaluation took: seconds, and chip-seconds (medians).
    """

    done: Mapping[str, Sequence[Evaluated]]
    others: Sequence[IndexedRecord]
    typical: Mapping[str, tuple[float, float]]


def indexed_records(run_folder: str, *, afresh: bool = False, now: Callable[[], float] = time.time) -> RunRecords:
    """What the records of a run say, by the index where that may be believed, else by the records themselves.

    Args:
        run_folder: `<evaluation_path>/<run>`.
        afresh: compare with the records however lately that was done.
        now: clock in seconds since the epoch.

    Raises:
        StorageError: the folder cannot be listed.
    """
    began = now()
    short = _read(storage.join(run_folder, _FOLDER, _SUMMARY))
    if short is not None and not afresh and began < short["compared"] + _trusted_seconds(short["took"]):
        return _with_news(_from_summary(short), run_folder, since=short["compared"])
    content = _read(storage.join(run_folder, _FOLDER, _ROWS)) or {"rows": [], "stamps": []}
    known = {row[0]: (stamp, row) for row, stamp in zip(content["rows"], content["stamps"], strict=True)}
    stamps = dict(_stamps(run_folder))
    same = {cell for cell, stamp in stamps.items() if cell in known and known[cell][0] == stamp}
    rows = {cell: IndexedRecord(*known[cell][1]) for cell in same}
    rows |= dict(_rows(run_folder, [cell for cell in stamps if cell not in same]))
    summary = _summary(list(rows.values()))
    if rows or known:
        with suppress(StorageError):
            if len(same) != len(known) or len(same) != len(rows):
                full = {"rows": [tuple(row) for row in rows.values()], "stamps": [stamps[cell] for cell in rows]}
                _write(run_folder, _ROWS, full)
            _write(run_folder, _SUMMARY, {**summary, "compared": began, "took": now() - began})
            for file in _news(run_folder, since=0.0):
                if file.modified < began - _NEWS_KEPT_SECONDS:
                    storage.delete(file.uri)
    return _from_summary(summary)


def _trusted_seconds(took: float) -> float:
    return _TRUSTED_PER_SECOND * took if took > _WORTH_TRUSTING_SECONDS else 0.0


def _write(run_folder: str, name: str, content: dict[str, Any]) -> None:
    storage.write_bytes(storage.join(run_folder, _FOLDER, name), orjson.dumps({"format": _FORMAT, **content}))


def _read(uri: str) -> dict[str, Any] | None:
    try:
        content = orjson.loads(storage.read_bytes(uri))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == _FORMAT else None


def _summary(rows: Sequence[IndexedRecord]) -> dict[str, Any]:
    """The same in a fiftieth of the bytes: a finished checkpoint is one line, whatever it was asked."""
    numbers: dict[str, int] = {}
    done: dict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    costs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.succeeded:
            number = numbers.setdefault(row.evaluation_hash, len(numbers))
            done[row.checkpoint, row.digest, row.listing].append(number)
            costs[row.evaluation_hash].append((row.seconds, row.chip_seconds))
    typical = {
        key: (median(seconds for seconds, _ in found), median(chips for _, chips in found))
        for key, found in costs.items()
    }
    return {
        "hashes": list(numbers),
        "done": [(*key, sorted(found)) for key, found in done.items()],
        "others": [tuple(row) for row in rows if not row.succeeded],
        "typical": typical,
    }


def _from_summary(content: Mapping[str, Any]) -> RunRecords:
    hashes = content["hashes"]
    sets: dict[tuple[int, ...], frozenset[str]] = {}  # few different ones: most checkpoints were asked the same
    done: dict[str, list[Evaluated]] = defaultdict(list)
    for checkpoint, digest, listing, numbers in content["done"]:
        key = tuple(numbers)
        if key not in sets:
            sets[key] = frozenset(hashes[number] for number in key)
        done[checkpoint].append(Evaluated(digest, listing, sets[key]))
    others = [IndexedRecord(*row) for row in content["others"]]
    return RunRecords(done, others, {key: (cost[0], cost[1]) for key, cost in content["typical"].items()})


def _with_news(records: RunRecords, run_folder: str, *, since: float) -> RunRecords:
    rows: dict[str, IndexedRecord] = {}
    for file in _news(run_folder, since=since):
        with suppress(FileNotFoundError, ValueError, TypeError):
            row = IndexedRecord(*orjson.loads(storage.read_bytes(file.uri)))
            if row.cell not in rows or row.created >= rows[row.cell].created:
                rows[row.cell] = row
    if not rows:
        return records
    done = {name: list(states) for name, states in records.done.items()}
    for row in rows.values():
        if row.succeeded:
            state = Evaluated(row.digest, row.listing, frozenset((row.evaluation_hash,)))
            done.setdefault(row.checkpoint, []).append(state)
    others = [row for row in records.others if row.cell not in rows]
    others += [row for row in rows.values() if not row.succeeded]
    return RunRecords(done, others, records.typical)


def _news(run_folder: str, *, since: float) -> list[FileInfo]:
    """Records written since, told one by one; a little earlier too, since clocks and stores differ."""
    listed = storage.list_files(storage.join(run_folder, _FOLDER))
    return [
        file
        for file in listed
        if storage.basename(file.uri) not in (_SUMMARY, _ROWS) and (not file.modified or file.modified > since - 60.0)
    ]


def _stamps(run_folder: str) -> Iterator[tuple[str, list[Any]]]:
    """Size, time and checksum of each record, by the folder of its cell relative to the run's."""
    if storage.is_local(run_folder):
        root = Path(storage.local_path(run_folder)).absolute()
        for cell in _local_cells(root) if root.is_dir() else ():
            with suppress(FileNotFoundError):
                told = os.stat(f"{cell}/{RECORD_NAME}")  # noqa: PTH116 - a Path for each of 200,000 takes a second
                yield cell[len(str(root)) + 1 :], [told.st_size, told.st_mtime, None]
        return
    start = len(run_folder.rstrip("/")) + 1
    for file in storage.list_files(run_folder):
        if file.uri.endswith(f"/{RECORD_NAME}"):
            yield storage.parent(file.uri)[start:], [file.size, file.modified, file.checksum]


def _local_cells(root: Path) -> Iterator[str]:
    """Folders of cells, without a look into them: attempts hold most of the files."""
    for step in _subfolders(str(root)):
        if step_of(step.rpartition("/")[2]) is not None:
            for evaluator in _subfolders(step):
                yield from _subfolders(evaluator)


def _subfolders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []


def _rows(run_folder: str, cells: Sequence[str]) -> Iterable[tuple[str, IndexedRecord]]:
    def read(cell: str) -> tuple[str, IndexedRecord] | None:
        record = read_record(storage.join(run_folder, cell))
        return (cell, row_of(cell, record)) if record is not None else None

    if storage.is_local(run_folder):
        return [one for one in map(read, cells) if one is not None]
    with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
        return [one for one in threads.map(read, cells) if one is not None]
