"""Files of checkpoints that stay readable when a trainer removes the checkpoint: open files, or else copies.

A removed file has its content for as long as a process has it open, on the file systems in `_KEEPING`. Opening changes
nothing that a listing shows (a hard link would change a file's times), and ends with the process. On others, such as
NFS, which leaves a removed file in its folder while it is open, checkpoints of a run of the last day are copied in the
background, into files without a name. A held checkpoint is a folder in `kept` of the staging folder, with links to
the open files (`/proc/1/fd/2`), by which other processes of the user on this machine open them too.

transformers removes checkpoints by `shutil.rmtree` (rotate_checkpoints in trainer_utils.py).
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import IO

from pools.weights.adapters.folder import base_location
from pools.weights.content import hash_of
from pools.weights.formats import ADAPTER_CONFIG, read_json
from pools.weights.merges import locations_of, merge_of, with_each_location, with_options
from pools.weights.model_files import ModelDigests, ModelFolder, checkpoint_files, served_files
from pools.weights.overrides import override_of, without_options
from resources.errors import AssayError, StorageError
from resources.settings import settings
from resources.storage import storage
from resources.storage.bounded_folder import size_text
from resources.storage.file_copy import CopyStopped
from resources.storage.regular_files import open_within, real_path

_KEEPING = frozenset(["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"])
_TRAINING_SECONDS = 24 * 3600.0  # a run without changes for so long has no trainer that removes anything
_BLOCK_BYTES = 2**25
_MOST_OPEN = 2**16


def keeps_removed_files(folder: Path) -> bool:
    """Returns True if a folder is on a file system that keeps removed files while they are open, and hides them."""
    with suppress(OSError, ValueError):
        mounts = [line.split()[1:3] for line in reversed(Path("/proc/self/mounts").read_text().splitlines())]
        named = [(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), at), kind) for at, kind in mounts]
        around = [(len(at), kind) for at, kind in named if folder.is_relative_to(at)]
        return max(around, key=itemgetter(0))[1] in _KEEPING  # of two at the same place the later covers the earlier
    return False


@dataclass(eq=False)
class _Kept:
    users: set[str] = field(default_factory=set)
    held: ExitStack = field(default_factory=ExitStack)
    size_bytes: int = 0


class Keeper:
    """Keeps checkpoints until nothing wants them, or the end of the `with` block.

    `on_unprotected` gets the reason for the first checkpoint that cannot be kept. `by_opening` returns True for folders
    with files that are kept open, and False for folders that are copied.
    """

    def __init__(
        self, on_unprotected: Callable[[str], object], *, by_opening: Callable[[Path], bool] = keeps_removed_files
    ) -> None:
        self._on_unprotected = on_unprotected
        self._by_opening = by_opening
        self._kept: dict[str, _Kept] = {}
        self._changing = threading.RLock()
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="keep")

    def __enter__(self) -> Keeper:
        _clear_left_over()
        return self

    def __exit__(self, *_: object) -> None:
        for user in {user for kept in self._kept.values() for user in kept.users}:
            self.release(user)
        self._copying.shutdown(cancel_futures=True)

    def keep(self, folder: ModelFolder, digests: ModelDigests, *, wanted_by: str) -> None:
        """Keeps the local files of a complete checkpoint until the release of all users with the names `wanted_by`."""
        if folder.kind != "huggingface" or not (places := _places(folder.uri)):
            return
        key = _key(places, digests)
        with self._changing:
            kept = self._kept.setdefault(key, _Kept())
            known = bool(kept.users)
            kept.users.add(wanted_by)
        if known:
            return
        files = _files_of(folder, places)
        with suppress(OSError):  # it is being removed
            if all(map(self._by_opening, {path.parent for path in files.values()})):
                self._hold(key, kept, files, Path(places[0]), _opened)
            elif time.time() - max(folder.modified, Path(places[0]).parent.stat().st_mtime) < _TRAINING_SECONDS:
                _staging_folder().mkdir(parents=True, exist_ok=True)
                self._copying.submit(self._hold, key, kept, files, _staging_folder(), partial(_copied, kept))

    def release(self, user: str) -> None:
        """Ends the interest of a user, for example after its record is written."""
        with self._changing:
            for key, kept in list(self._kept.items()):
                kept.users.discard(user)
                if not kept.users:
                    del self._kept[key]
                    kept.held.close()

    def _hold(
        self, key: str, kept: _Kept, files: Mapping[str, Path], disk: Path, opened: Callable[[Path], IO[bytes]]
    ) -> None:
        try:
            self._reserve(kept, disk, sum(path.stat().st_size for path in files.values()))
            with ExitStack() as held:
                held.enter_context(_linked_from_a_folder(key, {name: partial(opened, files[name]) for name in files}))
                with self._changing:
                    if kept.users:
                        kept.held.enter_context(held.pop_all())
        except CopyStopped:
            return
        except (OSError, AssayError) as error:
            kept.size_bytes = 0
            self._on_unprotected(error.found if isinstance(error, AssayError) else str(error))
            self._on_unprotected = str

    def _reserve(self, kept: _Kept, disk: Path, size_bytes: int) -> None:
        with self._changing:
            bound = min(settings().staging_max_bytes, shutil.disk_usage(disk).free // 2)
            kept_bytes = sum(each.size_bytes for each in self._kept.values())
            if kept_bytes + size_bytes > bound:
                raise StorageError(
                    expected=f"room for {size_text(size_bytes)} more of kept checkpoints on the disk of {disk}",
                    found=f"{size_text(kept_bytes)} kept, a bound of {size_text(bound)}, at most half of the free disk",
                    remedy="free the disk, raise ASSAY_STAGING_MAX_BYTES, or evaluate fewer checkpoints at a time",
                )
            kept.size_bytes = size_bytes


_keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def keeping(on_unprotected: Callable[[str], object]) -> Iterator[None]:
    """Lets `keep` keep checkpoints in the block; inside another such block, until the end of that block."""
    if _keeper.get() is not None:
        yield
        return
    with Keeper(on_unprotected) as keeper:
        token = _keeper.set(keeper)
        try:
            yield
        finally:
            _keeper.reset(token)


def keep(folder: ModelFolder, digests: ModelDigests, *, wanted_by: str) -> None:
    """Does the same as `Keeper.keep`, inside `keeping`; else nothing."""
    if (keeper := _keeper.get()) is not None:
        keeper.keep(folder, digests, wanted_by=wanted_by)


def release(user: str) -> None:
    """Does the same as `Keeper.release`, inside `keeping`; else nothing."""
    if (keeper := _keeper.get()) is not None:
        keeper.release(user)


@contextmanager
def kept_location(uri: str, digests: ModelDigests) -> Iterator[str]:
    """Yields a location with kept files in place of a checkpoint's own; the location itself if they are not kept.

    In the block this process has its own hold of them, after others release it too. `digests` is what the
    plan has.
    """
    places = _places(uri)
    key = _key(places, digests)
    with ExitStack() as own:
        for held in sorted(_staging_folder().glob(f"{key}.*")) if places else ():
            with suppress(OSError):  # released just now, or left by a process that was killed
                links = [path for path in held.rglob("*") if path.is_symlink()]
                files = {str(link.relative_to(held)): partial(_opened, Path(real_path(link))) for link in links}
                folder = own.enter_context(_linked_from_a_folder(key, files))
                uri = _kept_name(uri, {place: str(folder / str(number)) for number, place in enumerate(places)})
                break
        yield uri


@contextmanager
def _linked_from_a_folder(key: str, files: Mapping[str, Callable[[], IO[bytes]]]) -> Iterator[Path]:
    with ExitStack() as held:
        _staging_folder().mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".", dir=_staging_folder()))
        held.callback(shutil.rmtree, made, ignore_errors=True)
        lock = held.enter_context((made / "lock").open("wb"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, opened in files.items():
            file = held.enter_context(opened())
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        folder = made.rename(made.with_name(f"{key}{made.name}"))
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def _clear_left_over() -> None:
    for folder in _staging_folder().glob("[0-9a-f]*.*"):
        with suppress(OSError), (folder / "lock").open("rb+") as lock:  # `BlockingIOError` if its process lives
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _opened(path: Path) -> IO[bytes]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MOST_OPEN and soft != hard:
        soft = min(hard, _MOST_OPEN) if hard >= 0 else _MOST_OPEN
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    file = open_within(path)
    try:  # smaller numbers are left to all others, and to select()
        lowest = min(1024, soft // 2) if soft >= 0 else 1024
        return os.fdopen(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, lowest), "rb", buffering=0)
    finally:
        os.close(file)


def _copied(kept: _Kept, source: Path) -> IO[bytes]:
    copy = tempfile.TemporaryFile(dir=_staging_folder())  # noqa: SIM115 - the caller closes it
    with _opened(source) as read:
        while block := read.read(_BLOCK_BYTES):
            if not kept.users:
                raise CopyStopped
            copy.write(block)
    copy.flush()
    return copy


def _kept_name(uri: str, kept: Mapping[str, str]) -> str:
    if (merge := merge_of(uri)) is not None:
        return str(merge.with_locations(lambda each: _kept_name(each, kept)))
    name, override = with_each_location(uri, partial(_instead, kept)), override_of(uri)
    place = storage.resolved(without_options(uri))
    if place not in kept or (override and override.base):
        return name
    config = {file.uri: file for file in checkpoint_files(kept[place])}.get(f"{kept[place]}/{ADAPTER_CONFIG}")
    return with_options(name, base=base_location(place, read_json(config, []))) if config else name


def _instead(kept: Mapping[str, str], location: str) -> str:
    return kept.get(storage.resolved(location), location)


def _places(uri: str) -> list[str]:
    return list(dict.fromkeys(storage.resolved(each) for each in locations_of(uri) if storage.is_local(each)))


def _key(places: Collection[str], digests: ModelDigests) -> str:
    return hash_of(digests.checkpoint.encode(), *map(os.fsencode, places))


def _files_of(folder: ModelFolder, places: list[str]) -> dict[str, Path]:
    own = folder.inputs if merge_of(folder.uri) else (folder,)
    return {
        f"{places.index(place)}/{name}": Path(real_path(storage.local_path(file.place)))
        for each in own
        for place in _places(each.uri)
        for name, file in served_files(each).items()
        if storage.is_local(file.uri)
    }


def _staging_folder() -> Path:
    return settings().staging_dir / "kept"
