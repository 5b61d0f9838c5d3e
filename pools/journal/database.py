"""The event loop's connection to the journal: quick reads, grouped commits, and error handling.

Nothing here blocks: if another process is writing, the loop retries the group a moment later.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pools.journal import schema
from pools.protocol import JournalStatus

BUSY_SECONDS = 2.0
"""Longest wait of a group for another connection's transaction; then it is dropped."""
_BUSY_RETRY_SECONDS = 0.001
_FILTER_BITS = 2**26
"""8 MiB, of which only the written pages take memory; with four million keys, 1 in 20 new keys is looked up."""
_SLICE_KEYS, _SLICE_PAUSE_SECONDS = 1000, 0.005  # a slice takes a millisecond
_INDEXED = ("deterministic = 1 AND imported = 0", "deterministic = 1 AND imported = 1", "deterministic = 0")


class _KeyFilter:
    """Recognizes most keys that no row of the file has, without a look-up, which takes 5 µs.

    Until `slices` has read all keys, each key counts as present. A deleted key stays.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._bits = bytearray(_FILTER_BITS // 8)
        (self._last_id,) = connection.execute("SELECT coalesce(max(id), 0) FROM answers").fetchone()
        self._version = -1
        self._complete = self._looked = False

    def slices(self) -> Iterator[None]:
        for rows in _INDEXED if self._last_id else ():
            query, last = f"SELECT key FROM answers WHERE {rows} AND key > ? ORDER BY key LIMIT {_SLICE_KEYS}", b""
            while keys := self._connection.execute(query, (last,)).fetchall():
                for (last,) in keys:
                    self._add(last)
                yield
        self._complete = True

    def committed(self, number: int, key: bytes) -> None:
        self._add(key)
        if number == self._last_id + 1:  # else another connection has written too, and its rows are still to be read
            self._last_id = number

    def may_hold(self, key: bytes) -> bool:
        if not self._complete:
            return True
        if not self._looked:  # once a turn of the loop
            self._look_for_news()
            self._looked = True
            asyncio.get_running_loop().call_soon(setattr, self, "_looked", False)
        place = int.from_bytes(key[:4]) % _FILTER_BITS
        return bool(self._bits[place >> 3] & 1 << (place & 7))

    def _look_for_news(self) -> None:
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._version = version
            for number, key in self._connection.execute("SELECT id, key FROM answers WHERE id > ?", (self._last_id,)):
                self._add(key)
                self._last_id = number

    def _add(self, key: bytes) -> None:
        place = int.from_bytes(key[:4]) % _FILTER_BITS
        self._bits[place >> 3] |= 1 << (place & 7)


class Database:
    """A journal file, used from the thread of a single event loop.

    No method raises for errors of the file: they are counted and reported once with `warn`, and requests go on without
    the journal. Nothing is written for `retry_seconds` after a failure. `committed` is called with the bytes of each
    commit.
    """

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None],
        retry_seconds: float,
        clock: Callable[[], float],
        committed: Callable[[int], None],
    ) -> None:
        self._path = path
        self.counters = JournalStatus()
        self._warn = warn
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._committed = committed
        self._connection: sqlite3.Connection | None = None
        self._keys: _KeyFilter
        self._inode = 0
        self._resume_at = 0.0
        self._failing = False
        self._group: list[tuple[str, tuple[Any, ...]]] = []
        self._waiting: list[asyncio.Future[bool]] = []
        self._flush_handle: asyncio.Handle | None = None
        self._give_up_at = 0.0
        self._connect(wait_seconds=BUSY_SECONDS)  # other processes may be creating it

    def fetch(self, sql: str, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Returns the first row of a query by a `key`; None also if it cannot be read."""
        if self._connection is None and not self._reconnected():
            return None
        assert self._connection is not None
        try:
            if not self._keys.may_hold(parameters["key"]):
                return None
            return self._connection.execute(sql, parameters).fetchone()
        except schema.ERRORS as error:
            self.counters.errors += 1
            self.report(error)
            return None

    def submit(self, sql: str, parameters: tuple[Any, ...]) -> None:
        """Adds a statement to the group that is committed in the loop's next turn."""
        self._group.append((sql, parameters))
        if self._flush_handle is None:
            loop = asyncio.get_running_loop()
            self._give_up_at = loop.time() + BUSY_SECONDS
            self._flush_handle = loop.call_soon(self._flush)

    def settled(self) -> asyncio.Future[bool]:
        """Returns a future of the current group: True once it was committed, False once it was dropped."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def report(self, error: Exception) -> None:
        """Handles an error of this or another connection: sets a damaged file aside, and reports other errors once."""
        if not schema.is_damaged(error):
            self._tell(error)
            return
        self._disconnect()
        if self._set_aside(self._inode, error):
            self._connect(wait_seconds=0.0)
        else:
            self._resume_at = time.monotonic() + self._retry_seconds

    def follow(self) -> None:
        """Reconnects if the file at the path was replaced or removed."""
        if self._connection is not None and self._inode_in_place() != self._inode:
            self._disconnect()
            self._connect(wait_seconds=0.0)

    async def drain(self) -> None:
        while self._flush_handle is not None:
            await self.settled()

    def close(self) -> None:
        self._disconnect()
        self._resume_at = math.inf

    def _flush(self) -> None:
        self._flush_handle = None
        connection = self._connection if self._may_write() else None
        if connection is None:
            self._give_up()
            return
        kept: list[tuple[int, bytes]] = []
        size = 0
        try:
            connection.execute("BEGIN IMMEDIATE")
            for sql, parameters in self._group:
                done = connection.execute(sql, parameters)
                if sql is schema.INSERT_ROW and done.rowcount:
                    kept.append((done.lastrowid or 0, parameters[0]))
                    size += len(parameters[-2]) + len(parameters[-1] or b"")
            connection.execute("COMMIT")
        except schema.ERRORS as error:
            self._flush_failed(connection, error)
            return
        for number, key in kept:
            self._keys.committed(number, key)
        self.counters.kept += len(kept)
        self._failing = False
        self._settle(committed=True)
        if size:
            self._committed(size)

    def _flush_failed(self, connection: sqlite3.Connection, error: Exception) -> None:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        loop = asyncio.get_running_loop()
        in_time = loop.time() < self._give_up_at
        if schema.is_busy(error) and in_time:
            self._flush_handle = loop.call_later(_BUSY_RETRY_SECONDS, self._flush)
            return
        self.report(error)
        if schema.is_damaged(error) and in_time and self._connection is not None:
            self._flush_handle = loop.call_soon(self._flush)
            return
        self._resume_at = time.monotonic() + self._retry_seconds
        self._give_up()

    def _give_up(self) -> None:
        self.counters.errors += sum(sql is schema.INSERT_ROW for sql, _ in self._group)
        self._settle(committed=False)

    def _settle(self, *, committed: bool) -> None:
        self._group = []
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(committed)

    def _may_write(self) -> bool:
        if self._resume_at:
            if time.monotonic() < self._resume_at:
                return False
            self._disconnect()
        return self._connection is not None or self._reconnected()

    def _reconnected(self) -> bool:
        if time.monotonic() < self._resume_at:
            return False
        self._connect(wait_seconds=0.0)
        return self._connection is not None

    def _connect(self, *, wait_seconds: float) -> None:
        for tries_left in (1, 0):
            inode = self._inode_in_place()
            try:
                self._connection = schema.connect(self._path, wait_seconds=wait_seconds)
                self._connection.execute("PRAGMA busy_timeout = 0")
                self.counters.bytes = schema.live_bytes(self._connection)
                self._keys = _KeyFilter(self._connection)
                self._inode = self._inode_in_place()
                self._resume_at = 0.0
                self._read_keys(self._connection, self._keys.slices())
                return
            except schema.ERRORS as error:
                self._disconnect()
                if not (tries_left and schema.is_damaged(error) and self._set_aside(inode, error)):
                    self._resume_at = time.monotonic() + self._retry_seconds
                    self._tell(error)
                    return

    def _read_keys(self, connection: sqlite3.Connection, slices: Iterator[None]) -> None:
        if connection is not self._connection:
            return
        try:
            for _ in slices:
                asyncio.get_running_loop().call_later(_SLICE_PAUSE_SECONDS, self._read_keys, connection, slices)
                return
        except schema.ERRORS as error:
            self.report(error)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _inode_in_place(self) -> int:
        try:
            return self._path.stat().st_ino
        except OSError:
            return 0

    def _set_aside(self, inode: int, error: Exception) -> bool:
        if self._inode_in_place() != inode:
            return True
        try:
            aside = schema.set_aside(self._path, now=self._clock())
        except OSError as problem:
            self._tell(problem)
            return False
        self._warn(
            f"The journal {self._path} cannot be used ({error}). It is kept as {aside.name}; a new journal is started."
        )
        return True

    def _tell(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            self._warn(f"The journal {self._path} cannot be used now ({error}). Requests are answered without it.")
