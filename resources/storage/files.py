"""Files that are replaced atomically, so that readers never see partial content; locks; ends of logs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Any

from resources.storage.regular_files import UnsafeFile, open_within

_TAIL_BYTES = 1 << 20
_ASIDE = re.compile(r"\..+\.[a-z0-9_]{8}\.partial")
_ABANDONED_SECONDS = 600.0


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a file's content with a JSON object."""
    replace_text(path, json.dumps(content))


def replace_text(path: Path, text: str) -> None:
    """Replaces a file's content with a text."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    unfinished.write_text(text)
    unfinished.replace(path)


def tail(path: Path, max_lines: int) -> str:
    """Returns the last lines of a file, at most 1 MB; empty if it is missing or no regular file."""
    try:
        with os.fdopen(open_within(path), "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except (FileNotFoundError, UnsafeFile):
        return ""
    return "\n".join(lines[-max_lines:] if max_lines > 0 else [])


@contextmanager
def written_aside(path: Path, content: bytes, *, mode: int) -> Iterator[Path]:
    """Provides the content, synced to disk next to `path` under a temporary name that is removed afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with suppress(OSError):  # a store without locks, a folder that cannot be listed
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _sweep(path.parent)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(mode)
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def remove_oldest(folder: Path, *, most_files: int, most_bytes: int) -> None:
    """Removes the files directly in a folder that were written first, until at most so many files and bytes stay."""
    held = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            status = path.lstat()
            held += [(status.st_mtime_ns, status.st_size, path)] if S_ISREG(status.st_mode) else []
    total_bytes = 0
    for place, (_, size, path) in enumerate(sorted(held, reverse=True)):
        total_bytes += size
        if place >= most_files or total_bytes > most_bytes:
            path.unlink(missing_ok=True)


@lru_cache(maxsize=1024)
def _sweep(folder: Path) -> None:
    now = folder.stat().st_mtime  # the store's own clock: a file was just created in it
    for path in folder.iterdir():
        if _ASIDE.fullmatch(path.name):
            with suppress(OSError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_mtime < now - _ABANDONED_SECONDS:  # a younger file may not be locked yet
                    path.unlink()


@contextmanager
def locked(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Allows a single process at a time into the block; calls `waiting` if it must wait for another process.

    Subprocesses that inherit all files keep the lock until they end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.set_inheritable(descriptor, True)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
