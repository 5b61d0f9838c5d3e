"""Safe reading of folders that other programs can write: only regular files, and no link at any level of a path.

Each folder on the way is opened without following links, and a file's type is read from the open descriptor, so that a
file exchanged in the meantime is not followed, and no FIFO, socket or device blocks the reader.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn

_log = logging.getLogger(__name__)
LARGEST_COPY_BYTES = 1 << 28  # readers of results take up to 24 bytes of memory per byte
_MOST_FILES, _MOST_ENTRIES, _MOST_LEVELS = 10_000, 100_000, 12
_BLOCK_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_OPEN_FILE = re.compile(r"/proc/\d+/fd/\d+")
_NO_FOLLOW_ERRORS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)  # a link, a file in place of a folder, a socket


class UnsafeFile(OSError):
    """A refused file: reached by a link, not regular, of another user, or too large; `strerror` has the reason."""


@dataclass
class Copied:
    """Outcome of `copy_regular_files`: files and bytes copied, and the number left out by kind."""

    files: int = 0
    bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return "; ".join(f"{kind}: {count}" for kind, count in sorted(self.dropped.items()))


def open_regular(root: Path, name: str, *, owned: bool = False, max_bytes: int | None = None) -> BinaryIO:
    """Opens a regular file for reading, by its path relative to a folder; raises UnsafeFile if it is refused. Links
    that lead to the folder itself are followed. `owned` also refuses a file that another user owns or can write, as for
    a cache, and `max_bytes` a larger file."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise UnsafeFile(errno.EINVAL, "not a path below the folder", name)
    folder = _open_folder(root, path.parent)
    try:
        file = _open_file(folder, path.name, shown=str(root / path))
    finally:
        os.close(folder)
    status = os.fstat(file.fileno())
    refused = (
        "files of another user, or that others can write"
        if owned and not is_own(status)
        else "files that are too large"
        if max_bytes is not None and status.st_size > max_bytes
        else None
    )
    if refused:
        file.close()
        raise UnsafeFile(errno.EPERM, refused, str(root / path))
    return file


def is_own(status: os.stat_result, *, check_mode: bool = True) -> bool:
    """Returns True if this user or root owns a file, and neither group nor others can write it."""
    others_write = check_mode and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (os.geteuid(), 0) and not others_write


def read_cached(path: Path) -> bytes:
    """Returns the content of a file of the cache; raises OSError also if it may be another user's, which is logged."""
    try:
        with open_regular(path.parent, path.name, owned=True) as file:
            return file.read()
    except UnsafeFile as error:
        _log.warning("Not used: %s (%s). Set ASSAY_CACHE_DIR to a folder of your own.", path, error.strerror)
        raise


