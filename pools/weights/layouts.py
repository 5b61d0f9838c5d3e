"""Checkpoints in other layouts than Hugging Face's: merged checkpoints, and Levanter's own.

Merged checkpoints exist as names only: their inputs are inspected, and must match.

Levanter writes arrays first, by tensorstore: into `manifest.ocdbt` and `d/` for the whole training state, or, by older
versions, into folders below `model/`. `metadata.json` is written when all of them are committed. Model configuration
and tokenizer are not part of it: they come from a folder in Hugging Face's layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pools.weights.adapters.folder import inspect_adapter
from pools.weights.content import content_digest
from pools.weights.formats import ADAPTER_RECIPE, BYTES, irregular, read_json
from pools.weights.merges import merge_of
from pools.weights.model_files import (
    CONFIG_FILES,
    IGNORED_CONFIG_KEYS,
    ModelFolder,
    checkpoint_files,
    inspect_model_folder,
    inspect_reference_folder,
    read_tensors,
    small_files,
)
from pools.weights.tokenizers import FilesIn
from resources.errors import CheckpointError
from resources.storage import storage
from resources.storage.storage import FileInfo

KEPT = frozenset({"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})
"""Types of tensors that must be the same in every checkpoint of a merge."""
_MOST_NAMED = 3
METADATA_NAME = "metadata.json"
MANIFEST_NAME = "manifest.ocdbt"
_EXPORTS = "hf"
_DESCRIBING = ("config.json", "tokenizer_config.json")
_NO_REFERENCE = "no config and tokenizer: no Hugging Face export of the run is next to it; set evaluator.reference"


def inspect_checkpoint(
    uri: str, files: Sequence[FileInfo] | None = None, *, files_in: FilesIn = storage.list_folder
) -> ModelFolder:
    """Inspects a checkpoint in Hugging Face's layout, an adapter on its base, or each input of a merged checkpoint. The
    arguments are those of `inspect_reference_folder`."""
    if (merge := merge_of(uri)) is not None:
        return merged_folder(uri, [inspect_checkpoint(location) for location in merge.locations])
    folder = inspect_model_folder(uri, files, files_in=files_in)
    if folder.made_by != ADAPTER_RECIPE:
        return folder
    return inspect_adapter(folder, inspect_checkpoint, files_in=files_in)


def merged_folder(uri: str, inputs: Sequence[ModelFolder]) -> ModelFolder:
    """Returns the folder of a merged checkpoint: described like its last input, with the files of all inputs."""
    last = inputs[-1]
    problems = [f"{problem} in {folder.uri}" for folder in inputs for problem in folder.problems]
    files = {f"{number}/{name}": file for number, folder in enumerate(inputs) for name, file in folder.files.items()}
    if not problems:
        require_alike(inputs)
    return ModelFolder(
        uri=uri,
        files={**last.files, **files},
        problems=tuple(problems),
        config=last.config,
        weight_files=last.weight_files,
        modified=max(folder.modified for folder in inputs),
        inputs=tuple(inputs),
        notes=last.notes,
    )


def require_alike(folders: Sequence[ModelFolder]) -> None:
    """Raises CheckpointError unless checkpoints can be averaged; tensors of weights that must be made are not known."""
    *others, last = folders
    tensors = read_tensors(last) if last.made_by is None else {}
    unknown = next((name for name, each in tensors.items() if each.dtype not in BYTES.keys() | KEPT), None)
    problem = f"{unknown} is {tensors[unknown].dtype} in {last.uri}" if unknown else None
    expected = "weights in bfloat16, float16, float32 or float64 to average"
    for other in others:
        if problem is None and (difference := _difference(other, last)):
            problem, expected = f"{difference} in {other.uri} and {last.uri}", "checkpoints of the same model"
    if problem is not None:
        raise CheckpointError(expected=expected, found=problem, remedy="merge other checkpoints, or export these alike")


def _difference(folder: ModelFolder, other: ModelFolder) -> str | None:
    if changed := _changed_keys(folder.config, other.config):
        return f"config.json differs ({_named(changed)})"
    files, others = small_files(folder), small_files(other)
    names = sorted((files.keys() | others.keys()) - set(CONFIG_FILES))
    texts = (name for name in names if not name.endswith(".index.json"))  # of weights in another format
    if changed := [name for name in texts if not _same(files.get(name), others.get(name))]:
        return f"the tokenizer differs ({_named(changed)})"
    if folder.made_by is not None or other.made_by is not None:
        return None
    tensors, other_tensors = read_tensors(folder), read_tensors(other)
    if changed := sorted(tensors.keys() ^ other_tensors.keys()):
        return f"the names of tensors differ ({_named(changed)})"
    for name, tensor in tensors.items():
        if tensor != other_tensors[name]:
            return f"{name} is {tensor} and {other_tensors[name]}"
    return None


def _changed_keys(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    changed = {key for key in {*config, *other} if config.get(key) != other.get(key)}
    return sorted(changed - set(IGNORED_CONFIG_KEYS))


def _same(file: FileInfo | None, other: FileInfo | None) -> bool:
    if file is None or other is None:
        return False
    same = content_digest(file) == content_digest(other)
    return same or storage.read_bytes(file.place) == storage.read_bytes(other.place)


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")


def is_native(names: Sequence[str]) -> bool:
    """Returns True if a folder with these files, by names relative to it, is a native checkpoint, complete or not."""
    return MANIFEST_NAME in names or (METADATA_NAME in names and any(name.startswith("model/") for name in names))


def inspect_native_folder(
    uri: str, files: Sequence[FileInfo], *, reference: str | None
) -> tuple[ModelFolder, int | None]:
    """Checks that a folder holds a whole native checkpoint that Levanter can evaluate; failures go into `problems`.

    Also returns the step in its metadata; None if it has none.
    """
    prefix = uri.rstrip("/") + "/"
    by_name = {file.uri.removeprefix(prefix): file for file in files}
    problems: list[str] = []
    step = _step(by_name, problems)
    arrays = "d/" if MANIFEST_NAME in by_name else "model/"
    weights = sorted(name for name in by_name if name == MANIFEST_NAME or name.startswith(arrays))
    if not any(name.startswith(arrays) for name in weights):
        problems.append(f"no arrays: nothing lies below {arrays}")
    problems += filter(None, (irregular(by_name[name]) for name in weights))
    described = inspect_reference_folder(reference) if reference else None
    if described is None:
        problems.append(_NO_REFERENCE)
    else:
        problems += [f"{problem} in {described.uri}, its reference" for problem in described.problems]
    folder = ModelFolder(
        uri=uri,
        files=by_name,
        problems=tuple(problems),
        config=described.config if described else {},
        weight_files=tuple(weights),
        modified=max((file.modified for file in files), default=0.0),
        kind="levanter",
        reference=described,
    )
    return folder, step


def inspect_again(folder: ModelFolder) -> ModelFolder:
    """Inspects a checkpoint of either layout, or a merged checkpoint, again."""
    if folder.kind == "huggingface":
        return inspect_checkpoint(folder.uri)
    reference = folder.reference.uri if folder.reference else None
    return inspect_native_folder(folder.uri, checkpoint_files(folder.uri), reference=reference)[0]


def _step(files: Mapping[str, FileInfo], problems: list[str]) -> int | None:
    if METADATA_NAME not in files:
        problems.append(f"{METADATA_NAME} is missing, which is written last")
        return None
    described: list[str] = []
    try:
        return int(read_json(files[METADATA_NAME], described)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        problems += [*described, f"{METADATA_NAME} names no step"]
        return None


class Exports:
    """Finds Hugging Face exports of a run near its native checkpoints; lists each folder once."""

    def __init__(self) -> None:
        self._listed: dict[str, list[str]] = {}

    def export_for(self, uri: str) -> str | None:
        """Returns an export for the checkpoint `uri`: of the same step if possible, else the last export of the run.

        Searches `hf/` within the checkpoint, in its parent folder, and in the folder above.
        """
        parent = storage.parent(uri)
        same = storage.basename(uri)
        within = self._in(uri)
        if within:
            return within[-1]
        exports = [*self._in(storage.parent(parent)), *self._in(parent)]
        namesakes = [folder for folder in exports if storage.basename(folder) == same]
        return next(reversed(namesakes or exports), None)

    def _in(self, place: str) -> list[str]:
        if place not in self._listed:
            named = {file.uri for file in storage.list_files(storage.join(place, _EXPORTS))}
            folders = {storage.parent(uri) for uri in named}
            whole = [folder for folder in folders if {storage.join(folder, name) for name in _DESCRIBING} <= named]
            self._listed[place] = sorted(whole, key=lambda folder: (len(folder), folder))
        return self._listed[place]
