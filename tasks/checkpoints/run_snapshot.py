"""The checkpoints of a run as a listing tells them, with verdicts on completeness that are remembered.

One listing per run. A verdict needs a look into files, so it is kept in the user's cache by what the listing said of
the folder: the names, sizes, and checksums or times of its files. Nothing here is a truth of its own: a lost memory
costs the looks.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import fsspec
import orjson

from pools.weights.model_files import INDEX_NAME, TOKENIZER_FILES, digest_model_folder, inspect_model_folder
from pools.weights.native_files import Exports, inspect_native_folder
from resources.errors import AssayError, BadInput, StorageError
from resources.settings import settings
from resources.storage import storage
from resources.storage.listings import PAGE
from resources.storage.storage import FileInfo
from resources.storage.tree_signature import list_tree
from tasks.checkpoints.discovery import Kind, looks_like_checkpoint, native_folders, native_name, within
from tasks.spec.names import name_of

_LOOKS_AT_ONCE = 16  # into an object store, each of which waits for the network
_RANGES = 8  # of names, in which a run that is known from before is listed at once
_FILES_OF_A_CHECKPOINT = 4  # at least
_SIZES_DIFFER = frozenset({*TOKENIZER_FILES, "tokenizer_config.json"})  # only whether they are there matters
_ALIKE = frozenset({"config.json", INDEX_NAME})  # judged by what they say, which most often is the same all along
_SETTLED_SECONDS = 3.0  # after which another write shows in a file's time; some file systems count in steps of 2 s
_FORMAT = 2
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
        """Returns whether it can be evaluated."""
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


def snapshot_run(
    uri: str, *, reference: str | None = None, evaluated: Callable[[str, str], bool] = lambda name, listing: False
) -> list[SeenCheckpoint]:
    """Every checkpoint of a run, by step; none where the run has written none yet.

    Native checkpoints whose step has a complete export are left out.

    Args:
        uri: the run.
        reference: as in `find_checkpoints`.
        evaluated: whether a checkpoint of some name was evaluated in the state that a listing shows, and so was whole.

    Raises:
        StorageError: the run cannot be listed.
    """
    remembered = _read_memory(uri, "checkpoints")
    rows = remembered.get("checkpoints", ())
    tree = list_tree(uri, between=_marks(rows))
    signature = f"{tree.signature} {reference or ''}"
    began = time.time()
    if remembered.get("signature") == signature and not any(row[3] == "levanter" and row[5] for row in rows):
        return [_from_row(row) for row in rows]  # what a native one lacks may lie elsewhere, and be there by now
    known = {(row[0], row[4]): tuple(row[5]) for row in rows}
    files = tree.files()
    found = _judged(files, known, reference=reference, evaluated=evaluated)
    unsettled = _unsettled(found, files, since=began - _SETTLED_SECONDS)
    _remember(uri, "" if unsettled else signature, [one for one in found if one.uri not in unsettled])
    return found


def _unsettled(found: Sequence[SeenCheckpoint], files: Iterable[FileInfo], *, since: float) -> set[str]:
    """Incomplete checkpoints that may be completed without a change in what a listing shows: written just now."""
    if not any(one.problems for one in found):
        return set()
    new = [file.uri for file in files if file.checksum is None and file.modified > since]
    return {one.uri for one in found if one.problems and any(uri.startswith(f"{one.uri}/") for uri in new)}


def _marks(rows: Sequence[Sequence[Any]]) -> list[str]:
    """A few checkpoints that part the run into ranges of names, so that a large one is listed in parallel."""
    ranges = min(_RANGES, len(rows) * _FILES_OF_A_CHECKPOINT // PAGE)
    names = sorted(row[0] for row in rows) if ranges > 1 else []
    return [names[len(names) * one // ranges] for one in range(1, ranges)]


def _judged(
    files: Sequence[FileInfo],
    known: Mapping[tuple[str, str], tuple[str, ...]],
    *,
    reference: str | None,
    evaluated: Callable[[str, str], bool],
) -> list[SeenCheckpoint]:
    folders: dict[str, list[FileInfo]] = defaultdict(list)
    for file in files:
        folders[file.uri.rpartition("/")[0]].append(file)
    native = native_folders(folders)
    listed = [
        _Listed(folder, held, *name_of(folder)[1:], listing_digest(folder, held))
        for folder, held in folders.items()
        if looks_like_checkpoint(folder, held) and not (native and within(folder, native))
    ]
    verdicts = dict(known)
    for one in listed:
        if evaluated(one.name, one.listing):
            verdicts.setdefault((one.folder, one.listing), ())
    verdicts |= _verdicts(listed, verdicts)
    found = [
        SeenCheckpoint(one.folder, one.name, one.step, "huggingface", one.listing, verdicts[one.folder, one.listing])
        for one in listed
    ]
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


class _Listed(NamedTuple):
    """A checkpoint in Hugging Face's layout, before it is judged."""

    folder: str
    files: Sequence[FileInfo]
    name: str
    step: int
    listing: str

    def shape(self) -> frozenset[tuple[str, int | str]]:
        """Returns what makes a checkpoint whole: files by size, some by checksum, or only by name."""
        start = len(self.folder) + 1
        found: list[tuple[str, int | str]] = []
        for file in self.files:
            name = file.uri[start:]
            if name in _SIZES_DIFFER:
                found.append((name, 0))
            elif name in _ALIKE:
                found.append((name, file.checksum or file.size))
            elif name.endswith(".safetensors"):
                found.append((name, file.size))
        return frozenset(found)


