"""Checkpoints from object stores on local disk, for engines that read files.

Copies are named after the digest of the checkpoint, appear only when whole and verified, are shared by the processes
of a machine, and make room for new ones when nobody holds them. Retrying is the caller's: every call goes on where
the last one ended.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from pools.weights.checkpoint_copy import Progress, copy_checkpoint, copy_small_files, require_planned
from pools.weights.model_files import ModelDigests, digest_model_folder, inspect_model_folder
from resources.errors import StorageError
from resources.storage import storage
from resources.storage.bounded_folder import BoundedFolder, Hold, tree_bytes
from resources.storage.file_copy import RANGE_BYTES, CopyStopped

_LOOK_AGAIN_SECONDS = 0.1  # flock has no wait with an end; looking costs microseconds
_GIVE_WAY_SECONDS = 30.0  # for the prefetch to finish its ranges; past it both copy at once

_log = logging.getLogger(__name__)


class StagedFolder:
    """A local model folder that stays where it is until `release`, or the end of the `with` block."""

    def __init__(self, path: Path, hold: Hold | None = None) -> None:
        self.path = path
        self._hold = hold

    def release(self) -> None:
        """Lets the copy be evicted. May be called again; the folder of a local checkpoint is never touched."""
        if self._hold is not None:
            self._hold.release()

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True)
class _Wanted:
    uri: str
    digests: ModelDigests


class Staging:
    """Local copies below `folder`, at most `max_bytes` of them. Close it, or use it in a `with` block.

    Args:
        folder: where the copies lie; any number of processes of a machine may share it.
        max_bytes: the bound for all copies, those in the making with the bytes they will have. Tokenizers from
            `stage_small_files` are not counted.
        parallel_files: how many files of a checkpoint are read at once.
        range_bytes: how much of each is read at once, and lost at most by a crash.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, parallel_files: int = 4, range_bytes: int = RANGE_BYTES
    ) -> None:
        self._copies = BoundedFolder(folder, max_bytes=max_bytes)
        self._parallel_files = parallel_files
        self._range_bytes = range_bytes
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._queued: _Wanted | None = None
        self._prefetching: _Wanted | None = None
        self._give_way = threading.Event()
        self._copies_wanted_now = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stage(self, uri: str, digests: ModelDigests, *, on_progress: Progress | None = None) -> StagedFolder:
        """The checkpoint in a local folder: its own if it is local, else a copy, made now unless there is one.

        Copying that another thread or process is already doing is waited for.

        Args:
            uri: the model folder.
            digests: what it had when it was planned.
            on_progress: told of the bytes as they come.

        Raises:
            IncompleteCheckpoint: it is not whole, or gone.
            CheckpointChanged: it is another one by now.
            StorageError: it cannot be read, written or fitted in, or arrived damaged.
        """
        if storage.is_local(uri):
            require_planned(uri, digest_model_folder(inspect_model_folder(uri)), digests)
            return StagedFolder(storage.local_path(uri).absolute())
        try:
            hold = self._hold_copy(
                _Wanted(uri, digests),
                alone=self._prefetch_giving_way(digests),
                stopped=self._closed.is_set,
                on_progress=on_progress,
            )
        except CopyStopped:
            raise StorageError(
                expected=f"to copy {uri}", found="staging was closed", remedy="run again: what arrived is kept"
            ) from None
        return StagedFolder(hold.path, hold)

    def prefetch(self, uri: str, digests: ModelDigests) -> None:
        """Starts staging in the background, one checkpoint at a time; only the last of the waiting ones is kept.

        Gives way to `stage` of another checkpoint and goes on after it. Errors are met again by `stage`.
        """
        if storage.is_local(uri):
            return
        with self._changed:
            if self._closed.is_set():
                return
            if self._prefetching == _Wanted(uri, digests):
                self._queued = None
                return
            self._queued = _Wanted(uri, digests)
            if self._thread is None:
                self._thread = threading.Thread(target=self._prefetch_queued, name="staging", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stage_small_files(self, uri: str, digests: ModelDigests) -> Path:
        """A local folder with config, tokenizer and templates only, for those who tokenize and do not serve.

        It is shared by all checkpoints that have the same, and never evicted.

        Raises:
            CheckpointChanged: they differ from the planned ones.
            StorageError: they cannot be read or written.
        """
        if storage.is_local(uri):
            return storage.local_path(uri).absolute()
        small = self._copies.folder / "small"
        target = small / hashlib.blake2b(f"{digests.tokenizer}{digests.config}".encode(), digest_size=16).hexdigest()
        if target.is_dir():
            return target
        try:
            small.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=small) as aside:
                copy_small_files(uri, digests, Path(aside) / "files")
                (Path(aside) / "files").rename(target)
        except OSError as error:
            if not target.is_dir():  # else another process was first
                raise StorageError(
                    expected=f"to copy the tokenizer of {uri} to {small}",
                    found=str(error),
                    remedy="check that both are there, and the folder is yours and not full",
                ) from error
        return target

    def close(self) -> None:
        """Ends every copy within the ranges being read; what arrived is kept. Holds stay."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_GIVE_WAY_SECONDS)

    def _hold_copy(
        self,
        wanted: _Wanted,
        *,
        alone: AbstractContextManager[None],
        stopped: Callable[[], bool],
        on_progress: Progress | None = None,
    ) -> Hold:
        key = wanted.digests.checkpoint
        hold = self._copies.hold(key)
        try:
            if not _is_whole(hold.path):
                waiting = partial(self._wait_for_copy, key, stopped=stopped, on_progress=on_progress)
                with alone, self._copies.filling(key, waiting=waiting):
                    if not _is_whole(hold.path):
                        self._copies.discard(key)
                        content = copy_checkpoint(
                            wanted.uri,
                            wanted.digests,
                            partial=self._copies.partial(key),
                            make_room=partial(self._copies.make_room, key),
                            parallel_files=self._parallel_files,
                            range_bytes=self._range_bytes,
                            stopped=stopped,
                            on_progress=on_progress,
                        )
                        self._copies.publish(key, content)
        except BaseException:
            hold.release()
            raise
        return hold

    def _wait_for_copy(self, key: str, *, stopped: Callable[[], bool], on_progress: Progress | None) -> None:
        if stopped():
            raise CopyStopped
        if on_progress is not None and (planned_bytes := self._copies.planned_bytes(key)):
            on_progress(min(tree_bytes(self._copies.partial(key)), planned_bytes), planned_bytes)
        self._closed.wait(_LOOK_AGAIN_SECONDS)

    @contextmanager
    def _prefetch_giving_way(self, digests: ModelDigests) -> Iterator[None]:
        """Ends the background copy of another checkpoint, and keeps it from going on inside."""
        with self._changed:
            self._copies_wanted_now += 1
        try:
            with self._changed:
                if self._prefetching is not None and self._prefetching.digests != digests:
                    self._give_way.set()
                self._changed.wait_for(
                    lambda: self._prefetching is None or self._prefetching.digests == digests,
                    timeout=_GIVE_WAY_SECONDS,
                )
            yield
        finally:
            with self._changed:
                self._copies_wanted_now -= 1
                self._changed.notify_all()

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


def _is_whole(folder: Path) -> bool:
    return folder.is_dir() and inspect_model_folder(str(folder)).complete
