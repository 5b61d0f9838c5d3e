"""A folder of large entries that concurrent processes fill, use and evict, with a bound on its total size.

An entry `<key>/` has these siblings:

    <key>.lock       shared lock of the users and the filler of the entry; exclusive lock of an evicting process
    <key>.copying    exclusive lock of the filling process
    <key>.partial/   the content so far, with its planned size in bytes; kept after crashes
    <key>.used       last use, as a growing number
    <key>.note       the filler's note about it
    <key>.evicted/   content in removal

The locks are `flock`'s: the kernel releases them when their process ends. The order of use is a counter, not a time:
clocks jump, and a file system's access times may be disabled or rounded to a day.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from resources.errors import StorageError
from resources.storage import storage
from resources.storage.regular_files import read_cached

_OF_AN_ENTRY = re.compile(r"([0-9a-f]{32})(\.(lock|copying|partial|used|note))?")
_PLANNED = "planned_bytes"


class Hold:
    """Protects an entry from eviction until `release`, or until the process and its forks without `exec` end."""

    def __init__(self, path: Path, lock: IO[bytes], on_release: Callable[[], None]) -> None:
        self.path = path
        self._lock = lock
        self._on_release = on_release

    def release(self) -> None:
        """Allows eviction of the entry; may be called again."""
        if not self._lock.closed:
            self._on_release()
            self._lock.close()


class BoundedFolder:
    """Entries below `folder` with a total of at most `max_bytes`; other files are neither counted nor touched.

    Keys are 32 hex digits. Links have no size: entries of links are evicted when they are unused and room is needed.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def entry(self, key: str) -> Path:
        return self.folder / key

    def partial(self, key: str) -> Path:
        return self.folder / f"{key}.partial"

    def hold(self, key: str) -> Hold:
        """Protects an existing or future entry from eviction."""
        with storage.reported(str(self.folder), "use"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._locked(key, fcntl.LOCK_SH)
        assert lock is not None, "a lock that waits is always got"
        self._note_use(key)
        return Hold(self.entry(key), lock, lambda: self._note_use(key))

    @contextmanager
    def filling(self, key: str, *, waiting: Callable[[], None]) -> Iterator[None]:
        """Gives exclusive access for filling an entry that the caller holds.

        While another process fills it, `waiting` is called in a loop; it must pause, and may raise.
        """
        with (self.folder / f"{key}.copying").open("ab") as lock:
            while not _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                waiting()
            yield

    def make_room(self, key: str, planned_bytes: int) -> None:
        """Evicts unused entries, the least recently used first, until `key` fits, and reserves its room."""
        with storage.reported(str(self.folder), "make room in"), self._accounting(), ExitStack() as locks:
            idle: dict[str, int] = {}  # bytes by key
            held: dict[str, int] = {}
            to_come = planned_bytes - tree_bytes(self.partial(key))
            for other in self._keys() - {key}:
                lock = self._locked(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                present_bytes = tree_bytes(self.entry(other)) + tree_bytes(self.partial(other))
                if lock is not None:
                    locks.enter_context(lock)
                    idle[other] = present_bytes
                else:
                    held[other] = max(present_bytes, self.planned_bytes(other))
                    to_come += held[other] - present_bytes
            bounded = planned_bytes + sum(idle.values()) + sum(held.values()) - self.max_bytes
            free_bytes = shutil.disk_usage(self.folder).free
            excess = max(bounded, to_come - free_bytes) if planned_bytes else 0
            if excess > sum(idle.values()):
                raise self._no_room(planned_bytes, to_come, free_bytes, held)
            for other in sorted(idle, key=self._last_used):
                if excess > 0 or not idle[other]:
                    self._remove(other)
                    excess -= idle[other]
            self.partial(key).mkdir(exist_ok=True)
            storage.write_bytes(str(self.partial(key) / _PLANNED), str(planned_bytes).encode())

    def planned_bytes(self, key: str) -> int:
        """Returns the planned size of a partial entry; 0 if unknown."""
        return _read_number(self.partial(key) / _PLANNED)

    def note(self, key: str) -> bytes | None:
        try:
            return read_cached(self.folder / f"{key}.note")
        except OSError:
            return None

    def set_note(self, key: str, note: bytes) -> None:
        if note:
            storage.write_bytes(str(self.folder / f"{key}.note"), note)
        else:
            (self.folder / f"{key}.note").unlink(missing_ok=True)

    def publish(self, key: str, content: Path, *, note: bytes = b"") -> None:
        """Turns `content`, a folder inside the partial entry, into the entry. Only for the filling process."""
        with storage.reported(str(self.folder), "complete a copy in"):
            _sync_folder(content)
            self.set_note(key, note)
            content.rename(self.entry(key))
            _sync_folder(self.folder)
            shutil.rmtree(self.partial(key))

    def discard(self, key: str) -> None:
        """Removes a damaged entry. Only for the filling process."""
        with storage.reported(str(self.folder), "remove a damaged copy from"), self._accounting():
            self._remove_tree(key)

    @contextmanager
    def _accounting(self) -> Iterator[None]:
        with (self.folder / "room.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for remains in self.folder.glob("*.evicted"):
                shutil.rmtree(remains)
            yield

    def _locked(self, key: str, operation: int) -> IO[bytes] | None:
        path = self.folder / f"{key}.lock"
        while True:
            lock = path.open("ab")
            if not _flock(lock, operation):
                lock.close()
                return None
            with suppress(FileNotFoundError):
                if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                    return lock
            lock.close()  # removed with its entry between opening and locking

    def _keys(self) -> set[str]:
        matches = (_OF_AN_ENTRY.fullmatch(path.name) for path in self.folder.iterdir())
        return {match[1] for match in matches if match}

    def _last_used(self, key: str) -> int:
        return _read_number(self.folder / f"{key}.used")

    def _note_use(self, key: str) -> None:
        with suppress(OSError, StorageError), self._accounting():  # only the order of eviction depends on it
            latest = max(map(self._last_used, self._keys()), default=0)
            storage.write_bytes(str(self.folder / f"{key}.used"), str(latest + 1).encode())

    def _remove(self, key: str) -> None:
        self._remove_tree(key)
        if self.partial(key).exists():
            shutil.rmtree(self.partial(key))
        for suffix in ("used", "note", "copying", "lock"):
            (self.folder / f"{key}.{suffix}").unlink(missing_ok=True)

    def _remove_tree(self, key: str) -> None:
        evicted = self.folder / f"{key}.evicted"
        with suppress(FileNotFoundError):
            self.entry(key).rename(evicted)
            shutil.rmtree(evicted)

    def _no_room(self, planned_bytes: int, to_come: int, free_bytes: int, held: dict[str, int]) -> StorageError:
        named = ", ".join(f"{key[:12]} ({size_text(size_bytes)})" for key, size_bytes in held.items())
        return StorageError(
            expected=f"room for {size_text(planned_bytes)}, {size_text(to_come)} of it still to come, in {self.folder}",
            found=f"a bound of {size_text(self.max_bytes)}, {size_text(free_bytes)} free on the disk, "
            f"and in use: {named or 'nothing'}",
            remedy="raise the bound, free the disk, use a folder on a larger disk, or wait until entries are released",
        )


def size_text(size_bytes: int) -> str:
    """Formats a size in decimal units."""
    size, units = float(size_bytes), ["B", "kB", "MB", "GB"]
    while abs(size) >= 1000 and units[1:]:
        size, units = size / 1000, units[1:]
    return f"{size:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def _flock(lock: IO[bytes], operation: int) -> bool:
    try:
        fcntl.flock(lock, operation)
    except BlockingIOError:
        return False
    return True


def tree_bytes(folder: Path) -> int:
    """Returns the total size of the files below a folder; 0 if it does not exist."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a partial file was just renamed
                status = (Path(root) / name).lstat()
                total += 0 if stat.S_ISLNK(status.st_mode) else status.st_size
    return total


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