def _verdicts(
    listed: Sequence[_Listed], known: Mapping[tuple[str, str], tuple[str, ...]]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Returns what is to be said of checkpoints of which nothing is known; each that needs a look gets one.

    Object stores have whole files only. There a checkpoint with just the files of one that is whole is whole too: of
    ten thousand alike, one is looked into.
    """
    unknown = [one for one in listed if (one.folder, one.listing) not in known]
    if not unknown or not storage.has_whole_files(unknown[0].folder):
        return {(one.folder, one.listing): inspect_model_folder(one.folder, one.files).problems for one in unknown}
    whole = {one.shape() for one in listed if known.get((one.folder, one.listing)) == ()}
    first = {shape: one for one in unknown if (shape := one.shape()) not in whole}
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as threads:

        def look_into(some: Sequence[_Listed]) -> None:
            looks = threads.map(lambda one: inspect_model_folder(one.folder, one.files).problems, some)
            found.update(zip(((one.folder, one.listing) for one in some), looks, strict=True))

        look_into(list(first.values()))
        whole |= {shape for shape, one in first.items() if not found[one.folder, one.listing]}
        rest = [one for one in unknown if (one.folder, one.listing) not in found]
        found.update(((one.folder, one.listing), ()) for one in rest if one.shape() in whole)
        look_into([one for one in rest if one.shape() not in whole])
    return found


def with_digests(run: str, checkpoints: Sequence[SeenCheckpoint], *, reference: str | None) -> list[SeenCheckpoint]:
    """Returns checkpoints with digests; without checksums in the store their weights are read, once, then remembered.

    A checkpoint that changes meanwhile gets none. Those in Levanter's own layout are read each time, since a part of
    what they are lies elsewhere.
    """
    remembered = _read_memory(run, "digests")
    known: dict[str, str] = remembered.get("digests", {})
    missing = [one for one in checkpoints if _key(one) not in known]
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as threads:
        found = {_key(one): digest for one, digest in zip(
            missing, threads.map(lambda one: _digest(one, reference=reference), missing), strict=True
        )}  # fmt: skip
    kept = {_key(one): digest for one in missing if one.kind == "huggingface" and (digest := found[_key(one)])}
    if kept:
        _write_memory(run, "digests", {"digests": known | kept})
    return [replace(one, digest=known.get(_key(one)) or found.get(_key(one))) for one in checkpoints]


def _key(one: SeenCheckpoint) -> str:
    return f"{one.listing} {storage.absolute(one.uri)}"


def _digest(one: SeenCheckpoint, *, reference: str | None) -> str | None:
    try:
        files = storage.list_files(one.uri)
        if one.kind == "levanter":
            beside = reference or Exports().beside(one.uri)
            return digest_model_folder(inspect_native_folder(one.uri, files, reference=beside).folder).checkpoint
        folder = inspect_model_folder(one.uri, files)
        digest = digest_model_folder(folder).checkpoint
        return digest if listing_digest(one.uri, folder.files.values()) == one.listing else None
    except AssayError:
        return None


def _remember(uri: str, signature: str, found: Sequence[SeenCheckpoint]) -> None:
    rows = [(one.uri, one.name, one.step, one.kind, one.listing, one.problems) for one in found]
    _write_memory(uri, "checkpoints", {"signature": signature, "checkpoints": rows})


def _memory(uri: str, what: str) -> str:
    name = hashlib.blake2b(storage.absolute(uri).encode(), digest_size=16).hexdigest()
    return str(settings().cache_dir / "listings" / f"{name}.{what}.json")


def _read_memory(uri: str, what: str) -> dict[str, Any]:
    try:
        content = orjson.loads(storage.read_bytes(_memory(uri, what)))
    except (FileNotFoundError, StorageError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("format") == _FORMAT else {}


def _write_memory(uri: str, what: str, content: Mapping[str, Any]) -> None:
    with suppress(StorageError, orjson.JSONEncodeError):  # a full disk; a name that is not UTF-8
        storage.write_bytes(_memory(uri, what), orjson.dumps({"format": _FORMAT, **content}))


def _from_row(row: Sequence[Any]) -> SeenCheckpoint:
    uri, name, step, kind, listing, problems = row
    return SeenCheckpoint(uri, name, step, kind, listing, tuple(problems))
