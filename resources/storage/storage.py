"""Files wherever they lie: a folder here, `memory://`, `gs://`, `s3://`, MLflow's artifacts, over fsspec.

Writes are whole or not at all: on local disk through a temporary sibling and a rename, in object stores because
an upload becomes visible only when it ends.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from resources.addresses import refuse_user_information
from resources.errors import AssayError, BadInput, IrregularFile, StorageError
from resources.storage import listings
from resources.storage.files import written_aside
from resources.storage.listings import FileInfo
from resources.storage.mlflow_artifacts import PROTOCOL, in_mlflow, real_location
from resources.storage.regular_files import UnsafeFile, leads_out, open_within

fsspec.register_implementation(PROTOCOL, "resources.storage.mlflow_artifacts.MlflowArtifacts", clobber=True)
_MEMORY_CREATE = threading.Lock()
_READ_BYTES = 2**30  # a read of Linux returns no more than 2 GiB
_log = logging.getLogger(__name__)
_OBJECT_STORES = frozenset({"gs", "gcs", "s3", "s3a", "memory"})


def is_local(uri: str) -> bool:
    """Returns True if a location is a path on this machine."""
    return ("://" not in uri and not in_mlflow(uri)) or uri.startswith("file://")


def has_whole_files(uri: str) -> bool:
    """Returns True if a location is in an object store, where a file is not seen before it is whole."""
    return uri.partition("://")[0] in _OBJECT_STORES and not is_local(uri)


def local_path(uri: str) -> Path:
    """The path behind a local location."""
    return Path(uri.removeprefix("file://")).expanduser()


def absolute(uri: str) -> str:
    """Returns the location in a form for a process that works in another folder."""
    return str(local_path(uri).absolute()) if is_local(uri) else uri


def resolved(uri: str) -> str:
    """Returns the location without any link in it, if it is local."""
    return os.path.realpath(local_path(uri)) if is_local(uri) else uri


def behind_link(uri: str) -> str:
    """Returns what a location shows if it is itself a link, or MLflow's name of something (see `real_location`)."""
    uri = real_location(uri) if in_mlflow(uri) else uri
    return resolved(uri) if is_local(uri) and local_path(uri).is_symlink() else uri


def join(uri: str, *parts: str) -> str:
    """A location below another one."""
    return posixpath.join(uri.rstrip("/") or "/", *parts)


def basename(uri: str) -> str:
    """The last component of a location."""
    return posixpath.basename(uri.rstrip("/"))


def parent(uri: str) -> str:
    """The location one level up."""
    return posixpath.dirname(uri.rstrip("/"))


