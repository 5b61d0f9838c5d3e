"""Copies of files from any store to local disk: in ranges, resumable, verified on arrival.

The size of `<name>.partial` is its progress; it is renamed when complete and verified. A sidecar identifies the remote
content.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from resources.errors import AssayError, StorageError
from resources.storage import storage
from resources.storage.hub import hasher_of, in_hub, place_of
from resources.storage.storage import FileInfo

RANGE_BYTES = 32 * 2**20
"""Bytes per read: enough to hide a request's latency, few enough to lose, and to hold in memory for each file."""
_BLOCK_BYTES = 4 * 2**20

Item = TypeVar("Item")


class CopyStopped(Exception):
    """The caller stopped the copy; received bytes are kept."""


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


def copy_files(
    sources: Mapping[str, FileInfo],
    folder: Path,
    *,
    sidecars: Path,
    parallel: int,
    range_bytes: int,
    stopped: Callable[[], bool],
    on_bytes: Callable[[int], None],
) -> dict[str, str]:
    """Copies files into a local folder under the given names, the largest first, `parallel` at a time; returns digests
    by name.

    After the first error all other copies stop; returns after all writing has ended.
    """
    digests: dict[str, str] = {}
    ending = threading.Event()

    def copy(name: str) -> None:
        digests[name] = copy_file(
            sources[name],
            folder / name,
            sidecar=sidecars / name,
            range_bytes=range_bytes,
            stopped=lambda: ending.is_set() or stopped(),
            on_bytes=on_bytes,
        )

    largest_first = sorted(sources, key=lambda name: sources[name].size, reverse=True)
    on_threads(largest_first, lambda: copy, count=min(parallel, len(sources)), ending=ending)
    return digests


def on_threads(
    items: Iterable[Item], begin: Callable[[], Callable[[Item], None]], *, count: int, ending: threading.Event
) -> None:
    """Works through items on `count` threads, each by a function from `begin`; raises the first error.

    Sets `ending` at an error or Ctrl-C, and returns after all work has ended. Not an executor: its threads would keep
    the interpreter from exiting until the last item is done.
    """
    waiting, turn = iter(items), threading.Lock()
    errors: list[Exception] = []

    def run() -> None:
        try:
            work = begin()
            while not ending.is_set():
                with turn:
                    item = next(waiting, None)
                if item is None:
                    return
                work(item)
        except Exception as error:  # noqa: BLE001 - the boundary of this thread: raised below, in the caller's
            errors.append(error)
            ending.set()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ending.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


def copy_file(
    source: FileInfo,
    target: Path,
    *,
    sidecar: Path,
    range_bytes: int,
    stopped: Callable[[], bool],
    on_bytes: Callable[[int], None],
) -> str:
    """Copies a file, and resumes an earlier copy if the remote file is unchanged; no other copy to `target` may run.

    Returns a digest of the content in hex: of the store's kind of hash if it provides any, else 128 bits of blake2b
    over the size (8 bytes, little-endian) and the content. `sidecar` stores the origin of the partial file. `stopped`
    is polled before every range. `on_bytes` is called with the number of added bytes, first those of earlier calls.
    """
    origin = {"size": source.size, "modified": source.modified, "checksum": source.checksum}
    noted = _read_sidecar(sidecar)
    partial = target.with_name(f"{target.name}.partial")
    try:
        if noted.get("origin") == origin and noted.get("digest") and _size(target) == source.size:
            on_bytes(source.size)
            return str(noted["digest"])
        target.unlink(missing_ok=True)
        if noted.get("origin") != origin or (_size(partial) or 0) > source.size:
            partial.unlink(missing_ok=True)
            storage.write_bytes(str(sidecar), json.dumps({"origin": origin}).encode())
        place = _nearest(source)
        hasher = _hasher(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("a+b") as file:
            arrived = _hash_arrived(file, hasher, stopped=stopped)
            on_bytes(arrived)
            while arrived < source.size:
                if stopped():
                    raise CopyStopped
                block = _read_range(place, arrived, min(arrived + range_bytes, source.size))
                file.write(block)
                file.flush()
                hasher.update(block)
                arrived += len(block)
                on_bytes(len(block))
            os.fsync(file.fileno())
        digest = hasher.digest().hex()
        if not _as_the_store_says(source, digest):
            partial.unlink()
            sidecar.unlink()
            raise _corrupt(source, digest)
        storage.write_bytes(str(sidecar), json.dumps({"origin": origin, "digest": digest}).encode())
        partial.replace(target)
    except OSError as error:
        raise StorageError(
            expected=f"to write {target}",
            found=str(error),
            remedy="see that the disk has room and is yours, and run again: what arrived is kept",
        ) from error
    return digest


def _nearest(source: FileInfo) -> str:
    if not in_hub(source.place):
        return source.place
    from resources.storage.hub_files import in_cache

    return str(in_cache(place_of(source.place).repository, source.checksum or "", source.size) or source.place)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _read_sidecar(sidecar: Path) -> dict[str, Any]:
    try:
        noted = json.loads(sidecar.read_bytes())
    except (OSError, ValueError):  # missing, or cut off by a power failure: the copy starts over
        return {}
    return noted if isinstance(noted, dict) else {}


def _hash_arrived(file: IO[bytes], hasher: _Hasher, *, stopped: Callable[[], bool]) -> int:
    file.seek(0)
    while block := file.read(_BLOCK_BYTES):
        if stopped():
            raise CopyStopped
        hasher.update(block)
    return file.tell()


def _read_range(place: str, start: int, end: int) -> bytes:
    try:
        block = storage.read_bytes(place, start=start, end=end)
        received = f"{len(block)} bytes"
    except Exception as error:  # every store's client has exceptions of its own
        reason = error.found if isinstance(error, AssayError) else f"{type(error).__name__}: {error}"
        raise StorageError(
            expected=f"to read bytes {start} to {end} of {place}",
            found=reason,
            remedy="see that the store answers, and run again: what arrived is kept",
        ) from error
    if len(block) != end - start:
        raise StorageError(
            expected=f"{end - start} bytes from {start} on of {place}",
            found=received,
            remedy="see whether it is being written, and run again: what arrived is kept",
        )
    return block


def _hasher(source: FileInfo) -> _Hasher:
    kind = source.content_hash.kind if source.content_hash else None
    if source.content_hash is not None and kind in ("sha256", "git"):
        return hasher_of(source.content_hash.value, source.size)
    if kind in ("md5", "etag"):
        return hashlib.md5(usedforsecurity=False)
    if kind == "crc32c" and importlib.util.find_spec("google_crc32c"):  # a dependency of gcsfs, not of Assay
        from google_crc32c import Checksum

        return Checksum()
    digest = hashlib.blake2b(digest_size=16)
    digest.update(source.size.to_bytes(8, "little"))
    return digest


def _as_the_store_says(source: FileInfo, digest: str) -> bool:
    listed = source.content_hash
    if listed is None or listed.value == digest or len(listed.value) != len(digest):  # other kind: no google_crc32c
        return True
    return listed.kind == "etag" and not storage.etag_is_md5(source.uri)


def _corrupt(source: FileInfo, digest: str) -> StorageError:
    listed = source.content_hash
    return StorageError(
        expected=f"{source.uri} with {listed.kind} {listed.value}" if listed else source.uri,
        found=f"{digest} over the {source.size} bytes that arrived, which were removed",
        remedy="run again, and the file is copied again; if that repeats, check the disk, the memory and the network",
    )
