"""Files of checkpoints that stay readable when a trainer removes the checkpoint: hard links, or else copies.

A kept checkpoint is an entry of a `BoundedFolder`, with a folder of files for each of its locations. Hard links need
the same disk: the entry lies in the staging folder, if that is on it, or in `.assay-kept` of the outermost folder above
the checkpoint that is on it and only this user's. Without links, checkpoints of a run of the last day are copied in the
background. An entry stays while a process holds it; those of killed processes are removed with the next. transformers
removes checkpoints by `shutil.rmtree` (rotate_checkpoints in trainer_utils.py), which other names of the files survive.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from pools.weights.adapters.folder import base_location
from pools.weights.content import hash_of, linking
from pools.weights.formats import ADAPTER_CONFIG, read_json
from pools.weights.merges import locations_of, merge_of, with_each_location, with_options
from pools.weights.model_files import ModelDigests, ModelFolder, served_files
from pools.weights.overrides import override_of, without_options
from resources.errors import AssayError, StorageError
from resources.settings import settings
from resources.storage import storage
from resources.storage.bounded_folder import BoundedFolder, Hold, size_text
from resources.storage.file_copy import CopyStopped
from resources.storage.listings import KEPT_FOLDER
from resources.storage.regular_files import open_within

_TRAINING_SECONDS = 24 * 3600.0  # a run without changes for so long has no trainer that removes anything
_BLOCK_BYTES = 2**25


class Keeper:
    """Keeps checkpoints until nothing wants them, or the end of the `with` block.

    `on_unprotected` gets the reason for the first checkpoint that cannot be kept.
    """

    def __init__(self, on_unprotected: Callable[[str], object]) -> None:
        self._on_unprotected = on_unprotected
        self._wanted_by: dict[str, set[str]] = {}
        self._held: dict[str, tuple[BoundedFolder, str, Hold]] = {}
        self._sizes: dict[str, int] = {}
        self._changing = threading.RLock()
        self._closed = threading.Event()
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._cleared: set[Path] = set()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._copying.shutdown(cancel_futures=True)
        for key in list(self._held):
            self._let_go(key)
        for place in self._cleared:  # engines that had an entry until they ended
            _clear(BoundedFolder(place, max_bytes=0))

    def keep(self, folder: ModelFolder, digests: ModelDigests, *, wanted_by: Collection[str]) -> bool:
        """Keeps the local files of a complete checkpoint; returns True if they were linked, which changes their times.

        `wanted_by` are names of its users; see `release`.
        """
        if folder.kind != "huggingface" or not wanted_by or not (places := _places(folder.uri)):
            return False
        key = _key(places, digests)
        with self._changing:
            known = key in self._wanted_by
            self._wanted_by.setdefault(key, set()).update(wanted_by)
        if known:
            return False
        files = _files_of(folder, places)
        with suppress(AssayError):  # no room
            for outer in _folders_near(Path(places[0])):
                with suppress(OSError):  # another file system, or another user's files
                    self._hold(key, outer, files, partial(os.link, follow_symlinks=False))
                    return True
        with suppress(OSError):
            if time.time() - max(folder.modified, Path(places[0]).parent.stat().st_mtime) < _TRAINING_SECONDS:
                self._copying.submit(self._copy, key, files)
        return False

    def release(self, user: str) -> None:
        """Ends the interest of a user, for example after its record is written."""
        with self._changing:
            for key, users in self._wanted_by.items():
                users.discard(user)
                if not users and key in self._held:
                    self._let_go(key)

    def _copy(self, key: str, files: Mapping[str, Path]) -> None:
        def copy(source: Path, target: Path) -> None:
            with os.fdopen(open_within(source), "rb") as read, target.open("xb") as write:
                while block := read.read(_BLOCK_BYTES):
                    if self._closed.is_set() or not self._wanted_by[key]:
                        raise CopyStopped
                    write.write(block)

        try:
            self._hold(key, _staging_folder(), files, copy)
        except CopyStopped:
            return
        except (OSError, AssayError) as error:
            self._on_unprotected(error.found if isinstance(error, AssayError) else str(error))
            self._on_unprotected = str

    def _hold(self, key: str, place: Path, files: Mapping[str, Path], put: Callable[[Path, Path], None]) -> None:
        place.mkdir(parents=True, exist_ok=True)
        folder = BoundedFolder(place, max_bytes=0, ordered=False)
        if place not in self._cleared:
            self._cleared.add(place)
            _clear(folder)
        hold = folder.hold(key)
        try:
            with folder.filling(key, waiting=self._wait), ExitStack() as known:
                self._reserve(key, place, sum(path.stat().st_size for path in files.values()))
                if not folder.entry(key).is_dir():  # nothing is synced: after a crash of the machine it is removed
                    shutil.rmtree(folder.partial(key), ignore_errors=True)
                    for name, source in files.items():
                        (folder.partial(key) / name).parent.mkdir(parents=True, exist_ok=True)
                        known.enter_context(linking(source, folder.entry(key) / name))
                        put(source, folder.partial(key) / name)
                    note = json.dumps({name: os.fspath(source) for name, source in files.items()})
                    (place / f"{key}.note").write_text(note)
                    folder.partial(key).rename(folder.entry(key))
        except BaseException:
            self._sizes.pop(key, None)
            _let_go(folder, key, hold)
            raise
        with self._changing:
            self._held[key] = folder, key, hold
            if not self._wanted_by[key]:
                self._let_go(key)

    def _reserve(self, key: str, place: Path, size_bytes: int) -> None:
        with self._changing:
            bound = min(settings().staging_max_bytes, shutil.disk_usage(place).free // 2)
            kept_bytes = sum(self._sizes.values())
            if kept_bytes + size_bytes > bound:
                raise StorageError(
                    expected=f"room for {size_text(size_bytes)} more of checkpoints that are kept in {place}",
                    found=f"{size_text(kept_bytes)} kept, a bound of {size_text(bound)}, at most half of the free disk",
                    remedy="free the disk, raise ASSAY_STAGING_MAX_BYTES, or evaluate fewer checkpoints at a time",
                )
            self._sizes[key] = size_bytes

    def _let_go(self, key: str) -> None:
        self._sizes.pop(key, None)
        _let_go(*self._held.pop(key))

    def _wait(self) -> None:
        if self._closed.wait(0.05):
            raise CopyStopped


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


def keep(folder: ModelFolder, digests: ModelDigests, *, wanted_by: Collection[str]) -> bool:
    """Does the same as `Keeper.keep`, inside `keeping`; else nothing."""
    return (keeper := _keeper.get()) is not None and keeper.keep(folder, digests, wanted_by=wanted_by)


def release(user: str) -> None:
    """Does the same as `Keeper.release`, inside `keeping`; else nothing."""
    if (keeper := _keeper.get()) is not None:
        keeper.release(user)


def hold_kept(uri: str, digests: ModelDigests) -> tuple[str, Callable[[], None]]:
    """Returns a location with kept files in place of a checkpoint's own, and the function that releases them.

    Returns the location itself if they are not kept. The digests are those of the plan.
    """
    places = _places(uri)
    key = _key(places, digests)
    for outer in [_staging_folder(), *(each / KEPT_FOLDER for each in Path(places[0]).parents)] if places else ():
        entry, let_go = outer / key, _nothing
        if not entry.is_dir():
            continue
        with suppress(StorageError):  # of another user
            folder = BoundedFolder(outer, max_bytes=0, ordered=False)
            let_go = partial(_let_go, folder, key, folder.hold(key))
        if entry.is_dir():
            kept = {place: str(entry / str(number)) for number, place in enumerate(places)}
            return _kept_name(uri, kept), let_go
        let_go()
    return uri, _nothing


def _kept_name(uri: str, kept: Mapping[str, str]) -> str:
    if (merge := merge_of(uri)) is not None:
        return str(merge.with_locations(lambda each: _kept_name(each, kept)))
    name, override = with_each_location(uri, partial(_instead, kept)), override_of(uri)
    place = storage.resolved(without_options(uri))
    if place not in kept or (override and override.base):
        return name
    config = {file.uri: file for file in storage.list_folder(kept[place])}.get(f"{kept[place]}/{ADAPTER_CONFIG}")
    return with_options(name, base=base_location(place, read_json(config, []))) if config else name


def _instead(kept: Mapping[str, str], location: str) -> str:
    return kept.get(storage.resolved(location), location)


def _nothing() -> None: ...


def _let_go(folder: BoundedFolder, key: str, hold: Hold) -> None:
    hold.release()
    _clear(folder, key)


def _places(uri: str) -> list[str]:
    return list(dict.fromkeys(storage.resolved(each) for each in locations_of(uri) if storage.is_local(each)))


def _key(places: Collection[str], digests: ModelDigests) -> str:
    return hash_of(digests.checkpoint.encode(), *map(os.fsencode, places))


def _files_of(folder: ModelFolder, places: list[str]) -> dict[str, Path]:
    own = folder.inputs if merge_of(folder.uri) else (folder,)
    return {
        f"{places.index(place)}/{name}": storage.local_path(file.place).resolve()
        for each in own
        for place in _places(each.uri)
        for name, file in served_files(each).items()
        if storage.is_local(file.uri)
    }


def _staging_folder() -> Path:
    return settings().staging_dir / "kept"


def _folders_near(place: Path) -> Iterator[Path]:
    with suppress(OSError):
        disk = place.stat().st_dev
        settings().staging_dir.mkdir(parents=True, exist_ok=True)
        if settings().staging_dir.stat().st_dev == disk:
            yield _staging_folder()
        for outer in list(reversed(place.parents))[1:]:
            status = outer.stat()
            own = status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH
            if own and status.st_dev == disk and os.access(outer, os.W_OK):
                yield outer / KEPT_FOLDER


def _clear(folder: BoundedFolder, *keys: str) -> None:
    @contextmanager
    def removing(key: str) -> Iterator[None]:
        with ExitStack() as known:
            with suppress(ValueError, AttributeError, TypeError):
                for source in json.loads(folder.note(key) or b"{}").values():
                    known.enter_context(linking(Path(source)))
            yield

    with suppress(OSError, StorageError):
        folder.clear(*keys, removing=removing)
        if [path.name for path in folder.folder.iterdir()] == ["room.lock"]:
            (folder.folder / "room.lock").unlink()
            folder.folder.rmdir()
