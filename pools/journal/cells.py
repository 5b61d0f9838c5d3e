"""Attempts at cells: their occurrences, their mirrors, and upkeep of the journal's file.

An occurrence is the index of a sampled request among identical requests of the same attempt. The file and the mirrors
have a thread each, since a store can be slow. Their results are reported on the event loop. Transactions in the threads
are short, with pauses between them, since the loop cannot commit during a transaction.
"""

from __future__ import annotations

import asyncio
import heapq
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pools.journal import schema
from pools.journal.database import Database
from pools.journal.mirror import SEGMENT_BYTES, Mirror
from pools.journal.schema import ERRORS, connected, is_busy, is_damaged, writing

TIDY_SECONDS = 1.0
"""Time between the first commit after a round of upkeep and the next round, unless much is written before."""
MOST_CELLS = 1000
"""Maximum of open cells for a request alone to open another: clients may name any number of cells."""
_MUCH_BYTES = 16 * 2**20
_LITTLE_BYTES = 64 * 2**10
_SLICE_ROWS = 32
_SLICE_PAGES = 128
_FILL = 0.9
_LONGEST_LOG_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class CellScope:
    """An attempt at evaluating a cell; sampled answers are replayed to later attempts at the same cell."""

    cell: str
    attempt: str


class Attempt:
    """The taken occurrences of each request in an attempt; `taken` were answered already, before a restart."""

    def __init__(self, scope: CellScope, taken: Iterable[tuple[bytes, int]] = ()) -> None:
        self.scope = scope
        self.open = True
        self._next: dict[bytes, int] = {}
        self._free: dict[bytes, list[int]] = {}
        for key, occurrence in sorted(taken):
            self._free.setdefault(key, []).extend(range(self._next.get(key, 0), occurrence))
            self._next[key] = occurrence + 1

    def take(self, key: bytes) -> int:
        """Returns the lowest free occurrence of a request."""
        if free := self._free.get(key):
            return heapq.heappop(free)
        occurrence = self._next.get(key, 0)
        self._next[key] = occurrence + 1
        return occurrence

    def give_back(self, key: bytes, occurrence: int) -> None:
        heapq.heappush(self._free.setdefault(key, []), occurrence)


@dataclass(slots=True, eq=False)
class _OpenCell:
    attempt: Attempt
    mirror: Mirror | None = None
    loaded: bool = True
    news_bytes: int = 0
    warned: bool = False


