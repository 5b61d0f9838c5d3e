"""Checkpoints in Levanter's own layout: their completeness, step, and relevant files.

Arrays are written first, by tensorstore: into `manifest.ocdbt` and `d/` for the whole training state, or, by older
versions, into folders below `model/`. `metadata.json` is written when all of them are committed. Model configuration
and tokenizer are not part of it: they come from a folder in Hugging Face's layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pools.weights.merged_folder import inspect_checkpoint
from pools.weights.model_files import (
    ModelFolder,
    checkpoint_files,
    inspect_reference_folder,
    irregular,
    read_json,
)
from resources.storage import storage
from resources.storage.storage import FileInfo

METADATA_NAME = "metadata.json"
MANIFEST_NAME = "manifest.ocdbt"
_EXPORTS = "hf"
_DESCRIBING = ("config.json", "tokenizer_config.json")
_NO_REFERENCE = "no config and tokenizer: no Hugging Face export of the run is next to it; set evaluator.reference"


@dataclass(frozen=True)
class NativeFolder:
    """An inspected native checkpoint, and the step in its metadata; None if it has none."""

    folder: ModelFolder
    step: int | None


def is_native(names: Sequence[str]) -> bool:
    """Returns True if a folder with these files, by names relative to it, is a native checkpoint, complete or not."""
    return MANIFEST_NAME in names or (METADATA_NAME in names and any(name.startswith("model/") for name in names))


def inspect_native_folder(uri: str, files: Sequence[FileInfo], *, reference: str | None) -> NativeFolder:
    """Checks that a folder holds a whole native checkpoint that Levanter can evaluate; failures go into `problems`."""
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
    return NativeFolder(folder, step)


def inspect_again(folder: ModelFolder) -> ModelFolder:
    """Inspects a checkpoint of either layout, or a merged checkpoint, again."""
    if folder.kind == "huggingface":
        return inspect_checkpoint(folder.uri)
    reference = folder.reference.uri if folder.reference else None
    return inspect_native_folder(folder.uri, checkpoint_files(folder.uri), reference=reference).folder


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
