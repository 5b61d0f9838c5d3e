"""The mirror of a cell: its answered requests in a folder of any store, so that a new machine can continue.

A segment is a file of rows, as compressed lines of JSON. The database records which segments it holds already, and the
last exported row. Runs in a worker thread.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import re
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import orjson

from pools.journal.answers import is_content_type
from pools.journal.schema import (
    COLUMNS,
    INSERT_ROW,
    LARGEST_BYTES,
    SCHEMA_VERSION,
    Row,
    connected,
    is_whole,
    sealed,
    writing,
)
from resources.storage import storage

SEGMENT_BYTES = 8 * 2**20
"""Bytes of bodies after which a segment is full."""

LARGEST_ROW_BYTES = LARGEST_BYTES // 2
"""Largest row of a segment, as stored body plus request: in base64 they take a third more."""
_BLOBS = ("key", "checksum", "body", "request")
_KINDS = get_type_hints(Row)
_LARGEST_INTEGER = 2**63 - 1
_SEGMENT = re.compile(r"segment-\d+-[0-9a-f]+\.jsonl\.gz")
_SLICE_ROWS = 32


@dataclass(frozen=True)
class Mirror:
    """The segments of a cell, in a folder at any location that fsspec supports; `path` is the journal's file."""

    path: Path
    cell: str
    folder: str
    warn: Callable[[str], object]

    def export(self) -> None:
        """Writes the cell's rows that are in no segment yet, as segments."""
        with connected(self.path) as connection:
            while batch := self._next_segment(connection):
                number = connection.execute("SELECT count(*) FROM segments WHERE mirror = ?", (self.folder,)).fetchone()
                name = f"segment-{number[0]:06d}-{secrets.token_hex(6)}.jsonl.gz"
                content = encoded(row for _, row in batch)
                if not storage.create_bytes(storage.join(self.folder, name), content):
                    continue
                self._remember(connection, name, batch[-1][0])

    def load(self) -> None:
        """Imports the rows of every segment that is not in the database yet; damaged segments in part."""
        with connected(self.path) as connection:
            query = "SELECT name FROM segments WHERE mirror = ?"
            known = {name for (name,) in connection.execute(query, (self.folder,))}
            for name in sorted(self._names() - known):
                content = storage.read_bytes(storage.join(self.folder, name))
                try:
                    self._load_rows(connection, decoded(content))
                except SegmentCut as problem:
                    self.warn(f"{storage.join(self.folder, name)} is damaged ({problem}); the rows before are used.")
                self._remember(connection, name, 0)

    def drop(self) -> None:
        for name in self._names():
            storage.delete(storage.join(self.folder, name))
        with connected(self.path) as connection, writing(connection):
            connection.execute("DELETE FROM segments WHERE mirror = ?", (self.folder,))

    def _names(self) -> set[str]:
        names = (storage.basename(file.uri) for file in storage.list_files(self.folder) if file.regular)
        return {name for name in names if _SEGMENT.fullmatch(name)}

    def _next_segment(self, connection: sqlite3.Connection) -> list[tuple[int, Row]]:
        query = "SELECT coalesce(max(last_id), 0) FROM segments WHERE mirror = ?"
        last = connection.execute(query, (self.folder,)).fetchone()[0]
        query = f"SELECT id, {COLUMNS} FROM answers WHERE cell = ? AND id > ? AND imported = 0 ORDER BY id"
        batch: list[tuple[int, Row]] = []
        size = 0
        with closing(connection.execute(query, (self.cell, last))) as cursor:
            for number, *values in cursor:
                row = Row(*values)
                row_bytes = len(row.body) + len(row.request or b"")
                if row_bytes > LARGEST_ROW_BYTES or not is_whole(row):
                    continue
                batch.append((number, row))
                size += row_bytes
                if size >= SEGMENT_BYTES:
                    break
        return batch

    def _load_rows(self, connection: sqlite3.Connection, rows: Iterator[Row]) -> None:
        batch: list[Row] = []
        try:
            for row in rows:
                if row.cell == self.cell:
                    batch.append(row)
                if len(batch) == _SLICE_ROWS:
                    _insert(connection, batch)
                    batch = []
        finally:
            _insert(connection, batch)

    def _remember(self, connection: sqlite3.Connection, name: str, last_id: int) -> None:
        with writing(connection):
            connection.execute("INSERT OR REPLACE INTO segments VALUES (?, ?, ?)", (self.folder, name, last_id))


def _insert(connection: sqlite3.Connection, rows: list[Row]) -> None:
    with writing(connection):
        connection.executemany(INSERT_ROW, rows)


class SegmentCut(Exception):
    """A segment ends early, or is damaged; the rows before that are good."""


def encoded(rows: Iterable[Row]) -> bytes:
    """Returns a segment: gzip of a line with the schema's version and a line for each row, blobs in base64."""
    first = orjson.dumps({"schema": SCHEMA_VERSION}, option=orjson.OPT_APPEND_NEWLINE)
    return gzip.compress(b"".join([first, *map(_line, rows)]), compresslevel=1, mtime=0)


def decoded(content: bytes) -> Iterator[Row]:
    """Yields the rows of a segment, in their order, each marked as imported."""
    lines = _lines(content)
    if (first := next(lines, None)) != {"schema": SCHEMA_VERSION}:
        raise SegmentCut(f"expected schema version {SCHEMA_VERSION} in its first line, found {first}")
    for fields in lines:
        yield _row(fields)


def _line(row: Row) -> bytes:
    fields: dict[str, Any] = row._asdict()
    del fields["imported"]
    for name in _BLOBS:
        if fields[name] is not None:
            fields[name] = base64.b64encode(fields[name]).decode()
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def _lines(content: bytes) -> Iterator[Any]:
    with gzip.open(io.BytesIO(content)) as stream:
        try:
            while line := stream.readline(LARGEST_BYTES):
                if not line.endswith(b"\n"):
                    raise SegmentCut("a line has no end, or is too long")
                yield orjson.loads(line)
        except (OSError, EOFError, zlib.error, orjson.JSONDecodeError) as error:
            raise SegmentCut(str(error)) from None


def _row(fields: Any) -> Row:
    if not isinstance(fields, dict):
        raise SegmentCut("a line is not an object")
    try:
        blobs = {name: base64.b64decode(fields[name], validate=True) for name in _BLOBS if fields[name] is not None}
        row = Row(**{**fields, **blobs, "imported": 0})
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise SegmentCut(f"a row is not readable ({type(error).__name__})") from None
    for name, value in zip(Row._fields, row, strict=True):
        if not isinstance(value, _KINDS[name]) or (isinstance(value, int) and abs(value) > _LARGEST_INTEGER):
            raise SegmentCut(f"a row has no usable {name}")
    if not is_content_type(row.content_type):
        raise SegmentCut("a row has a content type that no header can have")
    if not is_whole(row):
        raise SegmentCut("a row has another checksum")
    return sealed(row._replace(imported=1))
