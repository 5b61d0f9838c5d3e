"""Listings of files in few calls: the raw entries for file lists and tree signatures.

A local folder is walked once. Google's store returns pages of 1,000 objects, restricted to the used fields, a fifth of
the full answer. If some names are known in advance, pages are requested in parallel.
"""

from __future__ import annotations

import binascii
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, pairwise
from typing import Any, Literal

import fsspec
import orjson

from resources.storage.regular_files import leads_out, real_path

PAGE = 1000
"""Maximum number of objects in a page of Google's store."""
_ASKED = "nextPageToken,items(name,size,updated,md5Hash,crc32c)"
_AT_ONCE = 8
_GOOGLE = frozenset({"gs", "gcs"})


@dataclass(frozen=True)
class ContentHash:
    """A hash of a whole file that readers can recompute, in lower-case hex; for `etag` see `etag_is_md5`."""

    kind: Literal["md5", "crc32c", "etag", "sha256", "git"]
    value: str


@dataclass(frozen=True)
class FileInfo:
    """Metadata of a file from a store's listing.

    `checksum` is the store's own, or None, and changes with the content. `content_hash` can be verified against the
    bytes. `modified` is in seconds since the epoch, 0.0 if unknown. A file that is not `regular` (a pipe, a device, a
    broken link, or a link that leaves the folder) has no content: opening it may hang. `changed` is a local disk's time
    of any change in nanoseconds, which programs cannot set (for a link, the sum of both files'). `link` is the target
    of a link.
    """

    uri: str
    size: int
    modified: float
    checksum: str | None
    content_hash: ContentHash | None = None
    regular: bool = True
    changed: int | None = None
    link: str | None = None

    @property
    def place(self) -> str:
        """Returns the location to read from, with a link resolved as it was when it was checked."""
        return self.link or self.uri


LocalFile = tuple[str, int, float, int, int, bool, str | None]
"""Name, size, mtime in s, mtime in ns, ctime in ns, True if regular, and target of a link.

A link has the size of its target, 0 if it is broken, and the later mtime of both: its content changes when the link is
replaced, or when its target is written.
"""


def walk(path: str, *, within: str | None = None) -> Iterator[tuple[str, list[LocalFile]]]:
    """Yields each folder at or below a local folder with its direct files; links to folders are left out.

    Temporary files of active writes, and folders that vanish during the walk, are left out. Links that lead out of
    `within`, or of `path` if None, are not regular.
    """
    files, folders = [], []
    within = within or path
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif not (name.startswith(".") and name.endswith(".partial")):
                if entry.is_symlink():
                    files += _link(entry, within)
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted after it was listed
                    continue
                regular = stat.S_ISREG(status.st_mode)
                times = (status.st_mtime, status.st_mtime_ns, status.st_ctime_ns)
                files.append((name, status.st_size, *times, regular, None))
    yield path, files
    for folder in folders:
        try:
            yield from walk(folder, within=within)
        except FileNotFoundError:
            continue


def _link(entry: os.DirEntry[str], within: str) -> list[LocalFile]:
    try:
        own = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return []
    times = (own.st_mtime, own.st_mtime_ns, own.st_ctime_ns)
    try:
        behind, real = entry.stat(), real_path(entry.path)
    except OSError:
        return [(entry.name, 0, *times, False, None)]
    if stat.S_ISDIR(behind.st_mode):
        return []
    if not stat.S_ISREG(behind.st_mode) or leads_out(entry.path, real, within=within):
        return [(entry.name, 0, *times, False, None)]
    last = max(own, behind, key=lambda status: status.st_mtime_ns)
    changed = own.st_ctime_ns + behind.st_ctime_ns
    return [(entry.name, behind.st_size, last.st_mtime, last.st_mtime_ns, changed, True, real)]


def bucket_objects(
    filesystem: fsspec.AbstractFileSystem, path: str, *, between: Sequence[str] = ()
) -> list[dict[str, Any]] | None:
    """Lists the objects at or below a bucket's path with Google's metadata; returns None for other stores.

    `between` are names in the bucket, in order, that split the listing into parallel ranges.
    """
    protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
    if _GOOGLE.isdisjoint(protocols):
        return None
    bucket, _, name = path.partition("/")
    folder = f"{name.rstrip('/')}/" if name.strip("/") else ""
    ranges = list(pairwise((None, *between, None)))

    def listed(limits: tuple[str | None, str | None]) -> list[dict[str, Any]]:
        return list(_range(filesystem, bucket, prefix=folder, start=limits[0], end=limits[1]))

    if len(ranges) == 1:
        objects = listed(ranges[0])
    else:
        with ThreadPoolExecutor(min(_AT_ONCE, len(ranges))) as threads:
            objects = list(chain.from_iterable(threads.map(listed, ranges)))
    if objects or not folder:
        return objects
    exact = _page(filesystem, bucket, prefix=name, maxResults=1).get("items", ())  # a file sorts before longer names
    return [item for item in exact if item["name"] == name]


