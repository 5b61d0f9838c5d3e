"""Files in any store: local folders, `memory://`, `gs://`, `s3://`, MLflow's artifacts, `hf://`, over fsspec.

Writes are atomic: by a temporary sibling and a rename on disk; uploads to object stores are only visible at their end.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import posixpath
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from resources.addresses import refuse_user_information
from resources.errors import AssayError, BadInput, IrregularFile, StorageError
from resources.storage import hub, listings
from resources.storage.files import written_aside
from resources.storage.listings import FileInfo
from resources.storage.mlflow_artifacts import PROTOCOL, in_mlflow, real_location
from resources.storage.regular_files import UnsafeFile, leads_out, open_within

fsspec.register_implementation(PROTOCOL, "resources.storage.mlflow_artifacts.MlflowArtifacts", clobber=True)
fsspec.register_implementation(hub.PROTOCOL, "resources.storage.hub_files.HubFiles", clobber=True)
_AT_ONCE = 8
_MEMORY_CREATE = threading.Lock()
_READ_BYTES = 2**30  # on Linux, a read returns at most 2 GiB
_log = logging.getLogger(__name__)
_OBJECT_STORES = frozenset({"gs", "gcs", "s3", "s3a", "memory", hub.PROTOCOL})


def is_local(uri: str) -> bool:
    """Returns True if a location is a path on this machine."""
    return ("://" not in uri and not in_mlflow(uri)) or uri.startswith("file://")


def has_whole_files(uri: str) -> bool:
    """Returns True if a location is in an object store, where only complete files are visible."""
    return uri.partition("://")[0] in _OBJECT_STORES and not is_local(uri)


def local_path(uri: str) -> Path:
    """Returns the path of a local location."""
    return Path(uri.removeprefix("file://")).expanduser()


def absolute(uri: str) -> str:
    """Returns the location in a form that is valid in another working directory."""
    return str(local_path(uri).absolute()) if is_local(uri) else uri


def resolved(uri: str) -> str:
    """Returns the location with all links resolved, if it is local."""
    return os.path.realpath(local_path(uri)) if is_local(uri) else uri


def behind_link(uri: str) -> str:
    """Returns the target of a location that is a link itself, a name of MLflow (see `real_location`), or a repository
    of the hub (see `hub_location`)."""
    uri = real_location(uri) if in_mlflow(uri) else hub.hub_location(uri)
    return resolved(uri) if is_local(uri) and local_path(uri).is_symlink() else uri


def join(uri: str, *parts: str) -> str:
    """Returns a location below another location."""
    return posixpath.join(uri.rstrip("/") or "/", *parts)


def basename(uri: str) -> str:
    """Returns the last component of a location."""
    return uri.rstrip("/").rpartition("/")[2]


def parent(uri: str) -> str:
    """Returns the parent of a location."""
    return posixpath.dirname(uri.rstrip("/"))


def _open(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    location = str(local_path(uri).absolute()) if is_local(uri) else real_location(uri) if in_mlflow(uri) else uri
    refuse_user_information(location, place="a location")
    try:
        filesystem, path = fsspec.core.url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise StorageError(
            expected="a location that can be opened: a path, or memory://, gs://, s3:// or hf://",
            found=f"{uri} ({error})",
            remedy="check the spelling of the part before ://",
        ) from error
    return filesystem, path


def _fresh(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    filesystem, path = _open(uri)
    filesystem.invalidate_cache()
    return filesystem, path


@contextmanager
def reported(uri: str, doing: str) -> Iterator[None]:
    """Turns an `OSError` inside the block into a `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space there; nothing half-written was left" if full else "check that it exists and is yours"
        raise StorageError(expected=f"to {doing} {uri}", found=str(error), remedy=remedy) from error


def exists(uri: str) -> bool:
    """Returns True if a file or folder exists."""
    filesystem, path = _fresh(uri)
    return filesystem.exists(path)


def read_bytes(uri: str, *, start: int | None = None, end: int | None = None, within: str | None = None) -> bytes:
    """Returns a file's content, or its bytes from `start` up to `end`.

    `within` is the local folder that a link may lead into: its own if None, "/" for a file that the user named.

    Raises:
        FileNotFoundError: the file does not exist.
        StorageError: the file cannot be read; an `IrregularFile` for a pipe, a device, or a link that leads out.
    """
    try:
        if is_local(uri):
            return _read_local(uri, start, end, within)
        filesystem, path = _open(uri)
        return bytes(filesystem.cat_file(path, start=start, end=end))  # pyright: ignore[reportArgumentType]
    except FileNotFoundError:
        raise
    except UnsafeFile as error:
        remedy = "check that it is a file, and readable; put the file itself in place of a link"
        raise IrregularFile(expected=f"a regular file at {uri}", found=str(error.strerror), remedy=remedy) from error
    except OSError as error:
        raise StorageError(
            expected=f"to read {uri}", found=str(error), remedy="check that it is a file, and readable"
        ) from error


@contextmanager
def opened(uri: str) -> Iterator[BinaryIO]:
    """Opens a file for reading in parts, if it may be too large to read at once."""
    filesystem, path = _open(uri)
    with reported(uri, "read"):
        local = os.fdopen(open_within(path, within="/"), "rb") if is_local(uri) else None
        with local or filesystem.open(path, "rb") as file:
            yield file  # pyright: ignore[reportReturnType]


def _read_local(uri: str, start: int | None, end: int | None, within: str | None) -> bytes:
    # As fsspec would, in a tenth of its time: planning reads tens of thousands of small files.
    path = os.path.expanduser(uri.removeprefix("file://"))  # noqa: PTH111
    file = open_within(path, within=within and local_path(within))
    try:
        if start:
            os.lseek(file, start, os.SEEK_SET)
        remaining = end - (start or 0) if end is not None else sys.maxsize
        parts, left = [], os.fstat(file).st_size + 1  # a byte more than the size, so that a single read sees the end
        while remaining > 0 and (part := os.read(file, min(remaining, max(left, 4096), _READ_BYTES))):
            parts.append(part)
            remaining, left = remaining - len(part), left - len(part)
            if left == 1:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(file)


def write_bytes(uri: str, content: bytes, *, mode: int = 0o644) -> None:
    """Writes a file, with this mode on a disk; readers see the old or the new content, never a part."""
    filesystem, path = _open(uri)
    with reported(uri, "write"):
        if isinstance(filesystem, LocalFileSystem):
            with written_aside(Path(path), content, mode=mode) as temporary:
                temporary.replace(path)
        else:
            filesystem.pipe_file(path, content)


def create_bytes(uri: str, content: bytes, *, mode: int = 0o644) -> bool:
    """Creates a file, with this mode on a disk; returns False, without a change, if it already exists.

    The creation is atomic on local disk (hard link), `memory://` (a lock), `gs://` and `s3://` (conditional put).
    """
    filesystem, path = _open(uri)
    with reported(uri, "create"):
        if isinstance(filesystem, LocalFileSystem):
            with written_aside(Path(path), content, mode=mode) as temporary:
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
            return True
        try:
            with _MEMORY_CREATE if isinstance(filesystem, MemoryFileSystem) else nullcontext():
                filesystem.pipe_file(path, content, mode="create")
        except FileExistsError:
            return False
        return True


def delete(uri: str) -> None:
    """Deletes a file; a missing file is no error."""
    filesystem, path = _open(uri)
    with reported(uri, "delete"), suppress(FileNotFoundError):
        filesystem.rm_file(path)


def check_writable(uri: str) -> None:
    """Raises `BadInput` if files cannot be written below a location; it writes a file and removes it."""
    probe = join(uri, f".assay-write-probe-{os.getpid()}-{threading.get_ident()}")
    try:
        write_bytes(probe, b"")
        delete(probe)
    except StorageError as error:
        raise BadInput(
            expected=f"a folder that can be written at {uri}",
            found=error.found,
            remedy="choose another folder, or make this folder writable",
        ) from error


def content_digest(uri: str, *, length: int = 64) -> str | None:
    """Returns the first hex digits of a file's SHA-256; None if it cannot be read, which other checks report."""
    try:
        with opened(uri) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:length]  # pyright: ignore[reportArgumentType]
    except (OSError, AssayError):
        return None


