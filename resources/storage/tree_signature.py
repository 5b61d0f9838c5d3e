"""A single value for the state of a whole tree of files, from its listing."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from resources.storage import hub, listings, storage
from resources.storage.listings import FileInfo


@dataclass(frozen=True)
class Tree:
    """The files of a tree, on demand, and a value that changes with the name, size, checksum or time of any file."""

    signature: str
    files: Callable[[], Sequence[FileInfo]]


def list_tree(uri: str, *, between: Sequence[str] = (), belongs: Callable[[str], bool] = lambda name: False) -> Tree:
    """Returns the state of all files below a location, with a single walk or listing.

    `between` are locations below it, in order, that speed up the listing of a store: see `bucket_objects`. `belongs`
    selects branches and tags of a repository of the hub, as in `list_run`.
    """
    if storage.is_local(uri) and storage.local_path(uri).is_dir():
        with storage.reported(uri, "list"):
            folders = sorted(listings.walk(str(storage.local_path(uri).absolute())))
        for _, held in folders:
            held.sort()
        return Tree(_digest(uri, folders), lambda: listings.files_of_walk(uri, folders))
    if hub.is_repository(uri):
        return Tree(_digest(uri, storage.refs_of_run(uri, belongs)), lambda: storage.list_run(uri, belongs=belongs))
    objects = storage.bucket_objects(uri, between=between)
    if objects is not None:
        listed = [(item["name"], item.get("size"), item.get("md5Hash") or item.get("crc32c") or item.get("updated"))
                for item in objects]  # fmt: skip
        return Tree(_digest(uri, listed), lambda: listings.files_of_bucket(uri, objects))
    files = storage.list_files(uri)
    return Tree(_digest(uri, [(file.uri, file.size, file.checksum or file.modified) for file in files]), lambda: files)


def _digest(uri: str, listed: list[Any]) -> str:
    # Names on disk need not be UTF-8, as JSON requires. From version 3 on, marshal may write equal values differently.
    return hashlib.blake2b(marshal.dumps((uri, listed), 2), digest_size=16).hexdigest()