def _range(
    filesystem: fsspec.AbstractFileSystem, bucket: str, *, prefix: str, start: str | None, end: str | None
) -> Iterator[dict[str, Any]]:
    token = None
    while True:
        page = _page(
            filesystem, bucket, prefix=prefix or None, startOffset=start, endOffset=end, pageToken=token,
            maxResults=PAGE,
        )  # fmt: skip
        yield from (item for item in page.get("items", ()) if not is_marker(item["name"]))
        token = page.get("nextPageToken")
        if token is None:
            return


def _page(filesystem: fsspec.AbstractFileSystem, bucket: str, **asked: Any) -> dict[str, Any]:
    _, content = filesystem.call("GET", "b/{}/o", bucket, fields=_ASKED, **asked)  # pyright: ignore[reportAttributeAccessIssue]
    return orjson.loads(content)


def is_marker(name: str) -> bool:
    """Returns True if an object only marks a folder, as the store's own console and mounted buckets create them."""
    return name.endswith("/")


def files_of_walk(uri: str, folders: Iterable[tuple[str, Sequence[LocalFile]]]) -> list[FileInfo]:
    """Returns the files of a walk in order of their locations, which are below `uri`: the first walked folder."""
    files, start, root = [], None, uri.rstrip("/")
    for folder, held in folders:
        if start is None:
            start = len(folder.rstrip("/"))
        prefix = root + folder[start:]
        files += [
            FileInfo(f"{prefix}/{name}", size, modified, None, regular=regular, changed=changed, link=link)
            for name, size, modified, _, changed, regular, link in held
        ]
    return sorted(files, key=lambda file: file.uri)


def files_of_bucket(uri: str, objects: Sequence[dict[str, Any]]) -> list[FileInfo]:
    """Returns the files of the objects found below a location."""
    name = uri.split("://", 1)[-1].partition("/")[2].rstrip("/")
    return described(uri, [(item["name"][len(name) :].lstrip("/"), item) for item in objects])


def described(uri: str, entries: Iterable[tuple[str, dict[str, Any]]]) -> list[FileInfo]:
    """Returns files from their names relative to a location; an empty name is the location itself."""
    root = uri.rstrip("/")
    files = [
        _file_info(f"{root}/{name}" if name else uri, info)
        for name, info in entries
        if not (name.endswith(".partial") and name.rpartition("/")[2].startswith("."))
    ]
    return sorted(files, key=lambda file: file.uri)


def _file_info(uri: str, info: dict) -> FileInfo:
    modified = info.get("mtime") or info.get("updated") or info.get("LastModified") or info.get("created") or 0.0
    if not isinstance(modified, (int, float)):
        modified = modified.timestamp() if hasattr(modified, "timestamp") else _from_iso(str(modified))
    checksum = info.get("md5Hash") or info.get("crc32c") or info.get("ETag") or info.get("content_id")
    return FileInfo(
        uri, int(info.get("size") or 0), float(modified), str(checksum) if checksum else None, _content_hash(uri, info)
    )


def _content_hash(uri: str, info: dict[str, Any]) -> ContentHash | None:
    if content_id := info.get("content_id"):  # of the hub
        return ContentHash("sha256" if len(content_id) == 64 else "git", content_id)
    with suppress(binascii.Error, ValueError):
        if md5 := info.get("md5Hash"):
            return ContentHash("md5", binascii.a2b_base64(md5, strict_mode=True).hex())
        if crc32c := info.get("crc32c"):
            return ContentHash("crc32c", binascii.a2b_base64(crc32c, strict_mode=True).hex())
    etag = str(info.get("ETag") or "").strip('"').lower()
    if uri.startswith(("s3://", "s3a://")) and re.fullmatch("[0-9a-f]{32}", etag):  # multipart ETags have a dash
        return ContentHash("etag", etag)
    return None


def _from_iso(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