def list_files(uri: str, *, within: str | None = None) -> list[FileInfo]:
    """Lists every file below a location, at any depth, sorted by location; empty if nothing exists there.

    It uses a single listing of the store, and leaves out temporary files of active writes. `within` is the local folder
    that links may lead into: the location itself if None; other links count as irregular.
    """
    filesystem, path = _fresh(uri)
    with reported(uri, "list"):
        try:
            if isinstance(filesystem, LocalFileSystem) and Path(path).is_dir():
                return listings.files_of_walk(uri, listings.walk(path, within=within))
            objects = listings.bucket_objects(filesystem, path)
            if objects is not None:
                return listings.files_of_bucket(uri, objects)
            return _found(uri, filesystem, path)
        except FileNotFoundError:
            return []


def _found(uri: str, filesystem: fsspec.AbstractFileSystem, path: str) -> list[FileInfo]:
    infos, root = dict(filesystem.find(path, detail=True)), path.rstrip("/")
    named = [(name[len(root) :].lstrip("/"), info) for name, info in infos.items() if not listings.is_marker(name)]
    return listings.described(uri, named)


def list_folder(uri: str, *, within: str | None = None) -> list[FileInfo]:
    """Lists the files directly in a folder, as `list_files` does; empty if it does not exist or is a file."""
    filesystem, path = _fresh(uri)
    with reported(uri, "list"):
        try:
            if isinstance(filesystem, LocalFileSystem):
                held = next(listings.walk(path, within=within), None) if Path(path).is_dir() else None
                return listings.files_of_walk(uri, [held] if held else [])
            entries = filesystem.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
    root = path.rstrip("/") + "/"
    held = [(str(info["name"]), info) for info in entries if info["type"] == "file"]
    return listings.described(uri, [(name[len(root) :], info) for name, info in held if name.startswith(root)])


