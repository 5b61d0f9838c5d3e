"""Replacing or deleting a file only if it is unchanged since it was read; testing whether a store supports this.

Local disk uses a lock of the file's folder, `memory://` a lock of the process, `gs://` the generation, `s3://` the
entity tag. Other stores get an unconditional write, which is safe only without concurrent writers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
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
    protocol = uri.partition("://")[0] if "://" in uri else "file"
    if protocol in _GOOGLE and standing.tag is not None:
        return _replace_in_google(uri, content, generation=standing.tag)
    if protocol in _AMAZON and standing.tag is not None:
        return _replace_in_amazon(uri, content, entity_tag=standing.tag)
    with _alone(uri, protocol):
        try:
            unchanged = storage.read_bytes(uri) == standing.content
        except FileNotFoundError:
            return False
        if unchanged:
            storage.write_bytes(uri, content, mode=mode)
        return unchanged


def delete_version(uri: str, *, standing: Version) -> None:
    """Deletes a file if it is unchanged."""
    protocol = uri.partition("://")[0] if "://" in uri else "file"
    if protocol in (*_GOOGLE, *_AMAZON) and standing.tag is not None:
        filesystem, path = _store(uri)
        bucket, key, _ = filesystem.split_path(path)
        with storage.reported(uri, "delete"), suppress(FileExistsError, FileNotFoundError):  # 412 and 404
            if protocol in _AMAZON:
                with _unless_precondition_failed():
                    filesystem.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=standing.tag)
            else:
                place = f"{filesystem._location}/storage/v1/b/{quote(bucket)}/o/{quote(key, safe='')}"
                filesystem.call("DELETE", place, ifGenerationMatch=standing.tag)
        return
    with _alone(uri, protocol), suppress(FileNotFoundError):
        if storage.read_bytes(uri) == standing.content:
            storage.delete(uri)


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


@contextmanager
def _alone(uri: str, protocol: str) -> Iterator[None]:
    if protocol == "memory":
        with _MEMORY:
            yield
        return
    if protocol != "file":
        yield
        return
    folder = os.open(Path(storage.local_path(uri)).absolute().parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _store(uri: str) -> tuple[Any, str]:
    filesystem, path = fsspec.core.url_to_fs(uri)
    filesystem.invalidate_cache()
    return filesystem, path


def _tag(uri: str) -> str | None:
    protocol = uri.partition("://")[0] if "://" in uri else "file"
    if protocol not in (*_GOOGLE, *_AMAZON):
        return None
    filesystem, path = _store(uri)
    status = filesystem.info(path)
    tag = status.get("generation") if protocol in _GOOGLE else status.get("ETag")
    return str(tag) if tag is not None else None


def _replace_in_google(uri: str, content: bytes, *, generation: str) -> bool:
    filesystem, path = _store(uri)
    bucket, key, _ = filesystem.split_path(path)
    with storage.reported(uri, "replace"):
        try:
            filesystem.call(
                "POST",
                f"{filesystem._location}/upload/storage/v1/b/{quote(bucket)}/o",
                uploadType="media",
                name=key,
                ifGenerationMatch=generation,
                headers={"Content-Type": "application/octet-stream"},
                data=content,
            )
        except (FileExistsError, FileNotFoundError):  # 412 and 404; a retry after a lost answer leads to 412, too
            return _holds(uri, content)
        return True


def _replace_in_amazon(uri: str, content: bytes, *, entity_tag: str) -> bool:
    filesystem, path = _store(uri)
    bucket, key, _ = filesystem.split_path(path)
    with storage.reported(uri, "replace"):
        try:
            filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=content, IfMatch=entity_tag)
        except (FileExistsError, FileNotFoundError):
            return _holds(uri, content)
        except OSError as error:
            if _PRECONDITION not in str(error):
                raise
            return _holds(uri, content)
        return True


@contextmanager
def _unless_precondition_failed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if _PRECONDITION not in str(error):
            raise


def _holds(uri: str, content: bytes) -> bool:
    try:
        stored = storage.read_bytes(uri)
    except FileNotFoundError:
        return False
    return hashlib.sha256(stored).digest() == hashlib.sha256(content).digest()
