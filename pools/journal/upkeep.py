"""Upkeep of the journal's file outside the event loop: size limit, checkpoints, finished cells.

Runs in a thread with its own connection. Transactions are short, with pauses between them, since the loop cannot commit
during a transaction.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pools.journal import schema
from pools.journal.cells import CellScope

_WAIT_SECONDS = 2.0
_SLICE_ROWS = 32
_SLICE_PAGES = 128
_PAUSE_SECONDS = 0.003
_FILL = 0.9
_LONGEST_LOG_BYTES = 32 * 2**20


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Yields a connection for a worker thread, closed at the end."""
    with closing(schema.connect(path, wait_seconds=_WAIT_SECONDS)) as connection:
        yield connection


@contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Runs a transaction, followed by a pause in which the event loop can commit."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    time.sleep(_PAUSE_SECONDS)


def tidy(path: Path, max_bytes: int) -> tuple[int, int]:
    """Moves the log into the file, evicts the oldest rows above `max_bytes`; returns evicted rows and bytes in use."""
    with connected(path) as connection:
        dropped = _evicted(connection, max_bytes)
        _shrink(connection, max_bytes)
        _checkpoint(connection, path)
        return dropped, schema.live_bytes(connection)


def drop_finished(path: Path, cell: str) -> None:
    """Deletes the sampled and the imported answers of a finished cell: they will not be replayed."""
    with connected(path) as connection:
        query = f"SELECT id FROM answers WHERE cell = ? AND (deterministic = 0 OR imported = 1) LIMIT {_SLICE_ROWS}"
        while _deleted(connection, query, (cell,)):
            pass
        with writing(connection):
            connection.execute("DELETE FROM replays WHERE cell = ?", (cell,))


def taken(path: Path, scope: CellScope) -> list[tuple[bytes, int]]:
    """Returns the occurrences that an attempt has had answered already, by this process or an earlier process."""
    mine = (scope.cell, scope.attempt)
    with connected(path) as connection:
        return connection.execute(
            "SELECT key, occurrence FROM answers WHERE cell = ? AND attempt = ? AND deterministic = 0"
            " UNION SELECT key, occurrence FROM replays WHERE cell = ? AND attempt = ?",
            mine + mine,
        ).fetchall()


def forget_replays(path: Path, scope: CellScope) -> None:
    """Deletes the replays of other attempts at the same cell: they are over."""
    with connected(path) as connection, writing(connection):
        connection.execute("DELETE FROM replays WHERE cell = ? AND attempt != ?", (scope.cell, scope.attempt))


def _evicted(connection: sqlite3.Connection, max_bytes: int) -> int:
    dropped = 0
    if schema.live_bytes(connection) > max_bytes:
        while schema.live_bytes(connection) > max_bytes * _FILL:
            rows = _deleted(connection, f"SELECT id FROM answers ORDER BY id LIMIT {_SLICE_ROWS}", ())
            if not rows:
                break
            dropped += rows
    return dropped


def _deleted(connection: sqlite3.Connection, query: str, parameters: tuple[str, ...]) -> int:
    with writing(connection):
        return connection.execute(f"DELETE FROM answers WHERE id IN ({query})", parameters).rowcount


def _shrink(connection: sqlite3.Connection, max_bytes: int) -> None:
    size = connection.execute("PRAGMA page_size").fetchone()[0]
    while connection.execute("PRAGMA page_count").fetchone()[0] * size > max_bytes + _LONGEST_LOG_BYTES:
        if not connection.execute("PRAGMA freelist_count").fetchone()[0]:
            return
        connection.execute(f"PRAGMA incremental_vacuum({_SLICE_PAGES})").fetchall()
        time.sleep(_PAUSE_SECONDS)


def _checkpoint(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size > _LONGEST_LOG_BYTES:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