def list_run(uri: str, *, belongs: Callable[[str], bool]) -> list[FileInfo]:
    """Lists every file of a run as `list_files`. For a repository of the hub without a revision, adds the files of each
    branch and tag with a name for which `belongs` returns True, as `hf://owner/name@branch/…`."""
    if not hub.is_repository(uri):
        return list_files(uri)
    places = [place for place, _ in refs_of_run(uri, belongs)]
    with reported(uri, "list"), ThreadPoolExecutor(_AT_ONCE) as threads:
        return [file for files in threads.map(lambda place: _found(place, *_open(place)), places) for file in files]


def refs_of_run(uri: str, belongs: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Returns the locations and commits of the branches and tags of a repository that `list_run` lists."""
    filesystem, _ = _fresh(uri)
    return filesystem.refs_of_run(hub.place_of(uri).repository, belongs)  # pyright: ignore[reportAttributeAccessIssue]


def matching_files(pattern: str) -> list[str]:
    """Returns the files that match a location with wildcards, and those below a matching folder; also broken links."""
    filesystem, path = _fresh(pattern)
    with reported(pattern, "list"):
        names = [str(name) for name in filesystem.glob(path)]
        files = {below for name in names for below in filesystem.find(name)}
    if is_local(pattern):  # opening a pipe would block
        return sorted(file for file in files if Path(file).is_file() or not Path(file).exists())
    return sorted(map(filesystem.unstrip_protocol, files))


def bucket_objects(uri: str, *, between: Sequence[str] = ()) -> list[dict[str, Any]] | None:
    """Returns Google's metadata of each object below a location; None for other stores."""
    filesystem, path = _open(uri)
    with reported(uri, "list"):
        try:
            names = [uri.split("://", 1)[-1].partition("/")[2] for uri in between]
            return listings.bucket_objects(filesystem, path, between=names)
        except FileNotFoundError:
            return []


def etag_is_md5(uri: str) -> bool:
    """Returns True if the ETag of a file in `s3://` is the MD5 of its content, which a listing does not show.

    It is not if the store encrypts with a key of the customer, nor in directory buckets. Sends a single request.
    """
    filesystem, path = _open(uri)
    ask = getattr(filesystem, "call_s3", None)
    if ask is None:
        return True
    bucket, _, key = path.partition("/")
    if bucket.endswith("--x-s3"):
        return False
    head = ask("head_object", Bucket=bucket, Key=key)
    return not (str(head.get("ServerSideEncryption")).startswith("aws:kms") or head.get("SSECustomerAlgorithm"))


def is_folder(uri: str) -> bool:
    """Returns True if a location is a folder (in an object store: a prefix with something below it)."""
    filesystem, path = _fresh(uri)
    return filesystem.isdir(path)


def copy_to_local(uri: str, target: Path) -> list[str]:
    """Copies a folder from any store to a local folder; `target` appears only when the copy is complete.

    Returns the names that were left out of a local folder: pipes, devices, and links that lead out of it.
    """
    filesystem, path = _open(uri)
    left_out: list[str] = []
    target.parent.mkdir(parents=True, exist_ok=True)
    with reported(uri, "copy"), tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as aside:
        partial = Path(aside) / "content"
        if is_local(uri):
            if leads_out(path, os.path.realpath(path)):
                raise IrregularFile(expected=f"a folder at {path}", found="a link to elsewhere", remedy="remove it")
            partial.mkdir()
            left_out = copy_from_local(Path(path), str(partial))
        else:
            try:
                filesystem.get(path.rstrip("/") + "/", f"{partial}/", recursive=True)
            except ValueError as error:  # from fsspec, for an object name that leads out of the folder
                raise IrregularFile(expected=f"files below {uri}", found=str(error), remedy="remove it") from error
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # else another process finished the same copy first
                raise
    return left_out


def copy_from_local(source: Path, uri: str) -> list[str]:
    """Copies the regular files of a local folder to any store; returns and logs the names of all others."""
    filesystem, path = _open(uri)
    left_out: list[str] = []
    for file in list_files(str(source)):
        relative = file.uri.removeprefix(f"{str(source).rstrip('/')}/")
        target = posixpath.join(path, relative)
        with reported(uri, "copy to"):
            try:
                descriptor = open_within(file.uri, within=source)
            except (FileNotFoundError, UnsafeFile):
                left_out.append(relative)
                continue
            with os.fdopen(descriptor, "rb"):
                filesystem.makedirs(posixpath.dirname(target), exist_ok=True)
                filesystem.put_file(f"/proc/self/fd/{descriptor}", target)
    if left_out:
        _log.warning("Not copied from %s, no regular files of its own: %s", source, ", ".join(left_out[:5]))
    return left_out
