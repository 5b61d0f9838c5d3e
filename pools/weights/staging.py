"""Checkpoints as local folders with exactly the digested files, for engines that read files.

A local checkpoint becomes a folder of links to its files, a checkpoint in an object store is copied, and a merged
checkpoint is computed. Copies are named after the digest of the checkpoint, appear only when complete and verified, are
shared by the processes of a machine, and are evicted for new copies unless held. Retrying is up to the caller: every
call continues the previous call's work.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from weakref import WeakSet

from pools.weights.checkpoint_copy import (
    Filling,
    Progress,
    copy_checkpoint,
    copy_small_files,
    require_planned,
    verify_small_files,
)
from pools.weights.content import file_identity
from pools.weights.kept import kept_location
from pools.weights.layouts import inspect_checkpoint
from pools.weights.making import make_checkpoint, python_with_torch
from pools.weights.merges import merge_of
from pools.weights.model_files import (
    ModelDigests,
    ModelFolder,
    digest_model_folder,
    inspect_model_folder,
    inspect_staged_folder,
    served_files,
)
from pools.weights.overrides import without_options
from resources.errors import AssayError, CheckpointError, StorageError
from resources.process_marks import boot_id
from resources.storage import storage
from resources.storage.bounded_folder import BoundedFolder, Hold, tree_bytes
from resources.storage.file_copy import RANGE_BYTES, CopyStopped
from resources.storage.regular_files import real_path

_LOOK_AGAIN_SECONDS = 0.1  # flock has no time-out; polling costs microseconds
_GIVE_WAY_SECONDS = 30.0  # time for the prefetch to finish its ranges; then both copy at once

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedFolder:
    """A local model folder that is not evicted before `release`, or the end of the `with` block.

    `verify` raises if it differs from the plan. `release` is idempotent, and never touches files of a local checkpoint.
    """

    path: Path
    verify: Callable[[], None]
    release: Callable[[], None]

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True)
class _PlannedCheckpoint:
    uri: str
    digests: ModelDigests
    folder: ModelFolder | None = field(default=None, compare=False)  # inspected already


class Staging:
    """Local copies below `folder`, which processes of a machine may share. Close it, or use it in a `with` block.

    Args:
        max_bytes: limit of all copies; copies in progress count with their final size. Tokenizers from
            `stage_small_files` are not counted.
        parallel_files: files of a checkpoint that are read at once.
        range_bytes: bytes of a file that are read at once; the most that a crash loses.
        python: returns an interpreter with torch and transformers, for weights that are made by their functions.
        trusted: True if code in checkpoints may run, as exporters of frameworks can.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        parallel_files: int = 4,
        range_bytes: int = RANGE_BYTES,
        python: Callable[[], Path] = python_with_torch,
        trusted: bool = False,
    ) -> None:
        self._copies = BoundedFolder(folder, max_bytes=max_bytes)
        self._filling = partial(Filling, parallel_files=parallel_files, range_bytes=range_bytes)
        self._make = partial(make_checkpoint, python=python, trusted=trusted)
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._queued: _PlannedCheckpoint | None = None
        self._prefetching: _PlannedCheckpoint | None = None
        self._give_way = threading.Event()
        self._copies_wanted_now = 0
        self._thread: threading.Thread | None = None
        self._syncing: WeakSet[threading.Thread] = WeakSet()  # forgets ended threads

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stage(self, uri: str, digests: ModelDigests, *, on_progress: Progress | None = None) -> StagedFolder:
        """Returns the checkpoint in a local folder: of links if it is local, else an existing or new copy.

        A merged checkpoint is computed, from copies of its remote inputs, which need additional space. Weights that no
        engine reads are made into safetensors. Kept files replace those of a local checkpoint; see `kept`. If another
        thread or process is copying already, waits for it. `digests` are those of the plan.
        """
        with ExitStack() as held:
            kept = held.enter_context(kept_location(uri, digests))
            try:
                staged = self._stage(kept, digests, on_progress)
            except CheckpointError:
                if kept == uri:
                    raise
                staged = self._stage(uri, digests, on_progress)
            held.callback(staged.release)
            return replace(staged, release=held.pop_all().close)

    def _stage(self, uri: str, digests: ModelDigests, on_progress: Progress | None) -> StagedFolder:
        try:
            folder = inspect_checkpoint(uri) if _is_here(uri) else None
            if folder is not None and folder.made_by is None:
                hold = self._hold_links(folder, digests)
                verify = partial(_verify_links, hold.path, uri, digests)
            else:
                hold = self._hold_copy(
                    _PlannedCheckpoint(uri, digests, folder),
                    alone=self._prefetch_giving_way(digests),
                    stopped=self._closed.is_set,
                    on_progress=on_progress,
                )
                verify = partial(self._verify_copy, uri, digests.checkpoint)
        except CopyStopped:
            raise StorageError(
                expected=f"to copy {uri}", found="staging was closed", remedy="run again: what arrived is kept"
            ) from None
        try:
            verify()
        except BaseException:
            hold.release()
            raise
        return StagedFolder(hold.path, verify, hold.release)

    def prefetch(self, uri: str, digests: ModelDigests) -> None:
        """Starts staging in the background, a checkpoint at a time; only the last waiting checkpoint is kept.

        Pauses during `stage` of another checkpoint. Errors are only logged, since `stage` raises them again.
        """
        if _is_here(uri) and inspect_checkpoint(uri).made_by is None:
            return
        with self._changed:
            if self._closed.is_set():
                return
            if self._prefetching == _PlannedCheckpoint(uri, digests):
                self._queued = None
                return
            self._queued = _PlannedCheckpoint(uri, digests)
            if self._thread is None:
                self._thread = threading.Thread(target=self._prefetch_queued, name="staging", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stage_small_files(self, uri: str, digests: ModelDigests) -> Path:
        """Returns a local copy of config, tokenizer and templates only, for tokenizing without serving.

        It is shared by all checkpoints with the same files, and never evicted; a damaged copy is copied again.
        """
        with kept_location(uri, digests) as kept:
            return self._stage_small_files(kept, digests)

    def _stage_small_files(self, uri: str, digests: ModelDigests) -> Path:
        merge, small = merge_of(uri), self._copies.folder / "small"
        uri = merge.locations[-1] if merge else uri
        target = small / hashlib.blake2b(f"{digests.tokenizer}{digests.config}".encode(), digest_size=16).hexdigest()
        with suppress(AssayError):  # it is missing, or damaged
            verify_small_files(uri, digests, target)
            return target
        try:
            small.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=small) as aside:
                copy_small_files(uri, digests, Path(aside) / "files")
                if target.is_dir():
                    target.rename(Path(aside) / "damaged")
                (Path(aside) / "files").rename(target)
        except OSError as error:
            if not target.is_dir():  # else another process was faster
                raise StorageError(
                    expected=f"to copy the tokenizer of {uri} to {small}",
                    found=str(error),
                    remedy="check that both are there, and the folder is yours and not full",
                ) from error
        return target

    def close(self) -> None:
        """Stops every copy after the ranges being read, keeps received bytes, and syncs made weights. Holds stay."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        for thread in (*self._syncing, *([self._thread] if self._thread else [])):
            thread.join(_GIVE_WAY_SECONDS)

    def _hold_links(self, folder: ModelFolder, digests: ModelDigests) -> Hold:
        folder.require_complete(planned=True)
        files = served_files(folder)
        local = {name: storage.local_path(file.place) for name, file in files.items() if storage.is_local(file.uri)}
        copied = self.stage_small_files(folder.uri, digests) if len(local) < len(files) else Path()
        links = {name: Path(real_path(local.get(name, copied / name))) for name in files}
        key = hashlib.blake2b(repr(sorted(links.items())).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        hold = self._copies.hold(key)
        try:
            waiting = partial(self._wait_for_copy, key, stopped=self._closed.is_set, on_progress=None)
            with self._copies.filling(key, waiting=waiting):
                if _links_in(hold.path) != links:
                    self._copies.discard(key)
                    self._copies.make_room(key, 0)
                    self._copies.publish(key, _linked(self._copies.partial(key) / "content", links))
        except BaseException:
            hold.release()
            raise
        return hold

    def _verify_copy(self, uri: str, key: str) -> None:
        if not self._is_whole(key):
            raise StorageError(
                expected=f"the copy of {uri} in {self._copies.entry(key)} as it was verified",
                found="files with other sizes, times or inodes, or that the disk could not keep",
                remedy="let nothing write there, and run again: it is copied again",
            )

    def _hold_copy(
        self,
        planned: _PlannedCheckpoint,
        *,
        alone: AbstractContextManager[None],
        stopped: Callable[[], bool],
        on_progress: Progress | None = None,
    ) -> Hold:
        key = planned.digests.checkpoint
        hold = self._copies.hold(key)
        try:
            if not self._is_whole(key):
                waiting = partial(self._wait_for_copy, key, stopped=stopped, on_progress=on_progress)
                with alone, self._copies.filling(key, waiting=waiting):
                    if not self._is_whole(key):
                        self._copies.discard(key)
                        content, is_made = self._filled(planned, stopped, on_progress)
                        self._publish(key, content, is_made=is_made)
        except BaseException:
            hold.release()
            raise
        return hold

    def _publish(self, key: str, content: Path, *, is_made: bool) -> None:
        note = _identities(content)
        if not is_made:
            return self._copies.publish(key, content, note=note)
        self._copies.publish(key, content, note=_until_restart(note))  # syncing takes as long as making
        syncing = threading.Thread(target=self._sync, args=(key, note), name="syncing", daemon=True)
        syncing.start()
        self._syncing.add(syncing)

    def _sync(self, key: str, note: bytes) -> None:
        kept = b""  # damaged, if the disk could not keep all
        with suppress(OSError):
            for path in self._copies.entry(key).iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            kept = note
        if self._copies.note(key) == _until_restart(note):  # else it was evicted, or is another entry
            with suppress(StorageError):  # of a full disk: the note holds until a restart
                self._copies.set_note(key, kept)

    def _filled(
        self, planned: _PlannedCheckpoint, stopped: Callable[[], bool], on_progress: Progress | None
    ) -> tuple[Path, bool]:
        key = planned.digests.checkpoint
        folder, make_room = self._copies.partial(key), partial(self._copies.make_room, key)
        filling = self._filling(planned.uri, planned.digests, folder, make_room, stopped, on_progress)

        def hold_copy(checkpoint: ModelFolder) -> Hold:
            copied = _PlannedCheckpoint(checkpoint.uri, digest_model_folder(checkpoint), checkpoint)
            return self._hold_copy(copied, alone=nullcontext(), stopped=stopped)

        inspected = planned.folder or inspect_checkpoint(planned.uri)
        recipe = "merge" if merge_of(planned.uri) is not None else inspected.made_by
        if recipe is None:
            return copy_checkpoint(filling, inspected), False
        from pools.weights.converting import MAKERS  # imports numpy, which few callers need

        return self._make(filling, inspected, MAKERS[recipe.partition(" ")[0]], hold_copy=hold_copy), True

    def _wait_for_copy(self, key: str, *, stopped: Callable[[], bool], on_progress: Progress | None) -> None:
        if stopped():
            raise CopyStopped
        if on_progress is not None and (planned_bytes := self._copies.planned_bytes(key)):
            on_progress(min(tree_bytes(self._copies.partial(key)), planned_bytes), planned_bytes)
        self._closed.wait(_LOOK_AGAIN_SECONDS)

    @contextmanager
    def _prefetch_giving_way(self, digests: ModelDigests) -> Iterator[None]:
        with self._changed:
            self._copies_wanted_now += 1
        try:
            with self._changed:
                if self._prefetching is not None and self._prefetching.digests != digests:
                    self._give_way.set()
                self._changed.wait_for(
                    lambda: self._prefetching is None or self._prefetching.digests == digests, timeout=_GIVE_WAY_SECONDS
                )
            yield
        finally:
            with self._changed:
                self._copies_wanted_now -= 1
                self._changed.notify_all()

    def _is_whole(self, key: str) -> bool:
        note = _identities(self._copies.entry(key))
        return note != b"" and self._copies.note(key) in (note, _until_restart(note))

    def _prefetch_stopped(self) -> bool:
        return self._closed.is_set() or self._give_way.is_set()

    def _prefetch_queued(self) -> None:
        while True:
            with self._changed:
                self._prefetching = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed.is_set() or (self._queued and not self._copies_wanted_now))
                if self._closed.is_set():
                    return
                self._prefetching, self._queued = self._queued, None
                self._give_way.clear()
            assert self._prefetching is not None
            try:
                self._hold_copy(self._prefetching, alone=nullcontext(), stopped=self._prefetch_stopped).release()
            except CopyStopped:
                with self._changed:
                    self._queued = self._queued or self._prefetching
            except Exception as error:  # noqa: BLE001 - the boundary: `stage` meets it again and reports it
                _log.debug("%s was not prefetched: %s", self._prefetching.uri, error)


def _is_here(uri: str) -> bool:
    return merge_of(uri) is None and storage.is_local(without_options(uri))


def _verify_links(folder: Path, uri: str, digests: ModelDigests) -> None:
    try:
        require_planned(uri, digest_model_folder(inspect_staged_folder(folder)), digests)
    except CheckpointError:
        inspect_model_folder(uri).require_complete(planned=True)
        raise


def _links_in(folder: Path) -> dict[str, Path]:
    return {path.name: path.readlink() for path in folder.iterdir() if path.is_symlink()} if folder.is_dir() else {}


def _linked(folder: Path, links: Mapping[str, Path]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, target in links.items():
        (folder / name).symlink_to(target)
    return folder


def _until_restart(note: bytes) -> bytes:
    return note + boot_id().encode()


def _identities(folder: Path) -> bytes:
    try:
        return repr([(path.name, file_identity(path)[1:]) for path in sorted(folder.iterdir())]).encode()
    except OSError:
        return b""
