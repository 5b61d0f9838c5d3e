"""The journal's interface for the proxy: claim a stored answer before a request, keep the engine's answer after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pools.journal.answers import AnswerFacts, is_content_type
from pools.journal.cells import Attempt, CellScope, OpenCells
from pools.journal.database import Database
from pools.journal.keys import Question
from pools.journal.schema import (
    COLUMNS,
    INSERT_ROW,
    LARGEST_BYTES,
    Row,
    Unreadable,
    compressed,
    is_whole,
    packed,
    sealed,
    unpacked,
)
from pools.protocol import JournalStatus

_LARGE_BYTES = 32 * 1024
"""Larger bodies are compressed in a thread: they would block the loop for a third of a millisecond."""

_SELECT = f"SELECT id, {COLUMNS} FROM answers WHERE key = :key"
_SELECT_DETERMINISTIC = f"{_SELECT} AND deterministic = 1 AND imported = 0"
_SELECT_IMPORTED = f"{_SELECT} AND cell = :cell AND deterministic = 1 AND imported = 1"
_SELECT_SAMPLED = f"{_SELECT} AND cell = :cell AND occurrence = :occurrence AND deterministic = 0"
_DELETE_ROW = "DELETE FROM answers WHERE id = ?"
_REPLAYED = "INSERT OR IGNORE INTO replays VALUES (?, ?, ?, ?)"
_NOT_REPLAYED = "DELETE FROM replays WHERE cell = ? AND attempt = ? AND key = ? AND occurrence = ?"


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A stored answer, with its exact bytes."""

    content_type: str
    body: bytes = field(repr=False)


@dataclass(slots=True, eq=False)
class Claim:
    """A request's claim on the journal: a stored answer, or the key under which its answer will be kept.

    `stored` is the answer, to be sent after `replay`; None if an engine must answer. In that case exactly one of
    `Journal.keep`, `release` and `refuse` follows; otherwise `release` may follow.
    """

    question: Question
    _database: Database
    _attempt: Attempt | None
    occurrence: int
    stored: StoredAnswer | None
    _noted: asyncio.Future[bool] | None = None

    def __post_init__(self) -> None:
        if self._attempt is not None and self.stored is not None and not self.question.deterministic:
            self._database.submit(_REPLAYED, self._use(self._attempt))
            self._noted = self._database.settled()

    async def replay(self) -> StoredAnswer | None:
        """Returns the stored answer, after committing the use of a sample, so that no crash lets it be used again.

        None if an engine must answer, also because the use of a sample cannot be committed.
        """
        if self.stored is not None and self._noted is not None and not await self._noted:
            self.stored = None
        hit = self.stored is not None
        self._database.counters.hits += hit
        self._database.counters.misses += not hit
        return self.stored

    def _use(self, attempt: Attempt) -> tuple[str, str, bytes, int]:
        return attempt.scope.cell, attempt.scope.attempt, self.question.key, self.occurrence

    @property
    def scope(self) -> CellScope | None:
        """The attempt that the request belongs to; None without an attempt, or after its end."""
        return self._attempt.scope if self._attempt is not None and self._attempt.open else None

    @property
    def keeps(self) -> bool:
        return self.question.deterministic or self.scope is not None

    def release(self) -> None:
        """Frees the occurrence for the next identical request, after a failure or a disconnect. Idempotent."""
        attempt, self._attempt = self._attempt, None
        if attempt is None or self.question.deterministic:
            return
        attempt.give_back(self.question.key, self.occurrence)
        if self.stored is not None:
            self._database.submit(_NOT_REPLAYED, self._use(attempt))

    def refuse(self) -> None:
        self._database.counters.refused += 1
        self.release()


