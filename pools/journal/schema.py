"""The journal's file: its tables, opening it, setting a damaged file aside, and its rows.

Bodies are compressed where it pays off, and each row has a checksum.
"""

from __future__ import annotations

import errno
import sqlite3
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, get_type_hints

import orjson

from resources.storage.regular_files import is_own

SCHEMA_VERSION = 5
"""`PRAGMA user_version` of the file, and the version in the first line of a segment.

Version 2 may hold answers of engines with incompletely reloaded weights, version 3 answers that do not match their
requests; version 4 has other checksums.
"""


class Row(NamedTuple):
    """A row of `answers`, without its id; the names are those of the columns.

    `imported` is not part of a segment: it marks a row that came from a segment, and answers its own cell only.
    """

    key: bytes
    deterministic: int
    cell: str | None
    attempt: str | None
    occurrence: int
    target: str
    model: str
    weights: str
    tokenizer: str
    engine: str
    content_type: str
    finish_reasons: str
    prompt_tokens: int
    completion_tokens: int
    created: int
    imported: int
    checksum: bytes
    body: bytes
    request: bytes | None


_SQL = {int: "INTEGER NOT NULL", str: "TEXT NOT NULL", bytes: "BLOB NOT NULL", str | None: "TEXT", bytes | None: "BLOB"}
_LINES = ",\n".join(f"    {name} {_SQL[kind]}" for name, kind in get_type_hints(Row).items())
_SCHEMA = f"""
CREATE TABLE answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
{_LINES}
);
CREATE UNIQUE INDEX deterministic_answers ON answers (key) WHERE deterministic = 1 AND imported = 0;
CREATE UNIQUE INDEX imported_answers ON answers (key, cell) WHERE deterministic = 1 AND imported = 1;
CREATE UNIQUE INDEX sampled_answers ON answers (key, cell, occurrence) WHERE deterministic = 0;
CREATE INDEX answers_of_cells ON answers (cell) WHERE cell IS NOT NULL;
CREATE TABLE replays (
    cell TEXT NOT NULL,
    attempt TEXT NOT NULL,
    key BLOB NOT NULL,
    occurrence INTEGER NOT NULL,
    PRIMARY KEY (cell, attempt, key, occurrence)
) WITHOUT ROWID;
CREATE TABLE segments (
    mirror TEXT NOT NULL,
    name TEXT NOT NULL,
    last_id INTEGER NOT NULL,
    PRIMARY KEY (mirror, name)
) WITHOUT ROWID;
"""

COLUMNS = ", ".join(Row._fields)
INSERT_ROW = f"INSERT INTO answers ({COLUMNS}) VALUES ({', '.join('?' * len(Row._fields))}) ON CONFLICT DO NOTHING"

ERRORS = (sqlite3.Error, OSError, OverflowError, ValueError)
"""Errors of an unusable file; the message of an error about damage may itself be undecodable."""
_FACTS = Row._fields.index("checksum")
"""Number of columns before the checksum, of which the first is the key; the large blobs follow the checksum."""
LARGEST_BYTES = 64 * 2**20
"""Largest answer that is kept, and largest body that is unpacked."""
_PLAIN, _COMPRESSED = b"\0", b"\1"
_LEAST_COMPRESSED_BYTES = 2048
"""Smaller bodies are stored uncompressed: compressing 1 kB saves 400 bytes and is the slowest step here."""
_COMPANIONS = ("-wal", "-shm")
_WORKER_WAIT_SECONDS = 2.0
PAUSE_SECONDS = 0.003
"""Pause of a worker thread after a transaction, in which the event loop can commit."""
_STATEMENTS = [statement.strip() for statement in _SCHEMA.split(";") if statement.strip()]
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class OtherVersion(sqlite3.DatabaseError):
    """The file was written with another schema."""


def is_damaged(error: Exception) -> bool:
    """Returns True if an error means that the file is not, or no longer, a journal."""
    return isinstance(error, OtherVersion | UnicodeDecodeError) or _primary_code(error) in _DAMAGED


def is_busy(error: Exception) -> bool:
    """Returns True if an error means that another connection is writing."""
    return _primary_code(error) in _BUSY


def _primary_code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def connect(path: Path, *, wait_seconds: float) -> sqlite3.Connection:
    """Returns a connection to the journal in a file, which is created if missing, readable by its owner only.

    Transactions are explicit. Damaged text is read with surrogate escapes. Waits up to `wait_seconds`, now and later,
    while another connection is writing.

    Raises:
        OSError: the folder cannot be created, or the file belongs to another user.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)
    for suffix in ("", *_COMPANIONS):
        with suppress(FileNotFoundError):
            file = path.with_name(path.name + suffix)
            if not is_own(status := file.stat(), check_mode=False):
                raise PermissionError(errno.EPERM, "it is another user's", str(file))
            file.chmod(stat.S_IMODE(status.st_mode) & 0o700)
    connection = sqlite3.connect(path, timeout=wait_seconds, isolation_level=None, check_same_thread=False)
    connection.text_factory = lambda text: text.decode(errors="surrogateescape")
    try:
        _prepare(connection, wait_seconds=wait_seconds)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, *, wait_seconds: float) -> None:
    version = _version(connection)
    if version == 0:
        _patiently(lambda: _create(connection), wait_seconds=wait_seconds)
    elif version != SCHEMA_VERSION:
        raise OtherVersion(f"schema version {version}, expected {SCHEMA_VERSION}")
    elif not {(statement,) for statement in _STATEMENTS} <= set(connection.execute("SELECT sql FROM sqlite_schema")):
        raise OtherVersion("its tables differ from those of this version")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA cache_size = -16000")


def _version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _create(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    with writing(connection):
        if _version(connection) == 0:  # else another process was faster
            if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                raise OtherVersion("a database of something else")
            for statement in _STATEMENTS:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _patiently(act: Callable[[], None], *, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return act()
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)


def live_bytes(connection: sqlite3.Connection) -> int:
    """Returns the bytes of the file that are in use, without free pages."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def set_aside(path: Path, *, now: float) -> Path:
    """Renames an unusable file and its companions, so that a new file can be created; the name has the time `now`."""
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    names = [f"{path.name}.corrupt-{stamp}", *(f"{path.name}.corrupt-{stamp}.{number}" for number in range(1, 1000))]
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(target)
    for suffix in _COMPANIONS:
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            companion.rename(target.with_name(target.name + suffix))
    return target


def connected(path: Path) -> AbstractContextManager[sqlite3.Connection]:
    """Yields a connection for a worker thread, closed at the end."""
    return closing(connect(path, wait_seconds=_WORKER_WAIT_SECONDS))


@contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Runs a transaction, followed by a pause in which the event loop can commit."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite ends some by itself, as on a full disk
            connection.execute("ROLLBACK")
        raise
    time.sleep(PAUSE_SECONDS)


class Unreadable(Exception):
    """A stored body is damaged."""


def compressed(body: bytes) -> bytes:
    """Returns a body as a zlib stream, at the fastest level."""
    return zlib.compress(body, 1)


def packed(body: bytes) -> bytes:
    """Returns a body as stored: byte 0 and the body, or byte 1 and a zlib stream."""
    return _PLAIN + body if len(body) < _LEAST_COMPRESSED_BYTES else _COMPRESSED + compressed(body)


def unpacked(stored: bytes) -> bytes:
    """Returns the unpacked body."""
    try:
        if stored.startswith(_PLAIN):
            return stored[1:]
        stream = zlib.decompressobj()
        body = stream.decompress(stored[1:], LARGEST_BYTES + 1)  # 1 byte above the limit, so that the end is seen
    except zlib.error as error:
        raise Unreadable(str(error)) from None
    if not stream.eof:
        raise Unreadable("its end is missing, or it is too large")
    return body


def sealed(row: Row) -> Row:
    """Returns a row with its checksum."""
    return Row._make((*row[:_FACTS], _checksum(row), *row[_FACTS + 1 :]))  # half the time of _replace


def is_whole(row: Row) -> bool:
    """Returns True if no value and no type in a row has changed since it was sealed."""
    try:
        return row.checksum == _checksum(row)
    except TypeError:  # a value of the wrong type for a blob or a fact
        return False


def _checksum(row: Row) -> bytes:
    request = row.request
    facts = orjson.dumps((*row[1:_FACTS], len(row.body), request is None))  # a fifth of the time of repr
    checksum = zlib.crc32(request or b"", zlib.crc32(row.body, zlib.crc32(facts, zlib.crc32(row.key))))
    return checksum.to_bytes(4, "big")