class OpenCells:
    """The open attempts at cells, and the journal's worker threads. Call all methods on the event loop.

    `warn` is called with a sentence for the user; `mirror_seconds` is the interval of the exports of a cell's new rows.
    """

    def __init__(
        self, database: Database, path: Path, *, max_bytes: int, warn: Callable[[str], None], mirror_seconds: float
    ) -> None:
        self._database = database
        self._path = path
        self._max_bytes = max_bytes
        self._warn = warn
        self._mirror_seconds = mirror_seconds
        self._cells: dict[str, _OpenCell] = {}
        self._changing = asyncio.Lock()
        self._file_thread = ThreadPoolExecutor(1, "journal-file")
        self._mirror_thread = ThreadPoolExecutor(1, "journal-mirror")
        self._tidying: asyncio.Task[None] | None = None
        self._exporting: asyncio.Task[None] | None = None
        self._untidied_bytes = 0
        self._much_written = asyncio.Event()
        self._segment_full = asyncio.Event()
        self._tidy_failed = False

    def attempt(self, scope: CellScope) -> Attempt | None:
        """Returns the occurrences of an attempt; None unless it is the open attempt of its cell."""
        cell = self._cells.get(scope.cell)
        return cell.attempt if cell is not None and cell.attempt.scope == scope else None

    def is_open(self, cell: str) -> bool:
        return cell in self._cells

    def committed(self, size: int) -> None:
        """Counts bytes written to the file, and starts upkeep when it is due."""
        self._untidied_bytes += size
        if self._untidied_bytes >= min(_MUCH_BYTES, max(_LITTLE_BYTES, self._max_bytes // 8)):
            self._much_written.set()
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.get_running_loop().create_task(self._tidy_while_needed())

    def kept(self, scope: CellScope, size: int) -> None:
        """Counts the bytes of an answer kept under a cell, and starts an export when a segment is full."""
        cell = self._cells.get(scope.cell)
        if cell is not None and cell.mirror is not None:
            cell.news_bytes += size
            if cell.news_bytes >= SEGMENT_BYTES:
                self._segment_full.set()

    async def open_cell(self, scope: CellScope, *, mirror: str | None) -> None:
        """Opens an attempt at a cell, or continues it, in a new process too; closes an older attempt at the same cell.

        Answers in the folder `mirror`, in any store, are imported first; answers kept from now on are written to it.
        """
        async with self._changing:
            if self.attempt(scope) is not None:
                await self._give_mirror(self._cells[scope.cell], mirror)
                return
            if (older := self._cells.pop(scope.cell, None)) is not None:
                older.attempt.open = False
            cell = _OpenCell(Attempt(scope))
            await self._give_mirror(cell, mirror)
            await self._begin(cell)
            await self._in_file_thread(_forget_replays, self._path, scope)

    async def go_on(self, scope: CellScope) -> None:
        """Opens an attempt of an earlier process, unless its cell has an open attempt, or very many cells are open.

        Keeps replays of other attempts, since the newest may be among them.
        """
        async with self._changing:
            if not self.is_open(scope.cell) and len(self._cells) < MOST_CELLS:
                await self._begin(_OpenCell(Attempt(scope)))

    async def _begin(self, cell: _OpenCell) -> None:
        scope = cell.attempt.scope
        cell.attempt = Attempt(scope, await self._in_file_thread(_taken, self._path, scope) or ())
        self._cells[scope.cell] = cell

    async def _give_mirror(self, cell: _OpenCell, folder: str | None) -> None:
        if folder is None or cell.mirror is not None:
            return
        loop = asyncio.get_running_loop()
        warn = partial(loop.call_soon_threadsafe, self._warn)
        cell.mirror = Mirror(self._path, cell=cell.attempt.scope.cell, folder=folder, warn=warn)
        cell.loaded = False
        await self._synchronise(cell)
        if self._exporting is None:
            self._exporting = loop.create_task(self._export_forever())

    async def close_cell(self, scope: CellScope, *, drop_mirror: bool) -> None:
        """Closes an attempt at a cell; does nothing unless it is the open attempt.

        Writes the rows missing in the mirror to it. For a finished cell, `drop_mirror` deletes segments and sampled
        answers instead.
        """
        async with self._changing:
            if self.attempt(scope) is None:
                return
            cell = self._cells.pop(scope.cell)
            cell.attempt.open = False
            if drop_mirror:
                await self._in_file_thread(_drop_finished, self._path, scope.cell)
                if cell.mirror is not None:
                    await self._in_mirror_thread(cell, cell.mirror.drop)
            elif cell.mirror is not None:
                await self._synchronise(cell)

    async def close(self) -> None:
        """Exports the rows missing in the mirrors, and ends the threads."""
        if self._exporting is not None:
            self._exporting.cancel()
            await asyncio.gather(self._exporting, return_exceptions=True)
        for scope in [cell.attempt.scope for cell in self._cells.values()]:
            await self.close_cell(scope, drop_mirror=False)
        if self._tidying is not None:
            self._much_written.set()
            await asyncio.gather(self._tidying, return_exceptions=True)
        for thread in (self._file_thread, self._mirror_thread):
            await asyncio.to_thread(thread.shutdown)

    async def _tidy_while_needed(self) -> None:
        while self._untidied_bytes:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._much_written.wait(), TIDY_SECONDS)
            self._much_written.clear()
            self._untidied_bytes = 0
            outcome = await self._in_file_thread(_tidied, self._path, self._max_bytes)
            self._database.follow()
            if outcome is not None:
                dropped, self._database.counters.bytes = outcome
                self._database.counters.dropped += dropped

    async def _export_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._mirror_seconds):  # wait_for may swallow a cancellation
                    await self._segment_full.wait()
            self._segment_full.clear()
            for cell in list(self._cells.values()):
                if cell.mirror is not None and (cell.news_bytes or not cell.loaded):
                    await self._synchronise(cell)

    async def _synchronise(self, cell: _OpenCell) -> None:
        assert cell.mirror is not None
        news, cell.news_bytes = cell.news_bytes, 0
        if not await self._in_mirror_thread(cell, cell.mirror.export):
            cell.news_bytes += max(news, 1)
        elif not cell.loaded:
            cell.loaded = await self._in_mirror_thread(cell, cell.mirror.load)

    async def _in_mirror_thread(self, cell: _OpenCell, act: Callable[[], None]) -> bool:
        try:
            await asyncio.get_running_loop().run_in_executor(self._mirror_thread, act)
        except Exception as error:  # noqa: BLE001 - the boundary: every store's client has errors of its own
            if not cell.warned:
                cell.warned = True
                reason = " ".join(str(error).split())
                self._warn(
                    f"The mirror of cell {cell.attempt.scope.cell} cannot be used now, it is tried again: {reason}"
                )
            return False
        cell.warned = False
        return True

    async def _in_file_thread(self, act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(self._file_thread, act, *arguments)
        except ERRORS as error:
            self._database.counters.errors += 1
            if is_damaged(error) or not (self._tidy_failed or is_busy(error)):
                self._tidy_failed = True
                self._database.report(error)
            return None
        self._tidy_failed = False
        return outcome


def _tidied(path: Path, max_bytes: int) -> tuple[int, int]:
    with connected(path) as connection:
        dropped = _evicted(connection, max_bytes)
        _shrink(connection, max_bytes)
        _checkpoint(connection, path)
        return dropped, schema.live_bytes(connection)


def _drop_finished(path: Path, cell: str) -> None:
    with connected(path) as connection:
        query = f"SELECT id FROM answers WHERE cell = ? AND (deterministic = 0 OR imported = 1) LIMIT {_SLICE_ROWS}"
        while _deleted(connection, query, (cell,)):
            pass
        with writing(connection):
            connection.execute("DELETE FROM replays WHERE cell = ?", (cell,))


def _taken(path: Path, scope: CellScope) -> list[tuple[bytes, int]]:
    mine = (scope.cell, scope.attempt)
    with connected(path) as connection:
        return connection.execute(
            "SELECT key, occurrence FROM answers WHERE cell = ? AND attempt = ? AND deterministic = 0"
            " UNION SELECT key, occurrence FROM replays WHERE cell = ? AND attempt = ?",
            mine + mine,
        ).fetchall()


def _forget_replays(path: Path, scope: CellScope) -> None:
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
        time.sleep(schema.PAUSE_SECONDS)


def _checkpoint(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size > _LONGEST_LOG_BYTES:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
