"""A folder of large entries that several processes fill, use and empty, and that never outgrows its bound.

Beside each entry `<key>/` lie, named after the same key:

    <key>.lock       shared lock for as long as somebody uses the entry or fills it; who empties it takes it exclusively
    <key>.copying    exclusive lock of the one who fills it
    <key>.partial/   what was filled so far, with the bytes it will have in the end; kept over crashes
    <key>.used       when it was last used, as a number that only grows
    <key>.note       what its filler noted of it
    <key>.evicted/   what is being removed

The locks are `flock`'s: the kernel ends them with their process. Order of use is a counter and no time, since clocks
jump, and a file system's access times may be off or rounded to a day.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from resources.errors import StorageError
from resources.storage import storage
from resources.storage.regular_files import read_cached

_OF_AN_ENTRY = re.compile(r"([0-9a-f]{32})(\.(lock|copying|partial|used|note))?")
_PLANNED = "planned_bytes"


class Hold:
    """The right to find an entry where it is. Ends with `release`, or with the process.

    A child made by `fork` without `exec` shares it.
    """

    def __init__(self, path: Path, lock: IO[bytes], on_release: Callable[[], None]) -> None:
        self.path = path
        self._lock = lock
        self._on_release = on_release

    def release(self) -> None:
        """Lets the entry be evicted. May be called again."""
        if not self._lock.closed:
            self._on_release()
            self._lock.close()


@dataclass(frozen=True)
class _Entry:
    key: str
    size_bytes: int
    last_used: int


class BoundedFolder:
    """Entries below `folder`, at most `max_bytes` of them together.

    Keys are 32 hex digits. Whatever else lies in the folder is neither counted nor touched. Links have no size: entries
    of links alone go as soon as nobody holds them and room is made for another one.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def entry(self, key: str) -> Path:
        """Returns the path of an entry, if it is whole."""
        return self.folder / key

    def partial(self, key: str) -> Path:
        """Returns the path at which it grows, for the one who fills it."""
        return self.folder / f"{key}.partial"

    def hold(self, key: str) -> Hold:
        """Keeps an entry, there or not yet there, from being evicted."""
        with self._reported("use"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._locked(key, fcntl.LOCK_SH)
        assert lock is not None, "a lock that waits is always got"
        self._note_use(key)
        return Hold(self.entry(key), lock, lambda: self._note_use(key))

    @contextmanager
    def filling(self, key: str, *, waiting: Callable[[], None]) -> Iterator[None]:
        """The right to fill an entry that the caller holds, as the only one.

        Args:
            key: the entry.
            waiting: called again and again while another one fills it; waits a moment itself, and may raise.
        """
        with (self.folder / f"{key}.copying").open("ab") as lock:
            while not _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                waiting()
            yield

    def make_room(self, key: str, planned_bytes: int) -> None:
        """Removes entries that nobody holds, the least recently used first, until `key` fits, and reserves its room."""
        with self._reported("make room in"), self._accounting(), ExitStack() as locks:
            idle: list[_Entry] = []
            held: list[_Entry] = []
            to_come = planned_bytes - tree_bytes(self.partial(key))
            for other in self._keys() - {key}:
                lock = self._locked(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = tree_bytes(self.entry(other)) + tree_bytes(self.partial(other))
                if lock is not None:
                    locks.enter_context(lock)
                    idle.append(_Entry(other, found, self._last_used(other)))
                else:
                    size = max(found, self.planned_bytes(other))
                    held.append(_Entry(other, size, 0))
                    to_come += size - found
            bounded = planned_bytes + sum(entry.size_bytes for entry in idle + held) - self.max_bytes
            free_bytes = shutil.disk_usage(self.folder).free
            excess = max(bounded, to_come - free_bytes) if planned_bytes else 0
            if excess > sum(entry.size_bytes for entry in idle):
                raise self._no_room(planned_bytes, to_come, free_bytes, held)
            for entry in sorted(idle, key=lambda entry: entry.last_used):
                if excess > 0 or not entry.size_bytes:
                    self._remove(entry.key)
                    excess -= entry.size_bytes
            self.partial(key).mkdir(exist_ok=True)
            storage.write_bytes(str(self.partial(key) / _PLANNED), str(planned_bytes).encode())

    def planned_bytes(self, key: str) -> int:
        """Returns the size that an entry in the making will have; 0 if that is not known."""
        return _read_number(self.partial(key) / _PLANNED)

    def note(self, key: str) -> bytes | None:
        """Returns what was noted of an entry when it was published."""
        try:
            return read_cached(self.folder / f"{key}.note")
        except OSError:
            return None

    def publish(self, key: str, content: Path, *, note: bytes = b"") -> None:
        """Makes `content`, a folder in the partial one, the entry. Only for the one who fills it."""
        with self._reported("complete a copy in"):
            _sync_folder(content)
            storage.write_bytes(str(self.folder / f"{key}.note"), note)
            content.rename(self.entry(key))
            _sync_folder(self.folder)
            shutil.rmtree(self.partial(key))

    def discard(self, key: str) -> None:
        """Removes an entry that turned out to be damaged. Only for the one who fills it."""
        with self._reported("remove a damaged copy from"), self._accounting():
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
            lock.close()  # it was removed with its entry between opening and locking

    def _keys(self) -> set[str]:
        matches = (_OF_AN_ENTRY.fullmatch(path.name) for path in self.folder.iterdir())
        return {match[1] for match in matches if match}

    def _last_used(self, key: str) -> int:
        return _read_number(self.folder / f"{key}.used")

    def _note_use(self, key: str) -> None:
        with suppress(OSError, StorageError), self._accounting():  # it matters for the order only
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

    def _no_room(self, planned_bytes: int, to_come: int, free_bytes: int, held: list[_Entry]) -> StorageError:
        named = ", ".join(f"{entry.key[:12]} ({size_text(entry.size_bytes)})" for entry in held)
        return StorageError(
            expected=f"room for {size_text(planned_bytes)}, {size_text(to_come)} of it still to come, in {self.folder}",
            found=f"a bound of {size_text(self.max_bytes)}, {size_text(free_bytes)} free on the disk, "
            f"and in use: {named or 'nothing'}",
            remedy="raise the bound, free the disk, name a folder on a larger one, or wait until what is in use ends",
        )

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                expected=f"to {doing} {self.folder}", found=str(error), remedy="check that it is yours, and not full"
            ) from error


def size_text(size_bytes: int) -> str:
    """A size for people, in decimal units."""
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
    """The sizes of all files below a folder; 0 if it is not there."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a partial file that just got its name
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