class Journal:
    """The store of answered requests in a file on a local disk, used from the thread of a single event loop.

    The file is created if missing; several processes may share it. Errors of the file raise nothing: a damaged file, or
    a file of another version, is set aside; an unusable file is retried later.

    Args:
        max_bytes: size above which the oldest answers are deleted.
        warn: called with a sentence for the user.
        mirror_seconds: interval of the exports of a cell's new rows to its mirror.
        retry_seconds: pause of writing after a failure.
        clock: seconds since the epoch, for display; no decision depends on it.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        keep_prompts: bool,
        warn: Callable[[str], None],
        mirror_seconds: float = 10.0,
        retry_seconds: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._keep_prompts = keep_prompts
        self._clock = clock
        self._database = Database(
            path, warn=warn, retry_seconds=retry_seconds, clock=clock, committed=lambda size: self.cells.committed(size)
        )
        self.cells = OpenCells(self._database, path, max_bytes=max_bytes, warn=warn, mirror_seconds=mirror_seconds)

    @property
    def counters(self) -> JournalStatus:
        return self._database.counters

    def claim(self, question: Question, *, cell: CellScope | None) -> Claim:
        """Claims the answer to a request, or the key to store it under.

        A deterministic request gets an answer that any run received on this machine, and in an open attempt at a cell
        also an answer from the cell's mirror. A sampled request gets an answer only in such an attempt: the k-th
        identical request of the attempt gets the cell's k-th answer.
        """
        attempt = self.cells.attempt(cell) if cell is not None else None
        occurrence = 0
        stored = None
        if question.deterministic:
            stored = self._stored(question, _SELECT_DETERMINISTIC)
            if stored is None and attempt is not None:
                stored = self._stored(question, _SELECT_IMPORTED, cell=attempt.scope.cell)
        elif attempt is not None:
            occurrence = attempt.take(question.key)
            stored = self._stored(question, _SELECT_SAMPLED, cell=attempt.scope.cell, occurrence=occurrence)
        return Claim(question, self._database, attempt, occurrence, stored)

    async def keep(self, claim: Claim, content_type: str, body: bytes, *, facts: AnswerFacts) -> None:
        """Stores a valid answer, with the exact bytes for the client; returns once it is committed, or cannot be.

        After that a kill of this process does not lose it. Never raises for errors of the file.
        """
        if not claim.keeps or len(body) > min(LARGEST_BYTES, self._max_bytes // 4):
            return
        content_type = _text(content_type)
        if len(body) > _LARGE_BYTES or (self._keep_prompts and len(claim.question.body) > _LARGE_BYTES):
            content = await asyncio.to_thread(self._content, claim.question, body)
        else:
            content = self._content(claim.question, body)
        if claim.keeps:
            try:
                row = self._row(claim, content_type, content, facts)
            except TypeError:  # the name of its cell is not Unicode
                self.counters.errors += 1
                return
            self._database.submit(INSERT_ROW, row)
            await self._database.settled()
            if claim.scope is not None:
                self.cells.kept(claim.scope, len(content[0]))

    async def close(self) -> None:
        await self._database.drain()
        await self.cells.close()
        self._database.close()

    def _stored(
        self, question: Question, sql: str, *, cell: str | None = None, occurrence: int = 0
    ) -> StoredAnswer | None:
        columns = self._database.fetch(sql, {"key": question.key, "cell": cell, "occurrence": occurrence})
        if columns is None:
            return None
        number, *values = columns
        row = Row(*values)
        try:
            whole = is_whole(row) and is_content_type(row.content_type)
            if not whole or not _answers(row, question, cell=cell, occurrence=occurrence):
                raise Unreadable("it is another row than was written")
            return StoredAnswer(row.content_type, unpacked(row.body))
        except Unreadable:
            self.counters.dropped += 1
            self._database.submit(_DELETE_ROW, (number,))
            return None

    def _content(self, question: Question, body: bytes) -> tuple[bytes, bytes | None]:
        return packed(body), compressed(question.body) if self._keep_prompts else None

    def _row(self, claim: Claim, content_type: str, content: tuple[bytes, bytes | None], facts: AnswerFacts) -> Row:
        question, scope = claim.question, claim.scope
        subject = question.subject
        row = Row(  # positional, in half the time of keywords
            question.key,
            int(question.deterministic),
            scope.cell if scope else None,
            scope.attempt if scope else None,
            claim.occurrence,
            _text(question.target),
            _text(question.model),
            subject.weights,
            subject.tokenizer,
            subject.engine,
            content_type,
            _text(",".join(facts.finish_reasons)),
            facts.prompt_tokens,
            facts.completion_tokens,
            int(self._clock()),
            0,
            b"",
            content[0],
            content[1],
        )
        return sealed(row)


def _answers(row: Row, question: Question, *, cell: str | None, occurrence: int) -> bool:
    asked = (question.key, int(question.deterministic))
    if (row.key, row.deterministic) != asked or row.occurrence != occurrence:
        return False
    return row.cell == cell or (question.deterministic and not row.imported)


def _text(value: str) -> str:
    return value if value.isascii() else value.encode(errors="replace").decode()
