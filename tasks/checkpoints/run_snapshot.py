"""The checkpoints of a run from a single listing. Verdicts on completeness require reading files, so they are cached
per user under the listing of the folder (names, sizes, checksums or times); without the cache, the files are read
again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import fsspec
import orjson

from pools.weights.content import SETTLED_SECONDS, file_identity
from pools.weights.formats import INDEX_NAME, files_of_model, is_adapter, may_pass
from pools.weights.layouts import Exports, inspect_checkpoint, inspect_native_folder
from pools.weights.merges import merge_of, with_each_location
from pools.weights.model_files import ModelFolder, checkpoint_files, digest_model_folder, small_files
from pools.weights.overrides import override_of, without_options
from pools.weights.tokenizers import TOKENIZER_FILES, FilesIn, KnownFiles, described_by
from resources.errors import AssayError, BadInput, StorageError
from resources.settings import settings
from resources.storage import storage
from resources.storage.listings import PAGE, FileInfo
from resources.storage.mlflow_artifacts import in_mlflow, real_location
from resources.storage.regular_files import read_cached
from resources.storage.tree_signature import list_tree
from tasks.checkpoints.checkpoint import Checkpoint, Inputs, Kind
from tasks.checkpoints.discovery import checkpoint_of, layouts_in, run_named_by
from tasks.checkpoints.frameworks import is_about_marks
from tasks.checkpoints.naming import Named, counted
from tasks.spec.evaluation import digest_of
from tasks.spec.labels import InRun
from tasks.spec.steps import has_step

_LOOKS_AT_ONCE = 16  # each read of an object store waits for the network
_RANGES = 8  # ranges of names, in which a known run is listed in parallel
_FILES_OF_A_CHECKPOINT = 4  # at least
_SIZES_DIFFER = frozenset({*TOKENIZER_FILES, "tokenizer_config.json", "merges.txt"})  # only their presence matters
_ALIKE = frozenset({"config.json", INDEX_NAME})  # judged by their content, which usually is the same in all checkpoints
_FORMAT = 5
_GLOB = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class SeenCheckpoint(InRun):
    """A checkpoint as a listing shows it: `listing` changes with any of its files, `problems` lists why it is
    incomplete, `digest` is set by `with_digests` only, `merged` are the steps of a merged checkpoint's inputs, `run`,
    `label` and `series` are as in `Checkpoint`."""

    uri: str
    run: str
    name: str
    step: int
    kind: Kind
    listing: str
    problems: tuple[str, ...]
    digest: str | None = None
    merged: Inputs = ()
    label: str | None = None
    series: str = ""

    @property
    def inputs(self) -> Inputs:
        """Steps of its inputs: its own step, unless it is merged; none if it has a label."""
        return self.merged or ((self.step,) if self.label is None else ())

    @property
    def complete(self) -> bool:
        return not self.problems


def listing_digest(files: Mapping[str, FileInfo], *, reference: ModelFolder | None = None) -> str:
    """Returns a digest over the listing of a checkpoint's files by name and its reference's; it stays the same until a
    file is rewritten. On a local disk, size and modification time can be restored, but not the change time, which is
    used; inodes are not, since some mounted stores change them between listings."""
    held = [*files.items()]
    held += [(f"reference/{name}", file) for name, file in small_files(reference).items()] if reference else []
    listed = sorted((name, file.size, file.checksum or file.changed or file.modified) for name, file in held)
    return hashlib.blake2b(repr(listed).encode(), digest_size=12).hexdigest()


def listing_of(checkpoint: Checkpoint) -> str:
    """Returns the listing digest of a complete checkpoint; for a merged checkpoint, over the digests of its inputs."""
    if checkpoint.inputs:
        return listing_of_inputs(checkpoint.uri, map(listing_of, checkpoint.inputs))
    assert checkpoint.folder is not None, "only complete checkpoints are evaluated"
    return listing_digest(checkpoint.folder.files, reference=checkpoint.folder.reference)


def listing_of_inputs(uri: str, listings: Iterable[str]) -> str:
    """Returns a digest over a merge's recipe and the listing digests of its inputs; a rewritten input changes it."""
    merge = merge_of(uri)
    assert merge is not None, "only merged checkpoints have inputs"
    return digest_of([merge.recipe, *listings])