def _open(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    location = str(local_path(uri).absolute()) if is_local(uri) else real_location(uri) if in_mlflow(uri) else uri
    refuse_user_information(location, place="a location")
    try:
        filesystem, path = fsspec.core.url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise StorageError(
            expected="a location that can be opened: a path, or memory://, gs:// or s3://",
            found=f"{uri} ({error})",
            remedy="check the spelling of the part before ://",
        ) from error
    return filesystem, path


@contextmanager
def reported(uri: str, doing: str) -> Iterator[None]:
    """Turns what a store says goes wrong inside the block into a `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space there; nothing half-written was left" if full else "check that it exists and is yours"
        raise StorageError(expected=f"to {doing} {uri}", found=str(error), remedy=remedy) from error


def exists(uri: str) -> bool:
    """Returns True if a file or folder is there."""
    filesystem, path = _open(uri)
    filesystem.invalidate_cache()
    return filesystem.exists(path)


def read_bytes(uri: str, *, start: int | None = None, end: int | None = None, within: str | None = None) -> bytes:
    """Returns a file's content, or its bytes from `start` up to `end`.

    `within` is the local folder that a link may lead into: its own if None, "/" for a file that the user named.

    Raises:
        FileNotFoundError: it is not there.
        StorageError: it cannot be read; an `IrregularFile` if it is a pipe, a device, or a link that leads out.
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
    """A file that is read bit by bit, where it is too large to be had at once."""
    filesystem, path = _open(uri)
    with reported(uri, "read"):
        local = os.fdopen(open_within(path, within="/"), "rb") if is_local(uri) else None
        with local or filesystem.open(path, "rb") as file:
            yield file  # pyright: ignore[reportReturnType]


def _read_local(uri: str, start: int | None, end: int | None, within: str | None) -> bytes:
    # As fsspec would, in a tenth of its time: planning reads small files by the ten thousand.
    path = os.path.expanduser(uri.removeprefix("file://"))  # noqa: PTH111
    file = open_within(path, within=within and local_path(within))
    try:
        if start:
            os.lseek(file, start, os.SEEK_SET)
        wanted = end - (start or 0) if end is not None else sys.maxsize
        parts, left = [], os.fstat(file).st_size + 1  # one more than there is, so that one read sees the end
        while wanted > 0 and (part := os.read(file, min(wanted, max(left, 4096), _READ_BYTES))):
            parts.append(part)
            wanted, left = wanted - len(part), left - len(part)
            if left == 1:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(file)


def write_bytes(uri: str, content: bytes, *, mode: int = 0o644) -> None:
    """Writes a file, with these rights on a disk; a reader sees the old content or the new one, never a part.

    Raises:
        StorageError: the place is not writable, or full.
    """
    filesystem, path = _open(uri)
    with reported(uri, "write"):
        if isinstance(filesystem, LocalFileSystem):
            with written_aside(Path(path), content, mode=mode) as temporary:
                temporary.replace(path)
        else:
            filesystem.pipe_file(path, content)


def create_bytes(uri: str, content: bytes, *, mode: int = 0o644) -> bool:
    """Writes a file, with these rights on a disk, only if nothing is there: as one step where the store can do that.

    Local disk (hard link), `memory://` (a lock), `gs://` and `s3://` (conditional put) all can.

    Returns:
        False if something was there already; it is left as it was.
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
    """Deletes a file; one that is not there is no matter.

    Raises:
        StorageError: the place is not writable.
    """
    filesystem, path = _open(uri)
    with reported(uri, "delete"), suppress(FileNotFoundError):
        filesystem.rm_file(path)


def check_writable(uri: str) -> None:
    """Proves early that files can be written below a location, by writing one and removing it."""
    probe = join(uri, f".assay-write-probe-{os.getpid()}-{threading.get_ident()}")
    try:
        write_bytes(probe, b"")
        filesystem, path = _open(probe)
        filesystem.rm_file(path)
    except (StorageError, OSError) as error:
        raise BadInput(
            expected=f"a folder that can be written at {uri}",
            found=error.found if isinstance(error, StorageError) else str(error),
            remedy="choose another folder, or make this one writable",
        ) from error


def content_digest(uri: str, *, length: int = 64) -> str | None:
    """The first hex digits of the SHA-256 of a file; None where it is none or cannot be read, which others refuse."""
    try:
        if is_local(uri):
            with os.fdopen(open_within(local_path(uri), within="/"), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()[:length]
        return hashlib.sha256(read_bytes(uri)).hexdigest()[:length]
    except (OSError, AssayError):
        return None


def list_files(uri: str, *, within: str | None = None) -> list[FileInfo]:
    """Lists every file below a location, at any depth, sorted by location; empty if nothing is there.

    One listing of the store, not a call per file. Temporary files of writes in progress are left out. `within` is the
    local folder that links may lead into: the location itself if None; other links count as irregular.
    """
    filesystem, path = _open(uri)
    filesystem.invalidate_cache()
    with reported(uri, "list"):
        try:
            if isinstance(filesystem, LocalFileSystem) and Path(path).is_dir():
                return sorted(
                    listings.files_of_walk(uri, listings.walk(path, within=within)), key=lambda file: file.uri
                )
            objects = listings.bucket_objects(filesystem, path)
            if objects is not None:
                return listings.files_of_bucket(uri, objects)
            found = dict(filesystem.find(path, detail=True))
        except FileNotFoundError:
            return []
    root = path.rstrip("/")
    named = [(name[len(root) :].lstrip("/"), info) for name, info in found.items() if not listings.is_marker(name)]
    return listings.described(uri, named)


def matching_files(pattern: str) -> list[str]:
    """Every file that a location with wildcards stands for; all below a folder. Links that lead nowhere count too.

    Raises:
        StorageError: the place cannot be listed.
    """
    filesystem, path = _open(pattern)
    filesystem.invalidate_cache()
    with reported(pattern, "list"):
        found = [str(name) for name in filesystem.glob(path)]
        files = {below for name in found for below in filesystem.find(name)}
    if is_local(pattern):  # a pipe would be waited for
        return sorted(file for file in files if Path(file).is_file() or not Path(file).exists())
    return sorted(map(filesystem.unstrip_protocol, files))


def bucket_objects(uri: str, *, between: Sequence[str] = ()) -> list[dict[str, Any]] | None:
    """Returns the answer of Google's store about each object below a location; None for other stores."""
    filesystem, path = _open(uri)
    with reported(uri, "list"):
        try:
            names = [uri.split("://", 1)[-1].partition("/")[2] for uri in between]
            return listings.bucket_objects(filesystem, path, between=names)
        except FileNotFoundError:
            return []


def etag_is_md5(uri: str) -> bool:
    """Returns True if the ETag of a file in `s3://` is the MD5 of its content, which a listing does not tell.

    It is not where the store encrypts with a key of the customer's, nor in directory buckets. One request.
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
    filesystem, path = _open(uri)
    filesystem.invalidate_cache()
    return filesystem.isdir(path)


def copy_to_local(uri: str, target: Path) -> list[str]:
    """Copies a folder from any store to a local one; `target` appears only when the copy is whole.

    Returns:
        Names that were left out of a local folder: pipes, devices, and links that lead out of it.
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
            except ValueError as error:  # as fsspec says of an object whose name leads out of the folder
                raise IrregularFile(expected=f"files below {uri}", found=str(error), remedy="remove it") from error
        with suppress(FileExistsError, OSError):  # another process finished the same copy first
            partial.rename(target)
    if not target.is_dir():
        raise StorageError(expected=f"a local copy of {uri} in {target}", found="none", remedy="try again")
    return left_out


def copy_from_local(source: Path, uri: str) -> list[str]:
    """Copies the regular files of a local folder to any store; returns the names of all others, which it logs."""
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
