"""The tree of records, copied to any file system of fsspec. The record is written last.

Existing files with the same content are not sent again, so an interrupted upload resumes file by file. Content is
compared by the listed checksum or, if the store lists none, by size, which suffices for the files of an attempt: its
folder's name is never reused.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import fsspec
from pydantic import Field, model_validator

from resources.storage import storage
from tasks.errors import SinkFailed
from tasks.records.record import RECORD_NAME
from tasks.sinks.announcement import REPORT_NAME, Announcement
from tasks.sinks.credentials import loaded_block
from tasks.spec.sinks import Access, SinkConfig

_PERMISSION = re.compile(r"\b(?:storage\.[a-z]+\.\w+|s3:\w+)\b")
_NEEDED = "storage.objects.list, .get, .create and .delete, or s3:ListBucket, s3:GetObject and s3:PutObject"


class ObjectStoreSink(SinkConfig):
    """The tree of records, copied to an object store or any other file system of fsspec."""

    secret_variables = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_CONNECTION_STRING")
    client_lasts = True

    kind: Literal["object_store"] = "object_store"
    """Selects this sink, an object store."""
    url: str | None = None
    """Folder that gets the tree, such as gs://bucket/evaluations; uses the machine's credentials."""
    block: str | None = None
    """Name of a Prefect block of type GCS Bucket, in place of url."""
    harness_output: bool = True
    """Copy the harness's own output too, which contains questions and answers."""
    timeout_seconds: float = Field(default=900.0, gt=0)
    """Time limit of a record (wall clock); files that arrived by then are not sent again."""

    @model_validator(mode="after")
    def _has_single_place(self) -> ObjectStoreSink:
        if (self.url is None) == (self.block is None):
            raise ValueError("expected either url or block, found " + ("both" if self.url else "neither"))
        return self

    @property
    def name(self) -> str:
        return f"object_store:{self.url.rstrip('/') if self.url else f'block {self.block}'}"

    def access(self) -> Access:
        """Returns the block's folder and client options; without a block, the machine's credentials apply."""
        if self.block is None:
            return Access()
        from prefect_gcp.cloud_storage import GcsBucket

        bucket = loaded_block(GcsBucket, self.block)
        account = bucket.gcp_credentials.service_account_info
        file = bucket.gcp_credentials.service_account_file
        token = account.get_secret_value() if account is not None else (str(file) if file is not None else None)
        url = f"gs://{bucket.bucket}/{bucket.bucket_folder.strip('/')}".rstrip("/")
        secrets = (str(token.get("private_key")),) if isinstance(token, dict) else ()
        return Access(arguments={"place": url, "options": {"token": token} if token else {}}, secrets=secrets)


CONFIG = ObjectStoreSink


def send(
    announcement: Announcement,
    sink: ObjectStoreSink,
    *,
    place: str | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """Copies a record with its attempt, or the report page, and returns the copy's address. `place` is a block's
    folder, in place of the sink's url; `options` are the client's, with credentials."""
    url = place or str(sink.url)
    if storage.absolute(url).rstrip("/") == announcement.series.evaluation_path:
        raise SinkFailed(
            expected="another place than the records' own", found=url, remedy="name another url, or drop this sink"
        )
    with _explained(url), _local_files(announcement, sink) as files:
        store, root = fsspec.core.url_to_fs(storage.absolute(url), **(options or {}))
        store.invalidate_cache()  # listings cached for an earlier record
        run = announcement.run_uri.removeprefix(announcement.series.evaluation_path).strip("/")
        path = f"{run}/{REPORT_NAME}" if announcement.record is None else announcement.place
        if announcement.record is None:
            _write(store, posixpath.join(root, path), storage.read_bytes(announcement.report_uri))
        else:
            folder = posixpath.join(root, path)
            _copy_missing(store, files, folder)
            _write(store, posixpath.join(folder, RECORD_NAME), announcement.record_json())
    return storage.join(url, path)


@contextmanager
def _local_files(announcement: Announcement, sink: ObjectStoreSink) -> Iterator[dict[str, Path]]:
    record = announcement.record
    if record is None or not sink.harness_output or not storage.exists(announcement.attempt_uri):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="assay-sink-") as scratch:
        folder = Path(scratch) / "attempt"
        storage.copy_to_local(announcement.attempt_uri, folder)  # local files too: without links that lead out
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        yield {posixpath.join(record.attempt, path.relative_to(folder).as_posix()): path for path in paths}


def _copy_missing(store: Any, files: dict[str, Path], folder: str) -> None:
    try:
        copies = store.find(folder, detail=True)
    except FileNotFoundError:
        copies = {}
    for name, path in files.items():
        target = posixpath.join(folder, name)
        if not _is_there(copies.get(target.lstrip("/")) or copies.get(target), path):
            store.makedirs(posixpath.dirname(target), exist_ok=True)
            store.put_file(str(path), target)


def _is_there(info: dict[str, Any] | None, path: Path) -> bool:
    if info is None or int(info.get("size") or 0) != path.stat().st_size:
        return False
    if md5 := info.get("md5Hash"):
        return md5 == base64.b64encode(_md5(path)).decode()
    etag = str(info.get("ETag") or "").strip('"').lower()
    # An ETag with a dash covers parts, so only sizes are compared. That of an encrypted object is no MD5: sent again.
    return not re.fullmatch("[0-9a-f]{32}", etag) or etag == _md5(path).hex()


def _md5(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()


def _write(store: Any, target: str, content: bytes) -> None:
    try:
        if store.info(target)["size"] == len(content) and bytes(store.cat_file(target)) == content:
            return
    except FileNotFoundError:
        store.makedirs(posixpath.dirname(target), exist_ok=True)
    store.pipe_file(target, content)


@contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except SinkFailed:
        raise
    except FileNotFoundError as error:
        raise SinkFailed(
            expected=f"a bucket at {url}", found=str(error), remedy="create it, or mend the url"
        ) from error
    except Exception as error:  # clients of stores have different error classes
        message = str(error).strip() or type(error).__name__
        code = getattr(error, "code", None)
        refused = "Forbidden" in message or "AccessDenied" in message
        if refused or isinstance(error, PermissionError) or code in (401, 403):
            lacking = ", ".join(dict.fromkeys(_PERMISSION.findall(message))) or _NEEDED
            remedy = f"give the account that runs this the permission {lacking} on the bucket; then: assay publish"
        elif code in (429, 500, 502, 503, 504):
            remedy = "the store was busy, and was asked several times; later: assay publish"
        elif isinstance(error, ImportError | ValueError):
            remedy = "check the part before ://, and that the file system for it is installed"
        else:
            remedy = "check the network and the account; then: assay publish"
        problem = f"{code}: {message}" if code and str(code) not in message else message
        raise SinkFailed(expected=f"to write to {url}", found=problem, remedy=remedy) from error
