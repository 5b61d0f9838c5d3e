"""Staged data as a shared copy in a store, for example per region, from which machines fill their caches.

The copy holds plain files: links, of which the hub's cache is full, are listed in its manifest, which is written last.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from resources.errors import BadInput, StorageError
from resources.storage import storage
from resources.storage.file_copy import RANGE_BYTES, copy_file

MANIFEST = "staged.json"
_PARALLEL = 4
_LEFT_OUT = (".lock", ".partial", ".incomplete", ".unfinished")


@dataclass(frozen=True)
class Tree:
    """Local folders, by their names in a shared copy."""

    folders: Mapping[str, Path]
    notes: Path
    """Folder for the state of partial copies."""

    def local(self, relative: str) -> Path:
        """Returns the local path of a file in the copy."""
        top, _, rest = relative.partition("/")
        return self.folders[top] / rest

    def check(self, relative: str, *, points_to: str = "") -> None:
        """Raises StorageError if a name, or the target of a link, leads outside of this tree's folders."""
        top, _, rest = relative.partition("/")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(rest), points_to) if points_to else rest)
        if top not in self.folders or posixpath.isabs(place) or place.split("/")[0] == "..":
            raise StorageError(
                expected=f"files within {', '.join(self.folders)} in a shared copy",
                found=f"{relative} {points_to}".strip(),
                remedy="trust no copy of other people: make your own with `assay stage --target`",
            )

    def inventory(self, is_included: Callable[[str], bool]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Returns size and SHA-256 of the wanted files, and the targets of the wanted links, by name in the copy."""
        files: dict[str, dict[str, Any]] = {}
        links: dict[str, str] = {}
        for top, folder in self.folders.items():
            for path in sorted(folder.rglob("*")):
                relative = f"{top}/{path.relative_to(folder).as_posix()}"
                if path.name.endswith(_LEFT_OUT) or "/.locks/" in relative or not is_included(relative):
                    continue
                if path.is_symlink():
                    links[relative] = path.readlink().as_posix()
                elif path.is_file():
                    files[relative] = {"bytes": path.stat().st_size, "sha256": storage.content_digest(str(path))}
        return files, links


def share(tree: Tree, uri: str, staged: dict[str, Any], *, is_included: Callable[[str], bool]) -> int:
    """Updates a shared copy with locally staged data; returns the number of bytes sent."""
    files, links = tree.inventory(is_included)
    before = read_manifest(uri) or {}
    known = before.get("files", {})
    missing = [relative for relative, file in files.items() if known.get(relative) != file]
    filesystem, root = fsspec.core.url_to_fs(storage.absolute(uri))

    def send(relative: str) -> None:
        target = storage.join(root, relative)
        filesystem.makedirs(storage.parent(target), exist_ok=True)
        filesystem.put_file(str(tree.local(relative)), target)

    try:
        with ThreadPoolExecutor(_PARALLEL) as threads:
            list(threads.map(send, missing))
    except OSError as error:
        raise StorageError(
            expected=f"to write into {uri}", found=str(error), remedy="check that it is yours, and run again"
        ) from error
    merged = {
        part: {**before.get(part, {}), **content} for part, content in staged.items() if isinstance(content, dict)
    }
    content = {**before, **merged, "files": {**known, **files}, "links": {**before.get("links", {}), **links}}
    storage.write_bytes(storage.join(uri, MANIFEST), json.dumps(content, indent=2, sort_keys=True).encode())
    return sum(files[relative]["bytes"] for relative in missing)


def fill(tree: Tree, uri: str, *, is_included: Callable[[str], bool]) -> int:
    """Copies the wanted files of a shared copy to this machine, resuming an earlier call; returns the byte count."""
    manifest = read_manifest(uri)
    if manifest is None:
        raise BadInput(
            expected=f"a shared copy of staged data at {uri}",
            found=f"no {MANIFEST} there",
            remedy="correct the address, or make the copy with `assay stage --target`",
        )
    files = {relative: file for relative, file in manifest["files"].items() if is_included(relative)}
    links = {relative: points_to for relative, points_to in manifest["links"].items() if is_included(relative)}
    for relative in files:
        tree.check(relative)
    for relative, points_to in links.items():
        tree.check(relative, points_to=points_to)
    missing = {
        relative: file
        for relative, file in files.items()
        if not (path := tree.local(relative)).is_file() or path.stat().st_size != file["bytes"]
    }
    shared = {file.uri: file for file in storage.list_files(uri)} if missing else {}

    def fetch(relative: str) -> None:
        source = shared.get(storage.join(uri, relative))
        target = tree.local(relative)
        if source is None:
            raise _damaged(uri, relative, "nothing there")
        copy_file(
            source,
            target,
            sidecar=tree.notes / hashlib.sha256(f"{uri} {relative}".encode()).hexdigest(),
            range_bytes=RANGE_BYTES,
            stopped=lambda: False,
            on_bytes=lambda number: None,
        )
        if storage.content_digest(str(target)) != missing[relative]["sha256"]:
            target.unlink()
            raise _damaged(uri, relative, "another content")

    with ThreadPoolExecutor(_PARALLEL) as threads:
        list(threads.map(fetch, missing))
    for relative, points_to in links.items():
        link = tree.local(relative)
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(points_to)
    return sum(file["bytes"] for file in missing.values())


def read_manifest(uri: str) -> dict[str, Any] | None:
    """Returns the manifest of a shared copy or of this machine's cache; None if there is none."""
    try:
        return json.loads(storage.read_bytes(storage.join(uri, MANIFEST)))
    except (FileNotFoundError, ValueError):
        return None


def _damaged(uri: str, relative: str, content: str) -> StorageError:
    return StorageError(
        expected=f"{relative} in {uri} as its manifest says",
        found=content,
        remedy="make a new shared copy with `assay stage --target`",
    )
