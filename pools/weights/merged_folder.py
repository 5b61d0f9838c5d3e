"""Merged checkpoints, which exist as names only: their input files, and a check that the inputs match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pools.weights.content import content_digest
from pools.weights.merges import merge_of
from pools.weights.model_files import (
    CONFIG_FILES,
    IGNORED_CONFIG_KEYS,
    ModelFolder,
    inspect_model_folder,
    read_tensors,
    small_files,
)
from resources.errors import CheckpointError
from resources.storage import storage
from resources.storage.storage import FileInfo

AVERAGED = frozenset({"BF16", "F16", "F32", "F64"})
"""Types of averaged tensors."""
KEPT = frozenset({"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})
"""Types of tensors that must be the same in every checkpoint of a merge."""
_MOST_NAMED = 3


def inspect_checkpoint(uri: str) -> ModelFolder:
    """Inspects a checkpoint in Hugging Face's layout, or each input of a merged checkpoint."""
    merge = merge_of(uri)
    if merge is None:
        return inspect_model_folder(uri)
    return merged_folder(uri, [inspect_model_folder(location) for location in merge.locations])


def merged_folder(uri: str, inputs: Sequence[ModelFolder]) -> ModelFolder:
    """Returns the folder of a merged checkpoint: described like its last input, with the files of all inputs."""
    last = inputs[-1]
    problems = [f"{problem} in {folder.uri}" for folder in inputs for problem in folder.problems]
    files = {f"{number}/{name}": file for number, folder in enumerate(inputs) for name, file in folder.files.items()}
    if not problems:
        _require_alike(inputs)
    return ModelFolder(
        uri=uri,
        files={**last.files, **files},
        problems=tuple(problems),
        config=last.config,
        weight_files=last.weight_files,
        modified=max(folder.modified for folder in inputs),
        inputs=tuple(inputs),
    )


def _require_alike(folders: Sequence[ModelFolder]) -> None:
    *others, last = folders
    problem = _cannot_be_averaged(last)
    expected = "weights in bfloat16, float16, float32 or float64 to average"
    for other in others:
        if problem is None and (difference := _difference(other, last)):
            problem, expected = f"{difference} in {other.uri} and {last.uri}", "checkpoints of the same model"
    if problem is not None:
        raise CheckpointError(expected=expected, found=problem, remedy="merge other checkpoints, or export these alike")


def _cannot_be_averaged(folder: ModelFolder) -> str | None:
    for name, tensor in read_tensors(folder).items():
        if tensor.dtype not in AVERAGED | KEPT:
            return f"{name} is {tensor.dtype} in {folder.uri}"
    return None


def _difference(folder: ModelFolder, other: ModelFolder) -> str | None:
    if changed := _changed_keys(folder.config, other.config):
        return f"config.json differs ({_named(changed)})"
    files, others = small_files(folder), small_files(other)
    texts = sorted((files.keys() | others.keys()) - set(CONFIG_FILES))
    if changed := [name for name in texts if not _same(files.get(name), others.get(name))]:
        return f"the tokenizer differs ({_named(changed)})"
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
