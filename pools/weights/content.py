"""Digests of files by their content; digests of local files are cached."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from resources.errors import StorageError
from resources.settings import settings
from resources.storage import storage
from resources.storage.regular_files import open_within, path_of_open_file, read_cached, real_path
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


_remembered = lru_cache(maxsize=1024)(_hash_in_ranges)  # such as of the base of many adapters


def content_digest(file: FileInfo) -> bytes:
    """Returns a file's digest: the store's checksum if available; digests of local files are cached, those of stores
    without checksums in this process."""
    if file.checksum:
        return file.checksum.encode()
    if not storage.is_local(file.uri):  # a store without checksums, such as memory:// or MLflow's
        settled = 0 < file.modified < time.time() - SETTLED_SECONDS
        return (_remembered if settled else _hash_in_ranges)(file).encode()
    path = Path(real_path(storage.local_path(file.place)))
    began, identity = time.time(), file_identity(path)
    memory = settings().cache_dir / "digests" / hash_of(repr(identity).encode())
    with suppress(OSError):  # it is missing, or belongs to another user
        return read_cached(memory)
    with os.fdopen(open_within(path), "rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest().encode()
    if path.stat().st_ctime < began - SETTLED_SECONDS and file_identity(path) == identity:
        with suppress(StorageError):  # it only saves time
            storage.write_bytes(str(memory), digest)
    return digest


def file_identity(path: Path) -> tuple[str, int, int, int, int]:
    """Returns values that change with a local file's content, even if size and modification time are restored."""
    status = path.stat()
    return path_of_open_file(path) or str(path), status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns
