"""Copies a checkpoint from an object store into a local folder; compares it with the plan before and after."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pools.weights.formats import is_adapter
from pools.weights.layouts import inspect_checkpoint
from pools.weights.model_files import (
    ModelDigests,
    ModelFolder,
    digest_model_folder,
    inspect_model_folder,
    inspect_reference_folder,
    served_files,
    small_files,
)
from pools.weights.overrides import without_options
from resources.errors import CheckpointChanged, StorageError
from resources.storage import storage
from resources.storage.file_copy import copy_files
from resources.storage.storage import FileInfo

Progress = Callable[[int, int], None]
"""Called with the bytes of a checkpoint that are local, and their total. Called from several threads, in turn."""


@dataclass(frozen=True)
class Filling:
    """A planned checkpoint that is being copied or computed, continuing an earlier call, below `partial`.

    `digests` are those of the plan. No other call may use `partial`. `make_room` is called once with the size in bytes
    of the whole, before the first byte; `stopped` before each range or block. Copies read `range_bytes` of each of
    `parallel_files` at once.
    """

    uri: str
    digests: ModelDigests
    partial: Path
    make_room: Callable[[int], None]
    stopped: Callable[[], bool]
    on_progress: Progress | None
    parallel_files: int
    range_bytes: int


def copy_checkpoint(filling: Filling, remote: ModelFolder) -> Path:
    """Copies the served files of an inspected checkpoint; returns the folder with the model."""
    uri, digests, partial = filling.uri, filling.digests, filling.partial
    remote.require_complete(planned=True)
    if all(remote.files[name].checksum for name in remote.weight_files):
        require_planned(uri, digest_model_folder(remote), digests)  # reads only checksums of the weights
    sources = served_files(remote)
    total_bytes = sum(source.size for source in sources.values())
    filling.make_room(total_bytes)
    content = partial / "content"
    for left in content.rglob("*"):
        if left.is_file() and str(left.relative_to(content)).removesuffix(".partial") not in sources:
            left.unlink()
    content_digests = copy_files(
        sources,
        content,
        sidecars=partial / "origins",
        parallel=filling.parallel_files,
        range_bytes=filling.range_bytes,
        stopped=filling.stopped,
        on_bytes=counted(total_bytes, filling.on_progress),
    )
    if _served_files_now(uri, sources) != sources:
        inspect_model_folder(uri).require_complete(planned=True)
        raise changed_since_planned(uri, "other files, sizes or times than when copying began")
    _require_copied(content, remote, content_digests, digests)
    return content


def copy_small_files(uri: str, digests: ModelDigests, folder: Path) -> None:
    """Copies config, tokenizer and templates of a checkpoint."""
    reference = inspect_reference_folder(uri)
    if is_adapter(reference.files):
        reference = inspect_checkpoint(uri)
    reference.require_complete(planned=True)
    for name, file in small_files(reference).items():
        storage.write_bytes(str(folder / name), storage.read_bytes(file.place))
    verify_small_files(uri, digests, folder)


def verify_small_files(uri: str, digests: ModelDigests, folder: Path) -> None:
    """Raises `CheckpointChanged` unless a copy of config, tokenizer and templates matches the plan."""
    copied = replace(inspect_reference_folder(str(folder)), problems=())
    require_planned(uri, replace(digest_model_folder(copied), weights=digests.weights), digests)


def require_planned(uri: str, digests: ModelDigests, planned: ModelDigests) -> None:
    """Raises `CheckpointChanged` unless a checkpoint matches the plan."""
    if parts := _differing(digests, planned):
        raise changed_since_planned(uri, f"other contents: {', '.join(parts)}")


def _differing(digests: ModelDigests, planned: ModelDigests) -> list[str]:
    return [name for name in ("weights", "tokenizer", "config") if getattr(digests, name) != getattr(planned, name)]


def _served_files_now(uri: str, served: Mapping[str, FileInfo]) -> dict[str, FileInfo]:
    place = without_options(uri)
    elsewhere = {storage.parent(file.uri) for file in served.values()} - {place.rstrip("/")}
    files = [*storage.list_files(place), *(file for folder in elsewhere for file in storage.list_folder(folder))]
    now = {file.uri: file for file in files}
    return {name: now[file.uri] for name, file in served.items() if file.uri in now}


def counted(total_bytes: int, on_progress: Progress | None) -> Callable[[int], None]:
    """Returns a thread-safe counter of bytes that reports the bytes so far."""
    here_bytes = 0
    turn = threading.Lock()

    def count(added_bytes: int) -> None:
        nonlocal here_bytes
        with turn:
            here_bytes += added_bytes
            if on_progress is not None:
                on_progress(here_bytes, total_bytes)

    return count


def _require_copied(
    content: Path, remote: ModelFolder, content_digests: Mapping[str, str], planned: ModelDigests
) -> None:
    copied = inspect_model_folder(str(content))
    damaged = "; ".join(copied.problems)
    if copied.complete:
        as_remote = {
            name: replace(file, checksum=remote.files[name].checksum or content_digests[name])
            for name, file in copied.files.items()
        }
        digests = digest_model_folder(replace(copied, files=as_remote))
        damaged = ", ".join(f"another digest of the {part}" for part in _differing(digests, planned))
    if damaged:
        shutil.rmtree(content)
        raise StorageError(
            expected=f"a copy of {remote.uri} as it was planned",
            found=f"{damaged}; the copy was removed",
            remedy="run again to copy it again; if that repeats, the checkpoint was changed since it was planned",
        )


def changed_since_planned(uri: str, change: str) -> CheckpointChanged:
    """Returns the error of a checkpoint that has changed since the plan."""
    return CheckpointChanged(
        expected=f"{uri} as it was when its evaluation was planned",
        found=f"it was changed since it was planned: {change}",
        remedy="let nothing write to a checkpoint once it is complete, and run again: a new plan is made",
    )
