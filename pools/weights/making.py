"""Checkpoints with weights that no engine reads: made into safetensors while staged, by the maker of their recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pools.weights.checkpoint_copy import Filling, changed_since_planned, copy_checkpoint, counted, require_planned
from pools.weights.content import file_identity
from pools.weights.formats import ADAPTER_RECIPE, INDEX_NAME, read_safetensors_header
from pools.weights.layouts import inspect_checkpoint
from pools.weights.model_files import ModelFolder, digest_model_folder, inspect_model_folder, served_files, small_files
from pools.weights.overrides import without_options
from resources.environments.environments import ENVIRONMENTS, ensure_environment, is_built
from resources.errors import CheckpointError, StorageError
from resources.process_marks import boot_id
from resources.storage import storage
from resources.storage.bounded_folder import Hold
from resources.storage.regular_files import real_path


@dataclass(frozen=True)
class Making:
    """Weights that are being made. A maker writes safetensors into `content`.

    It continues an earlier call: files that have their final names are whole, and of the same inputs.

    Attributes:
        folder: the inspected checkpoint, with all its files on this machine.
        content: folder for the weights; config, tokenizer and templates are there.
        python: returns an interpreter with torch and transformers, which it may have to build.
        trusted: True if code in the checkpoint may run.
        hold_copy: copies or makes another checkpoint on this machine, and protects it until released.
        stopped: asked before each block or second; if it is True, `CopyStopped` is raised.
        on_bytes: called with the number of bytes written since the last call.
        require_unchanged: raises `CheckpointChanged` if a file on this machine was written since the start.
    """

    folder: ModelFolder
    content: Path
    python: Callable[[], Path]
    trusted: bool
    hold_copy: Callable[[ModelFolder], Hold]
    stopped: Callable[[], bool]
    on_bytes: Callable[[int], None]
    require_unchanged: Callable[[], None]


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
    python: Callable[[], Path],
    trusted: bool,
    hold_copy: Callable[[ModelFolder], Hold],
) -> Path:
    """Makes a planned checkpoint's weights by the maker of its recipe, from its files, their copy, or its inputs.

    Returns the folder with the whole model. Its files are not synced: after a crash of the machine they may have holes.
    Room is made for as many bytes as the weights are made of.
    """
    planned.require_complete(planned=True)
    is_adapter, is_merge = planned.made_by == ADAPTER_RECIPE, planned.made_by is None
    made_bytes = sum(file.size for file in served_files(planned).values())
    made_bytes += sum(each.files[name].size for each in planned.inputs for name in each.weight_files if is_adapter)
    folder, read = planned, _identities(planned)
    # an adapter is small, and read where it is; the maker has inputs copied
    if is_adapter or is_merge or storage.is_local(without_options(planned.uri)):
        require_planned(filling.uri, digest_model_folder(planned), filling.digests)
        filling.make_room(made_bytes)
    else:
        room = partial(_make_room_for_both, filling, made_bytes)
        copying = replace(filling, partial=filling.partial / "inputs", make_room=room, on_progress=None)
        copied = copy_checkpoint(copying, planned)
        folder = replace(planned, uri=str(copied), files=inspect_model_folder(str(copied)).files)
        read = _identities(folder)

    def require_unchanged(*, look: bool = False) -> None:
        if (now := _identities(folder)) != read or look:  # a removal, or a new link, changes times, but not contents
            current = inspect_checkpoint(filling.uri)
            current.require_complete(planned=True)
            if digest_model_folder(current) != filling.digests:
                raise changed_since_planned(filling.uri, "its files were written while it was computed")
            read[:] = now

    content = filling.partial / f"made-{boot_id()}"
    for unsynced in set(filling.partial.glob("made-*")) - {content}:
        shutil.rmtree(unsynced)
    content.mkdir(parents=True, exist_ok=True)
    count = counted(made_bytes, filling.on_progress)
    try:
        for name, file in small_files(folder).items():
            storage.write_bytes(str(content / name), storage.read_bytes(file.place))
            count(file.size)
        make(Making(folder, content, python, trusted, hold_copy, filling.stopped, count, require_unchanged))
    except (CheckpointError, StorageError):
        require_unchanged()  # raises that error instead, if it is the cause
        raise
    made = [file for file in storage.list_folder(str(content)) if file.uri.endswith(".safetensors")]
    if len(made) > 1 and not (content / INDEX_NAME).is_file():
        weight_map = {tensor: storage.basename(file.uri) for file in made for tensor in read_safetensors_header(file)}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        storage.write_bytes(str(content / INDEX_NAME), index.encode())
    require_unchanged(look=is_adapter)  # also files in a store
    inspect_model_folder(str(content)).require_complete()
    return content


def _make_room_for_both(filling: Filling, made_bytes: int, copied_bytes: int) -> None:
    filling.make_room(made_bytes + copied_bytes)


def _identities(folder: ModelFolder) -> list[object]:
    files = [file.place for each in (folder, *folder.inputs) for file in served_files(each).values()]
    with storage.reported(folder.uri, "look at"), suppress(FileNotFoundError):
        return [file_identity(Path(real_path(storage.local_path(each)))) for each in files if storage.is_local(each)]
    return []
