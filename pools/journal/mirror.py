"""The mirror of a cell: its answered requests in a folder of any store, so that a new machine can continue.

Runs in a worker thread. The database records which segments it holds already, and the last exported row.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from pools.journal.bodies import is_whole
from pools.journal.schema import COLUMNS, INSERT_ROW, Row
from pools.journal.segments import LARGEST_ROW_BYTES, SegmentCut, decoded, encoded
from pools.journal.upkeep import connected, writing
from resources.storage import storage

SEGMENT_BYTES = 8 * 2**20
"""Bytes of bodies after which a segment is full."""

_SEGMENT = re.compile(r"segment-\d+-[0-9a-f]+\.jsonl\.gz")
_SLICE_ROWS = 32


class Mirror:
    """The segments of a cell, in a folder at any location that fsspec supports.

    `path` is the journal's database; `warn` is called with a sentence about unreadable segments.
    """

    def __init__(self, path: Path, *, cell: str, folder: str, warn: Callable[[str], None]) -> None:
        self._path = path
        self._cell = cell
        self._folder = folder
        self._warn = warn

    def export(self) -> None:
        """Writes the cell's rows that are in no segment yet, as segments."""
        with connected(self._path) as connection:
            while batch := self._next_segment(connection):
                number = connection.execute(
                    "SELECT count(*) FROM segments WHERE mirror = ?", (self._folder,)
                ).fetchone()
                name = f"segment-{number[0]:06d}-{secrets.token_hex(6)}.jsonl.gz"
                content = encoded(row for _, row in batch)
                if not storage.create_bytes(storage.join(self._folder, name), content):
                    continue
                self._remember(connection, name, batch[-1][0])

    def load(self) -> None:
        """Imports the rows of every segment that is not in the database yet; damaged segments in part.

        Raises:
            sqlite3.Error, OSError: the database cannot be written.
        """
        with connected(self._path) as connection:
            query = "SELECT name FROM segments WHERE mirror = ?"
            known = {name for (name,) in connection.execute(query, (self._folder,))}
            for name in sorted(self._names() - known):
                content = storage.read_bytes(storage.join(self._folder, name))
                try:
                    self._load_rows(connection, decoded(content))
                except SegmentCut as problem:
                    self._warn(f"{storage.join(self._folder, name)} is damaged ({problem}); the rows before are used.")
                self._remember(connection, name, 0)

    def drop(self) -> None:
        for name in self._names():
            storage.delete(storage.join(self._folder, name))
        with connected(self._path) as connection, writing(connection):
            connection.execute("DELETE FROM segments WHERE mirror = ?", (self._folder,))

    def _names(self) -> set[str]:
        names = (storage.basename(file.uri) for file in storage.list_files(self._folder) if file.regular)
        return {name for name in names if _SEGMENT.fullmatch(name)}

    def _next_segment(self, connection: sqlite3.Connection) -> list[tuple[int, Row]]:
        query = "SELECT coalesce(max(last_id), 0) FROM segments WHERE mirror = ?"
        last = connection.execute(query, (self._folder,)).fetchone()[0]
        query = f"SELECT id, {COLUMNS} FROM answers WHERE cell = ? AND id > ? AND imported = 0 ORDER BY id"
        batch: list[tuple[int, Row]] = []
        size = 0
        with closing(connection.execute(query, (self._cell, last))) as cursor:
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
                if row.cell == self._cell:
                    batch.append(row)
                if len(batch) == _SLICE_ROWS:
                    _insert(connection, batch)
                    batch = []
        finally:
            _insert(connection, batch)

    def _remember(self, connection: sqlite3.Connection, name: str, last_id: int) -> None:
        with writing(connection):
            connection.execute("INSERT OR REPLACE INTO segments VALUES (?, ?, ?)", (self._folder, name, last_id))


def _insert(connection: sqlite3.Connection, rows: list[Row]) -> None:
    with writing(connection):
        connection.executemany(INSERT_ROW, rows)