def expand_runs(patterns: Sequence[str]) -> dict[str, str]:
    """Returns the folders that match paths and patterns such as `gs://bucket/runs/llama-*`, each once, in order, with
    the names of their runs. MLflow URIs are resolved to the location of their artifacts. Raises BadInput if a pattern
    matches nothing, or if two runs have the same name."""
    uris: dict[str, None] = {}
    for pattern in patterns:
        options, place = override_of(pattern), without_options(pattern)
        place = real_location(place) if in_mlflow(place) else place
        matches = _folders(place) if _GLOB & set(place) else [place.rstrip("/")]
        if not matches:
            raise BadInput(expected=f"runs at {pattern}", found="none", remedy="correct the pattern, or wait for a run")
        uris.update(dict.fromkeys(map(options.at, matches) if options else matches))
    names = {uri: run_named_by(uri) for uri in uris}
    by_name: dict[str, str] = {}
    for uri, name in names.items():
        other = by_name.setdefault(name, uri)
        if other != uri:
            raise BadInput(
                expected="runs with names of their own",
                found=f"{name} at {other} and at {uri}",
                remedy="write a policy for each, with evaluation paths of their own",
            )
    return names


def _folders(pattern: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(storage.absolute(pattern))
    filesystem.invalidate_cache()
    with storage.reported(pattern, "list"):
        entries = filesystem.glob(path, detail=True)
    folders = sorted(name for name, info in entries.items() if info["type"] == "directory")
    return [name if storage.is_local(pattern) else filesystem.unstrip_protocol(name) for name in folders]


def snapshot_run(
    uri: str,
    *,
    reference: str | None = None,
    steps_from: str | None = None,
    evaluated: Callable[[str, str], bool] = lambda name, listing: False,
) -> list[SeenCheckpoint]:
    """Returns every checkpoint of a run, by step, labels last; empty before the first is written. Native checkpoints
    are left out if their step has a complete export. `uri`: the run. `reference` and `steps_from`: as in
    `find_checkpoints`. `evaluated`: returns True if the checkpoint of that name was evaluated with that listing, and so
    was complete."""
    remembered = _read_memory(uri, "checkpoints")
    rows = [_from_row(row) for row in remembered.get("checkpoints", ())]
    place = without_options(uri)
    tree = list_tree(place, between=_marks(rows), belongs=has_step)
    held = {"reference": storage.list_files(reference)} if reference else {}
    signature = f"{tree.signature} {_listed_in(held)} {steps_from or ''} "
    around = {folder: storage.list_folder(folder) for folder in remembered.get("around", ())}
    began = time.time()
    # a native checkpoint's reference may lie outside of this listing
    elsewhere = any(row.kind == "levanter" and (row.problems or not reference) for row in rows)
    if remembered.get("signature") == signature + _listed_in(around) and not elsewhere:
        return rows
    known = {(row.uri, row.listing): row.problems for row in rows if not any(map(is_about_marks, row.problems))}
    files = tree.files()
    files_in = KnownFiles(place, files)
    listed = _judged(
        uri, files, known, reference=reference, steps_from=steps_from, evaluated=evaluated, files_in=files_in
    )
    unsettled = _unsettled(listed, files, since=began - SETTLED_SECONDS)
    settled = [checkpoint for checkpoint in listed if checkpoint.uri not in unsettled]
    signature = "" if unsettled else signature + _listed_in(files_in.others)
    content = {"signature": signature, "checkpoints": settled, "around": [*files_in.others]}
    _write_memory(uri, "checkpoints", content)
    return listed


def _listed_in(folders: Mapping[str, Iterable[FileInfo]]) -> str:
    files = {file.uri: file for held in folders.values() for file in held}
    return listing_digest(files) if files else ""


def _unsettled(checkpoints: Sequence[SeenCheckpoint], files: Iterable[FileInfo], *, since: float) -> set[str]:
    if not any(checkpoint.problems for checkpoint in checkpoints):
        return set()
    new = [file.uri for file in files if file.checksum is None and file.modified > since]
    return {
        checkpoint.uri
        for checkpoint in checkpoints
        if any(map(may_pass, checkpoint.problems))
        or (checkpoint.problems and any(uri.startswith(f"{without_options(checkpoint.uri)}/") for uri in new))
    }


def _marks(rows: Sequence[SeenCheckpoint]) -> list[str]:
    ranges = min(_RANGES, len(rows) * _FILES_OF_A_CHECKPOINT // PAGE)
    names = sorted(without_options(row.uri) for row in rows) if ranges > 1 else []
    return [names[len(names) * number // ranges] for number in range(1, ranges)]


def _judged(
    uri: str,
    files: Sequence[FileInfo],
    known: Mapping[tuple[str, str], tuple[str, ...]],
    *,
    reference: str | None,
    steps_from: str | None,
    evaluated: Callable[[str, str], bool],
    files_in: KnownFiles,
) -> list[SeenCheckpoint]:
    layouts, options = layouts_in(files), override_of(uri)
    names = layouts.names(without_options(uri), steps_from=steps_from)
    listed = {
        folder: _listed(options.at(folder) if options else folder, held, named, files_in)
        for folder, held, named in layouts.named_exports(names)
    }
    verdicts = dict(known)
    unmarked: dict[tuple[str, str], tuple[str, ...]] = {}
    for folder, checkpoint in listed.items():
        if evaluated(checkpoint.named.name, checkpoint.listing):
            verdicts.setdefault(checkpoint.state, ())
        elif missing := layouts.marks.missing(folder, checkpoint.held):
            unmarked[checkpoint.state] = missing
    verdicts |= _verdicts([*listed.values()], verdicts)
    verdicts |= {state: (*verdicts[state], *missing) for state, missing in unmarked.items()}
    problems = {folder: verdicts[each.state] for folder, each in listed.items()}
    names = counted(names, {folder: not problems[folder] for folder in problems}, lambda at: listed[at].model())
    named = layouts.checkpoints(
        names, lambda at, own: checkpoint_of(own, at, 0.0, problems=problems[at]), reference=reference, options=options
    )
    checkpoints: list[SeenCheckpoint] = []
    for made, held in named:
        if (own := listed.get(made.uri)) is not None:
            uri, listing = own.uri, own.listing
        else:
            files_of = {file.uri.removeprefix(f"{made.uri}/"): file for file in held}
            listing = listing_digest(files_of, reference=made.folder.reference if made.folder else None)
            uri = options.at(made.uri) if options else made.uri
        place = {"label": made.label, "series": made.series}
        checkpoints.append(
            SeenCheckpoint(uri, made.run, made.name, made.step, made.kind, listing, made.problems, **place)
        )
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.order, checkpoint.uri))


class _Listed(NamedTuple):
    uri: str
    held: Sequence[FileInfo]
    files: Mapping[str, FileInfo]
    files_in: FilesIn
    named: Named
    listing: str

    @property
    def state(self) -> tuple[str, str]:
        return self.uri, self.listing

    def model(self) -> ModelFolder:
        return inspect_checkpoint(self.uri, self.held, files_in=self.files_in)

    def problems(self) -> tuple[str, ...]:
        return self.model().problems

    def shape(self) -> frozenset[tuple[str, int | str]]:
        entries: list[tuple[str, int | str]] = []
        for name, file in self.files.items():
            if name in _SIZES_DIFFER:
                entries.append((name, 0))
            elif name in _ALIKE:
                entries.append((name, file.checksum or file.size))
            elif name.endswith((".safetensors", ".bin", ".distcp", ".metadata")):
                entries.append((name, file.size))
        return frozenset(entries)


def _listed(uri: str, held: Sequence[FileInfo], named: Named, files_in: FilesIn) -> _Listed:
    prefix = f"{without_options(uri)}/"
    files = described_by(uri, files_of_model({file.uri.removeprefix(prefix): file for file in held}), files_in).files
    if is_adapter(files):
        files = inspect_checkpoint(uri, held, files_in=files_in).files  # those of its base, too
    return _Listed(uri, held, files, files_in, named, listing_digest(files))


def _verdicts(
    listed: Sequence[_Listed], known: Mapping[tuple[str, str], tuple[str, ...]]
) -> dict[tuple[str, str], tuple[str, ...]]:
    unknown = [checkpoint for checkpoint in listed if checkpoint.state not in known]
    if not unknown or not storage.has_whole_files(without_options(unknown[0].uri)):
        return {checkpoint.state: checkpoint.problems() for checkpoint in unknown}
    whole = {checkpoint.shape() for checkpoint in listed if known.get(checkpoint.state) == ()}
    first = {shape: checkpoint for checkpoint in unknown if (shape := checkpoint.shape()) not in whole}
    problems: dict[tuple[str, str], tuple[str, ...]] = {}
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as threads:

        def look_into(checkpoints: Sequence[_Listed]) -> None:
            looks = threads.map(_Listed.problems, checkpoints)
            problems.update(zip((checkpoint.state for checkpoint in checkpoints), looks, strict=True))

        look_into(list(first.values()))
        whole |= {shape for shape, checkpoint in first.items() if not problems[checkpoint.state]}
        rest = [checkpoint for checkpoint in unknown if checkpoint.state not in problems]
        problems.update((checkpoint.state, ()) for checkpoint in rest if checkpoint.shape() in whole)
        look_into([checkpoint for checkpoint in rest if checkpoint.shape() not in whole])
    return problems


def with_digests(run: str, checkpoints: Sequence[SeenCheckpoint], *, reference: str | None) -> list[SeenCheckpoint]:
    """Returns checkpoints with digests, None if a checkpoint changes meanwhile. Where the store has no checksums,
    weights are read once and the digest is cached; for merged checkpoints and Levanter's layout they are read each
    time, since part of the content lies in other folders."""
    remembered = _read_memory(run, "digests")
    known: dict[str, str] = remembered.get("digests", {})
    keys = [_key(checkpoint) for checkpoint in checkpoints]
    missing = {key: checkpoint for key, checkpoint in zip(keys, checkpoints, strict=True) if key not in known}
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as threads:
        digests = threads.map(lambda checkpoint: _digest(checkpoint, reference=reference), missing.values())
        new_digests = dict(zip(missing, digests, strict=True))
    exports = [key for key, seen in missing.items() if seen.kind == "huggingface" and not seen.merged]
    kept = {key: digest for key in exports if (digest := new_digests[key])}
    if kept:
        _write_memory(run, "digests", {"digests": known | kept})
    return [
        replace(checkpoint, digest=known.get(key) or new_digests.get(key))
        for checkpoint, key in zip(checkpoints, keys, strict=True)
    ]


def _key(checkpoint: SeenCheckpoint) -> str:
    uri, known = with_each_location(checkpoint.uri, storage.absolute), checkpoint.listing
    # A local listing stays the same if size and time of a file are restored.
    if storage.is_local(place := without_options(uri)) and not checkpoint.merged:
        with suppress(FileNotFoundError):  # it is being removed, and has no digest
            files = [path for path in sorted(storage.local_path(place).iterdir()) if path.is_file()]
            known = hashlib.blake2b(repr([known, *map(file_identity, files)]).encode(), digest_size=12).hexdigest()
    return f"{known} {uri}"


def _digest(checkpoint: SeenCheckpoint, *, reference: str | None) -> str | None:
    try:
        if checkpoint.merged:
            merged = inspect_checkpoint(checkpoint.uri)
            listings = (listing_digest(each.files) for each in merged.inputs)
            same = listing_of_inputs(checkpoint.uri, listings) == checkpoint.listing
            return digest_model_folder(merged).checkpoint if same else None
        if checkpoint.kind == "levanter":
            place, options = without_options(checkpoint.uri), override_of(checkpoint.uri)
            held = reference or Exports().export_for(place)
            described = options.at(held) if options and held else held
            native, _ = inspect_native_folder(place, checkpoint_files(place), reference=described)
            return digest_model_folder(native).checkpoint
        folder = inspect_checkpoint(checkpoint.uri)
        digest = digest_model_folder(folder).checkpoint
        return digest if listing_digest(folder.files) == checkpoint.listing else None
    except AssayError:
        return None


def _memory(uri: str, kind: str) -> str:
    name = hashlib.blake2b(with_each_location(uri, storage.absolute).encode(), digest_size=16).hexdigest()
    return str(settings().cache_dir / "listings" / f"{name}.{kind}.json")


def _read_memory(uri: str, kind: str) -> dict[str, Any]:
    try:
        content = orjson.loads(read_cached(storage.local_path(_memory(uri, kind))))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("format") == _FORMAT else {}


def _write_memory(uri: str, kind: str, content: Mapping[str, Any]) -> None:
    with suppress(StorageError, orjson.JSONEncodeError):  # a full disk; a name that is not UTF-8
        storage.write_bytes(_memory(uri, kind), orjson.dumps({"format": _FORMAT, **content}))


def _from_row(row: dict[str, Any]) -> SeenCheckpoint:
    return SeenCheckpoint(**{**row, "problems": tuple(row["problems"]), "merged": ()})
