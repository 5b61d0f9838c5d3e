"""Digests of files by their content; digests of local files are cached."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from resources.errors import StorageError
from resources.settings import settings
from resources.storage import storage
from resources.storage.regular_files import open_within, read_cached
from resources.storage.storage import FileInfo

SETTLED_SECONDS = 3.0
"""Seconds after which another write changes a file's times; some file systems count in steps of 2 s."""
_RANGE_BYTES = 32 * 2**20


def hash_of(*parts: bytes) -> str:
    """Returns 128 bits of blake2b in hex, over the parts and their lengths."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _hash_in_ranges(file: FileInfo) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(file.size.to_bytes(8, "little"))
    for start in range(0, file.size, _RANGE_BYTES):
        digest.update(storage.read_bytes(file.place, start=start, end=min(start + _RANGE_BYTES, file.size)))
    return digest.hexdigest()


def content_digest(file: FileInfo) -> bytes:
    """Returns a file's digest: the store's checksum if available; digests of local files are cached."""
    if file.checksum:
        return file.checksum.encode()
    if not storage.is_local(file.uri):  # a store without checksums, such as memory:// or MLflow's
        return _hash_in_ranges(file).encode()
    path = storage.local_path(file.place).resolve()
    began, identity = time.time(), file_identity(path)
    memory = _memory(identity)
    with suppress(OSError):  # it is missing, or belongs to another user
        return read_cached(memory)
    with os.fdopen(open_within(path), "rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest().encode()
    if path.stat().st_ctime < began - SETTLED_SECONDS and file_identity(path) == identity:
        with suppress(StorageError):  # it only saves time
            storage.write_bytes(str(memory), digest)
    return digest


@contextmanager
def linking(*paths: Path) -> Iterator[None]:
    """Keeps the cached digest of a file, the first path, known for all paths to it.

    A hard link that is made or removed in the block changes a file's times, and would make its digest unknown.
    """
    known: tuple[tuple[int, ...], bytes] | None = None
    with suppress(OSError):
        identity = file_identity(paths[0])
        known = identity[1:4], read_cached(_memory(identity))
    yield
    for path in paths:
        with suppress(OSError, StorageError):
            if known and (now := file_identity(path))[1:4] == known[0]:
                storage.write_bytes(str(_memory(now)), known[1])


def _memory(identity: tuple[str, int, int, int, int]) -> Path:
    return settings().cache_dir / "digests" / hash_of(repr(identity).encode())


def file_identity(path: Path) -> tuple[str, int, int, int, int]:
    """Returns values that change with a local file's content, even if size and modification time are restored."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns
