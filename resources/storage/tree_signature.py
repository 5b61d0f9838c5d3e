"""One value for the state of a whole tree of files, as far as a listing tells it."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from resources.storage import listings, storage
from resources.storage.listings import FileInfo


@dataclass(frozen=True)
class Tree:
    """The state of a tree: a value that changes with the name, size, checksum or time of any file, and its files.

    The files are described when they are asked for: most often the value says that nothing changed.
    """

    signature: str
    files: Callable[[], Sequence[FileInfo]]


def list_tree(uri: str, *, between: Sequence[str] = ()) -> Tree:
    """The state of everything below a location, by one walk or one listing.

    Args:
        uri: the location.
        between: locations below it, in order, which make a listing of a store faster: see `bucket_objects`.
    """
    if storage.is_local(uri) and storage.local_path(uri).is_dir():
        with storage.reported(uri, "list"):
            folders = sorted(listings.walk(str(storage.local_path(uri).absolute())))
        for _, held in folders:
            held.sort()
        return Tree(_digest(uri, folders), lambda: listings.files_of_walk(uri, folders))
    objects = storage.bucket_objects(uri, between=between)
    if objects is not None:
        listed = [(item["name"], item.get("size"), item.get("md5Hash") or item.get("crc32c") or item.get("updated"))
                for item in objects]  # fmt: skip
        return Tree(_digest(uri, listed), lambda: listings.files_of_bucket(uri, objects))
    files = storage.list_files(uri)
    return Tree(_digest(uri, [(file.uri, file.size, file.checksum or file.modified) for file in files]), lambda: files)


def _digest(uri: str, listed: list[Any]) -> str:
    # Names on disk need not be UTF-8, as JSON would want. From version 3 on equal values need not be written alike.
    return hashlib.blake2b(marshal.dumps((uri, listed), 2), digest_size=16).hexdigest()
