"""The checkpoints of a run as a listing tells them, with verdicts on completeness that are remembered.

One listing per run. A verdict needs a look into files, so it is kept in the user's cache by what the listing said of
the folder: the names, sizes, and checksums or times of its files. Nothing here is a truth of its own: a lost memory
costs the looks.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import orjson

from pools.model_files import digest_model_folder, inspect_model_folder
from pools.native_files import Exports, inspect_native_folder
from resources import storage
from resources.errors import AssayError, BadInput
from resources.settings import settings
from resources.storage import FileInfo
from resources.tree_signature import tree_signature
from tasks.checkpoints import Kind, looks_like_checkpoint, native_folders, native_name
from tasks.names import name_of

_LOOKS_AT_ONCE = 16  # into an object store, each of which waits for the network
_FORMAT = 1
_GLOB = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class SeenCheckpoint:
    """A checkpoint as a listing shows it.

    `listing` changes with any of its files. `problems` say why it cannot be evaluated. `digest` is known where it was
    asked for: see `with_digests`.
    """

    uri: str
    name: str
    step: int
    kind: Kind
    listing: str
    problems: tuple[str, ...]
    digest: str | None = None

    @property
    def complete(self) -> bool:
        """Whether it can be evaluated."""
        return not self.problems


def listing_digest(folder: str, files: Iterable[FileInfo]) -> str:
    """Over what a listing tells of the files of a folder: the same as long as none was written again."""
    start = len(folder.rstrip("/")) + 1
    told = sorted((file.uri[start:], file.size, file.checksum or file.modified) for file in files)
    return hashlib.blake2b(repr(told).encode(), digest_size=12).hexdigest()


def expand_runs(patterns: Sequence[str]) -> list[str]:
    """The folders behind locations and patterns such as `gs://bucket/runs/llama-*`, each once, in order.

    Raises:
        BadInput: a pattern matches nothing, or two runs have one name.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = _folders(pattern) if _GLOB & set(pattern) else [pattern.rstrip("/")]
        if not matches:
            raise BadInput(expected=f"runs at {pattern}", found="none", remedy="correct the pattern, or wait for one")
        found.update(dict.fromkeys(matches))
    by_name: dict[str, str] = {}
    for uri in found:
        other = by_name.setdefault(name_of(uri)[0], uri)
        if other != uri:
            raise BadInput(
                expected="runs with names of their own",
                found=f"{name_of(uri)[0]} at {other} and at {uri}",
                remedy="write a policy for each, with evaluation paths of their own",
            )
    return list(found)


def _folders(pattern: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(storage.absolute(pattern))
    filesystem.invalidate_cache()
    with storage.reported(pattern, "list"):
        found = filesystem.glob(path, detail=True)
    folders = sorted(name for name, info in found.items() if info["type"] == "directory")
    return [name if storage.is_local(pattern) else filesystem.unstrip_protocol(name) for name in folders]


def look_at_run(uri: str, *, reference: str | None = None) -> list[SeenCheckpoint]:
    """Every checkpoint of a run, by step; none where the run has written none yet.

    Native checkpoints whose step has a complete export are left out. `reference` is as in `find_checkpoints`.

    Raises:
        StorageError: the run cannot be listed.
    """
    tree, files = tree_signature(uri)
    signature = f"{tree} {reference or ''}"
    remembered = _remembered(uri)
    if remembered.get("signature") == signature:
        return [_from_row(row) for row in remembered["checkpoints"]]
    known = {(row[0], row[4]): tuple(row[5]) for row in remembered.get("checkpoints", ())}
    found = _judged(storage.list_files(uri) if files is None else files, known, reference=reference)
    _remember(uri, signature, found)
    return found


def _judged(
    files: Sequence[FileInfo], known: Mapping[tuple[str, str], tuple[str, ...]], *, reference: str | None
) -> list[SeenCheckpoint]:
    folders: dict[str, list[FileInfo]] = defaultdict(list)
    for file in files:
        folders[file.uri.rpartition("/")[0]].append(file)
    native = native_folders(folders)
    parts = [
        (folder, held)
        for folder, held in folders.items()
        if looks_like_checkpoint(folder, held)
        and not any(folder == other or folder.startswith(f"{other}/") for other in native)
    ]
    listed = [(folder, held, listing_digest(folder, held)) for folder, held in parts]
    unknown = [one for one in listed if (one[0], one[2]) not in known]
    verdicts = dict(known) | dict(_verdicts(unknown))
    found = []
    for folder, _, listing in listed:
        _, name, step = name_of(folder)
        found.append(SeenCheckpoint(folder, name, step, "huggingface", listing, verdicts[folder, listing]))
    exported = {checkpoint.step for checkpoint in found if checkpoint.complete}
    exports = Exports()
    for folder, held in native.items():
        run, name, step = native_name(folder)
        whole = inspect_native_folder(folder, held, reference=reference or exports.beside(folder))
        if whole.step is not None and whole.step != step:
            name, step = f"{run}-{whole.step}", whole.step
        if step not in exported:
            listing, problems = listing_digest(folder, held), whole.folder.problems
            found.append(SeenCheckpoint(folder, name, step, "levanter", listing, problems))
    return sorted(found, key=lambda one: (one.step, one.uri))


def _verdicts(
    unknown: Sequence[tuple[str, list[FileInfo], str]],
) -> Iterator[tuple[tuple[str, str], tuple[str, ...]]]:
    def judge(one: tuple[str, list[FileInfo], str]) -> tuple[tuple[str, str], tuple[str, ...]]:
        folder, held, listing = one
        return (folder, listing), inspect_model_folder(folder, held).problems

    if not unknown or storage.is_local(unknown[0][0]):
        yield from map(judge, unknown)
        return
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as threads:
        yield from threads.map(judge, unknown)


def with_digests(checkpoints: Sequence[SeenCheckpoint], *, reference: str | None) -> list[SeenCheckpoint]:
    """The same with their digests, for which weights are read where the store has no checksums; once, then remembered.

    A checkpoint that changes meanwhile gets none.
    """
    return [replace(one, digest=_digest(one, reference=reference)) for one in checkpoints]


def _digest(one: SeenCheckpoint, *, reference: str | None) -> str | None:
    try:
        files = storage.list_files(one.uri)
        folder = inspect_model_folder(one.uri, files)
        if one.kind == "levanter":
            beside = reference or Exports().beside(one.uri)
            folder = inspect_native_folder(one.uri, files, reference=beside).folder
        return digest_model_folder(folder).checkpoint
    except AssayError:
        return None


def _memory(uri: str) -> str:
    name = hashlib.blake2b(storage.absolute(uri).encode(), digest_size=16).hexdigest()
    return str(settings().cache_dir / "listings" / f"{name}.json")


def _remembered(uri: str) -> dict[str, Any]:
    try:
        content = orjson.loads(storage.read_bytes(_memory(uri)))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("format") == _FORMAT else {}


def _remember(uri: str, signature: str, found: Sequence[SeenCheckpoint]) -> None:
    rows = [(one.uri, one.name, one.step, one.kind, one.listing, one.problems) for one in found]
    content = {"format": _FORMAT, "signature": signature, "checkpoints": rows}
    storage.write_bytes(_memory(uri), orjson.dumps(content))


def _from_row(row: Sequence[Any]) -> SeenCheckpoint:
    uri, name, step, kind, listing, problems = row
    return SeenCheckpoint(uri, name, step, kind, listing, tuple(problems))