def open_within(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> int:
    """Opens a regular file for reading, through links that stay in a folder; returns its descriptor.

    After resolving all links, the file must be in `within`; if None, only a link at `path` itself is checked, and must
    stay in its own folder. Raises UnsafeFile if the file is refused.
    """
    name = real = os.fspath(path)
    try:
        if within is not None or os.path.islink(name):  # noqa: PTH114 - small files are read by the ten thousand
            real = real_path(name, strict=True)
            if leads_out(name, real, within=within):
                raise UnsafeFile(errno.ELOOP, f"a link that leads out of its folder, to {real}", name)
        descriptor = os.open(real, _FILE & ~os.O_NOFOLLOW if _OPEN_FILE.fullmatch(real) else _FILE)
    except OSError as error:
        _raise(error, "a socket, or a link to itself", name)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise UnsafeFile(errno.EINVAL, "a FIFO, a device or a folder", name)


def real_path(path: str | os.PathLike[str], *, strict: bool = False) -> str:
    """Returns a path with its links resolved as `os.path.realpath` does, but not beyond an open file of a process, such
    as `/proc/1/fd/2`: a removed file has no other path."""
    name = os.fspath(path)
    for held in (name, os.readlink(name) if os.path.islink(name) else ""):  # noqa: PTH114, PTH115 - as above
        if _OPEN_FILE.fullmatch(held):
            return held
    return os.path.realpath(name, strict=strict)


def path_of_open_file(path: str | os.PathLike[str]) -> str | None:
    """Returns the path that an open file of a process, such as `/proc/1/fd/2`, has or had; None for other paths."""
    name = os.fspath(path)
    return os.readlink(name).removesuffix(" (deleted)") if _OPEN_FILE.fullmatch(name) else None  # noqa: PTH115


def leads_out(link: str, real: str, *, within: str | os.PathLike[str] | None = None) -> bool:
    """Returns True if a resolved path is outside of a folder, or of the link's own; blobs of a hub cache are inside."""
    folder = os.path.realpath(os.path.dirname(link))  # noqa: PTH120
    cache, is_snapshot, _ = folder.rpartition("/snapshots/")
    allowed = [folder if within is None else os.path.realpath(within), *([f"{cache}/blobs"] if is_snapshot else [])]
    return not any(real.startswith(f"{root.rstrip('/')}/") for root in allowed)


def copy_regular_files(source: Path, target: Path, *, reserved: frozenset[str] = frozenset()) -> Copied:
    """Copies the regular files of a folder written by other programs into a folder that only Assay writes.

    Files get mode 644, and replace files of the same name. The following are left out and counted: links, files with
    several names, FIFOs, sockets, devices, unreadable entries, names that are not printable UTF-8, start with a dot, or
    are HEAD (settings of a repository contain commands that git runs), the `reserved` names, in any case, directly in
    the folder, and everything beyond 10,000 files, 100,000 entries, 12 levels, or `LARGEST_COPY_BYTES` in total.
    """
    copied, entries = Copied(), 0
    waiting = [PurePosixPath()]
    while waiting:
        folder = waiting.pop()
        try:
            descriptor = _open_folder(source, folder)
        except OSError:
            if not folder.parts:
                raise
            copied.dropped["unreadable folders"] += 1
            continue
        try:
            with os.scandir(descriptor) as listed:
                for entry in listed:
                    entries += 1
                    if entries > _MOST_ENTRIES:
                        copied.dropped[f"further entries, not counted beyond {_MOST_ENTRIES}"] = 1
                        return copied
                    if not entry.name.isprintable():  # also excludes surrogates of bytes outside UTF-8
                        copied.dropped["names that are not printable"] += 1
                    elif entry.name.startswith(".") or entry.name.casefold() == "head":
                        copied.dropped["hidden names, or HEAD"] += 1
                    elif not folder.parts and entry.name.casefold() in reserved:
                        copied.dropped["names of Assay's own files"] += 1
                    elif not entry.is_dir(follow_symlinks=False):
                        _copy_file(descriptor, entry.name, target / folder, copied=copied)
                    elif len(folder.parts) < _MOST_LEVELS:
                        waiting.append(folder / entry.name)
                    else:
                        copied.dropped[f"folders deeper than {_MOST_LEVELS} levels"] += 1
        finally:
            os.close(descriptor)
    return copied


def _copy_file(folder: int, name: str, target: Path, *, copied: Copied) -> None:
    try:
        source = _open_file(folder, name, shown=name)
    except UnsafeFile as error:
        copied.dropped[error.strerror or "unsafe files"] += 1
        return
    except OSError:
        copied.dropped["unreadable files"] += 1
        return
    with source:
        status = os.fstat(source.fileno())
        if status.st_nlink != 1:
            copied.dropped["files with several names"] += 1
        elif copied.files >= _MOST_FILES or copied.bytes + status.st_size > LARGEST_COPY_BYTES:
            copied.dropped[f"files beyond {_MOST_FILES}, or {LARGEST_COPY_BYTES >> 20} MiB together"] += 1
        elif (target / name).is_dir() or any(parent.is_file() for parent in (target, *target.parents)):
            copied.dropped["names that are both a file and a folder"] += 1
        else:
            target.mkdir(parents=True, exist_ok=True)
            unfinished = target / f".copied-{os.getpid()}"
            unfinished.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(unfinished, flags, 0o644), "wb") as file:
                left = status.st_size  # without namespaces, a process may still be writing
                while block := source.read(min(left, _BLOCK_BYTES)):
                    left -= file.write(block)
            unfinished.replace(target / name)
            copied.files += 1
            copied.bytes += status.st_size


def _open_folder(root: Path, path: PurePosixPath) -> int:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for number, part in enumerate(path.parts, 1):
        try:
            inner = os.open(part, _FOLDER, dir_fd=descriptor)
        except OSError as error:
            _raise(error, "links", str(root.joinpath(*path.parts[:number])))
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def _open_file(folder: int, name: str, *, shown: str) -> BinaryIO:
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        _raise(error, "sockets" if error.errno == errno.ENXIO else "links", shown)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UnsafeFile(errno.EINVAL, "FIFOs, devices or folders in place of files", shown)


def _raise(error: OSError, kind: str, shown: str) -> NoReturn:
    if error.errno in _NO_FOLLOW_ERRORS and not isinstance(error, UnsafeFile):
        raise UnsafeFile(error.errno, kind, shown) from error
    raise error
