"""Replacing or deleting a file only if it is unchanged since it was read; testing whether a store supports this.

Local disk uses a lock of the file's folder, `memory://` a lock of the process, `gs://` the generation, `s3://` the
entity tag. Other stores get an unconditional write, which is safe only without concurrent writers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

import fsspec

from resources.storage import storage

_MEMORY = threading.Lock()
_GOOGLE = ("gs", "gcs")
_AMAZON = ("s3", "s3a")
_PRECONDITION = "At least one of the pre-conditions"


@dataclass(frozen=True)
class Version:
    """Content of a file when it was read; `tag` identifies the version in stores that have version tags."""

    content: bytes
    tag: str | None


def read_version(uri: str) -> Version | None:
    """Returns a file's content and version; None if the file does not exist."""
    try:
        # The tag first: if the content is newer, the write that is conditional on the tag fails.
        tag = _tag(uri)
        return Version(storage.read_bytes(uri), tag)
    except FileNotFoundError:
        return None


def replace_bytes(uri: str, content: bytes, *, standing: Version, mode: int = 0o644) -> bool:
    """Replaces a file if it still equals `standing`; returns False if it has changed or is gone."""
    if standing.tag is None:
        return _change_locked(uri, standing, lambda: storage.write_bytes(uri, content, mode=mode))
    store, bucket, key = _store(uri)
    with storage.reported(uri, "replace"):
        if _protocol(uri) in _AMAZON:
            done = _done(store.call_s3, "put_object", Bucket=bucket, Key=key, Body=content, IfMatch=standing.tag)
        else:
            done = _done(
                store.call,
                "POST",
                f"{store._location}/upload/storage/v1/b/{quote(bucket)}/o",
                uploadType="media",
                name=key,
                ifGenerationMatch=standing.tag,
                headers={"Content-Type": "application/octet-stream"},
                data=content,
            )
        return done or _holds(uri, content)  # a retry after a lost answer finds its own content


def delete_version(uri: str, *, standing: Version) -> None:
    """Deletes a file if it is unchanged."""
    if standing.tag is None:
        _change_locked(uri, standing, lambda: storage.delete(uri))
        return
    store, bucket, key = _store(uri)
    with storage.reported(uri, "delete"):
        if _protocol(uri) in _AMAZON:
            _done(store.call_s3, "delete_object", Bucket=bucket, Key=key, IfMatch=standing.tag)
        else:
            place = f"{store._location}/storage/v1/b/{quote(bucket)}/o/{quote(key, safe='')}"
            _done(store.call, "DELETE", place, ifGenerationMatch=standing.tag)


@cache
def creates_exclusively(folder: str) -> bool:
    """Returns True if only one of several concurrent writers can create a file; tests each store once per process.

    Some stores with the API of `gs://` or `s3://` ignore the condition: a second writer replaces the content of the
    first, and both report success.
    """
    if storage.is_local(folder):
        return True
    probe = storage.join(folder, f".assay-exclusive-{secrets.token_hex(8)}")
    try:
        storage.create_bytes(probe, b"first")
        return not storage.create_bytes(probe, b"second")
    except (NotImplementedError, ValueError):  # fsspec's errors for a mode that the store does not support
        return False
    finally:
        storage.delete(probe)


def _change_locked(uri: str, standing: Version, change: Callable[[], None]) -> bool:
    with ExitStack() as locks:
        if _protocol(uri) == "memory":
            locks.enter_context(_MEMORY)
        try:
            if storage.is_local(uri):
                folder = os.open(storage.local_path(uri).absolute().parent, os.O_RDONLY)
                locks.callback(os.close, folder)
                with suppress(OSError):  # some network file systems lock no folders
                    fcntl.flock(folder, fcntl.LOCK_EX)
            if storage.read_bytes(uri) != standing.content:
                return False
        except FileNotFoundError:
            return False
        change()
        return True


def _protocol(uri: str) -> str:
    return uri.partition("://")[0] if "://" in uri else "file"


def _store(uri: str) -> tuple[Any, str, str]:
    filesystem, path = fsspec.core.url_to_fs(uri)
    filesystem.invalidate_cache()
    bucket, key, _ = filesystem.split_path(path)
    return filesystem, bucket, key


def _tag(uri: str) -> str | None:
    protocol = _protocol(uri)
    if protocol not in (*_GOOGLE, *_AMAZON):
        return None
    store, bucket, key = _store(uri)
    tag = store.info(f"{bucket}/{key}").get("generation" if protocol in _GOOGLE else "ETag")
    return str(tag) if tag is not None else None


def _done(call: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    try:
        call(*arguments, **options)
    except (FileExistsError, FileNotFoundError):  # 412 and 404
        return False
    except OSError as error:
        if _PRECONDITION in str(error):
            return False
        raise
    return True


def _holds(uri: str, content: bytes) -> bool:
    try:
        return storage.read_bytes(uri) == content
    except FileNotFoundError:
        return False
