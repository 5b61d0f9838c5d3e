"""Local storage of columns, so that samples are read only once: a SQLite file per location of records.

Up to 100,000 questions over all checkpoints, columns stay in memory. Files are in the cache folder, never next to
records; a damaged file is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from resources.errors import StorageError
from resources.settings import settings
from resources.storage import storage
from resources.storage.regular_files import is_own
from tasks.records.record import FoundRecord
from tasks.reports.viewer.columns import packed
from tasks.reports.viewer.reading import Column, ColumnMetric, digest_of

_log = logging.getLogger(__name__)
_FORMAT = 2
_FILES = ("", "-wal", "-shm")
_MOST_BYTES = 8 * 2**30  # of all files together
_BLOCKS_IN_MEMORY = 1024
_SECONDS = 60.0  # timeout of a writer waiting for another writer
_TABLES = """
create table if not exists file (place text primary key) without rowid;
create table if not exists held (
    place text, benchmark text, number integer primary key, questions blob, size integer, metrics text,
    scores blob, flags blob, texts blob, unique (place, benchmark));
create table if not exists answers (
    held integer, block integer, content blob, primary key (held, block)) without rowid;
create table if not exists texts (digest blob primary key, content blob) without rowid;
"""


def kept_at(location: str) -> Path | None:
    """Returns the file for columns of the records below a location; None if other users can write to its folder.

    Removes a file that other users could have written. Logs both cases.
    """
    name = hashlib.sha256(f"{_FORMAT} {storage.absolute(location)}".encode()).hexdigest()[:32]
    path = settings().cache_dir / "columns" / f"{name}.sqlite"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [Path(f"{path}{suffix}") for suffix in _FILES]
    foreign = [file for file in (path.parent, *files) if os.path.lexists(file) and not is_own(file.lstat())]
    if foreign:
        _log.warning("Not used: %s, which others can write. Set ASSAY_CACHE_DIR to a folder of your own.", foreign[0])
        if path.parent in foreign:
            return None
        _remove(path)
    path.touch(mode=0o600)
    return path


def place_of(entry: FoundRecord) -> str:
    """Returns the key of a record's samples; it changes with their content."""
    record = entry.record
    state = record.digests.samples or record.created.isoformat()
    return hashlib.sha256("\n".join((entry.cell_uri, record.attempt, state)).encode()).hexdigest()


class HeldColumn:
    """A stored column without its texts and answers."""

    def __init__(self, number: int, questions: bytes, size: int, metrics: str, flags: bytes, texts: bytes) -> None:
        self.number = number
        self.questions = questions
        self.size = size
        self.metrics = [ColumnMetric(**metric) for metric in json.loads(metrics)]
        self.flags = flags
        self.texts = [texts[at : at + 16] for at in range(0, len(texts), 16)]


class KeptColumns:
    """Columns of a location of records, in memory without a path; thread-safe, and process-safe if in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._connection = _connected(path)
        except sqlite3.DatabaseError as error:
            if path is None or error.sqlite_errorcode not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise _unkept(path, error) from error
            _remove(path)
            self._connection = _connected(path)
        self._lock = threading.RLock()
        self._block = lru_cache(maxsize=_BLOCKS_IN_MEMORY)(self._read_block)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def missing(self, places: Sequence[str]) -> list[str]:
        """Returns the keys with samples that are not read yet."""
        with self._lock:
            known = {place for (place,) in self._connection.execute("select place from file")}
        return [place for place in places if place not in known]

    def take(self, place: str, columns: Mapping[str, Column], texts: Mapping[bytes, bytes]) -> None:
        """Stores the columns read for a key: all of them, or on an error none."""
        with self._writing() as connection:
            if connection.execute("select 1 from file where place = ?", (place,)).fetchone():
                return
            connection.executemany("insert or ignore into texts values (?, ?)", texts.items())
            for benchmark, column in columns.items():
                metrics = json.dumps([asdict(metric) for metric in column.metrics])
                held = connection.execute(
                    "insert into held values (?, ?, null, ?, ?, ?, ?, ?, ?)",
                    (place, benchmark, column.questions, column.size, metrics, column.scores, column.flags,
                     b"".join(column.texts)),
                ).lastrowid  # fmt: skip
                blocks = ((held, number, content) for number, content in enumerate(column.answers))
                connection.executemany("insert into answers values (?, ?, ?)", blocks)
            connection.execute("insert into file values (?)", (place,))

    def column(self, place: str, benchmark: str) -> HeldColumn | None:
        with self._lock:
            row = self._connection.execute(
                "select number, questions, size, metrics, flags, texts from held where place = ? and benchmark = ?",
                (place, benchmark),
            ).fetchone()
        return HeldColumn(*row) if row else None

    def scores(self, column: HeldColumn, metric: int) -> bytes:
        """Returns the scores of a column in a metric, as float32 bytes."""
        with self._lock:
            start, length = 4 * metric * column.size + 1, 4 * column.size
            cursor = self._connection.execute(
                "select substr(scores, ?, ?) from held where number = ?", (start, length, column.number)
            )
            return cursor.fetchone()[0]

    def texts(self, digest: bytes) -> bytes:
        return self._block("select content from texts where digest = ?", (digest,))

    def answers(self, column: HeldColumn, block: int) -> bytes:
        """Returns the answers of a block, a line per question."""
        return self._block("select content from answers where held = ? and block = ?", (column.number, block))

    def knows(self, digest: bytes) -> bool:
        with self._lock:
            return bool(self._connection.execute("select 1 from texts where digest = ?", (digest,)).fetchone())

    def _read_block(self, query: str, named: tuple[bytes | int, ...]) -> bytes:
        with self._lock:
            content = self._connection.execute(query, named).fetchone()[0]
        return zlib.decompress(content, wbits=31)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._connection.execute("begin immediate")
                yield self._connection
                self._connection.execute("commit")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._connection.execute("rollback")
                if isinstance(error, sqlite3.Error):
                    raise _unkept(self.path, error) from error
                raise


class TextKeeper:
    """Collects the texts of a file as it is read, by digest, if they are not stored yet; calls return the digest."""

    def __init__(self, kept: KeptColumns) -> None:
        self.new: dict[bytes, bytes] = {}
        self._kept = kept

    def __call__(self, content: bytes) -> bytes:
        digest = digest_of(content)
        if digest not in self.new and not self._kept.knows(digest):
            self.new[digest] = packed(content)
        return digest


def _connected(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path if path is not None else ":memory:", timeout=_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        if path is not None:
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = off")  # data lost in a crash of the machine is rebuilt
        connection.executescript(_TABLES)
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def make_room(path: Path) -> None:
    """Removes the least recently opened files in the folder of `path` until all fit in 8 GiB; skips files in use."""
    if path.exists():
        path.touch()
    files: list[tuple[float, int, Path]] = []
    for file in path.parent.glob("*.sqlite"):
        with suppress(FileNotFoundError):  # another process removes files too
            state = file.stat()
            files.append((state.st_mtime, state.st_size, file))
    total = 0
    for _, size, file in sorted(files, reverse=True):
        total += size
        if total > _MOST_BYTES and file != path and not _is_open(file):
            _remove(file)


def _is_open(path: Path) -> bool:
    try:
        with closing(sqlite3.connect(path, timeout=0)) as connection:
            connection.execute("pragma journal_mode = delete")
    except sqlite3.OperationalError:
        return True
    except sqlite3.DatabaseError:  # not a database, so not in use
        return False
    return False


def _unkept(path: Path | None, error: sqlite3.Error) -> StorageError:
    return StorageError(
        expected=f"to keep columns of questions in {path}",
        found=str(error),
        remedy="free some space there, or name another folder by ASSAY_CACHE_DIR",
    )


def _remove(path: Path) -> None:
    for suffix in _FILES:
        with suppress(FileNotFoundError):
            Path(f"{path}{suffix}").unlink()
