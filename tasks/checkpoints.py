"""Discovery: which checkpoints a run holds, and which of them are complete.

A checkpoint that is still being written is never selected: files are judged by their own headers, not by age.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefect import task
from prefect.cache_policies import NO_CACHE

from pools.model_files import INDEX_NAME, ModelFolder, inspect_model_folder
from resources import storage
from resources.errors import BadInput, NoCheckpoints
from resources.storage import FileInfo
from tasks.config import CheckpointSelection
from tasks.names import name_of, step_of
from tasks.progress import report_event

_MODEL_FILES = ("config.json", "tokenizer_config.json", "model.safetensors", INDEX_NAME)
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as found, complete or not. `problems` says why it is not."""

    uri: str
    run: str
    name: str
    step: int
    modified: float
    kind: Literal["huggingface", "levanter"] = "huggingface"
    problems: tuple[str, ...] = ()
    folder: ModelFolder | None = field(default=None, repr=False)

    @property
    def complete(self) -> bool:
        """Whether it can be evaluated."""
        return not self.problems


def find_checkpoints(path: str) -> list[Checkpoint]:
    """Every checkpoint at or below a location, complete or not, by step and then by time of writing.

    `<path>` and `<path>/hf` mean the same run. One listing of the store, then one look at each folder's headers.

    Raises:
        BadInput: the location is not there, or is a file.
        NoCheckpoints: nothing below it looks like a checkpoint.
    """
    files = storage.list_files(path)
    if [file.uri for file in files] == [path] and not storage.is_folder(path):
        raise BadInput(
            expected="a folder: a checkpoint, or a run that holds checkpoints",
            found=f"{path} is a file",
            remedy="name the folder it lies in",
        )
    if not files and not storage.exists(path):
        raise BadInput(
            expected="a folder: a checkpoint, or a run that holds checkpoints",
            found=f"{path} is not there",
            remedy="check the path; in an object store, also that you may list it",
        )
    folders: dict[str, list[FileInfo]] = defaultdict(list)
    for file in files:
        folders[storage.parent(file.uri)].append(file)
    native = {folder for folder, held in folders.items() if _is_levanter(folder, held, folders)}
    found = [_levanter(folder, folders[folder]) for folder in native]
    for folder, held in folders.items():
        if any(folder == other or folder.startswith(f"{other}/") for other in native):
            continue
        if _looks_like_checkpoint(folder, held):
            found.append(_huggingface(folder, held))
    if not found:
        raise NoCheckpoints(
            expected=f"checkpoints at {path}, {path}/step-N or {path}/hf/step-N",
            found=f"{len(files)} files, none of which belong to one" if files else "an empty folder",
            remedy="wait for the first one to be written, or name the folder that holds them",
        )
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.modified, checkpoint.uri))


def _looks_like_checkpoint(folder: str, files: Sequence[FileInfo]) -> bool:
    names = {storage.basename(file.uri) for file in files}
    return (
        step_of(storage.basename(folder)) is not None
        or any(name in names for name in _MODEL_FILES)
        or any(name.endswith(".safetensors") for name in names)
    )


def _is_levanter(folder: str, files: Sequence[FileInfo], folders: dict[str, list[FileInfo]]) -> bool:
    model = storage.join(folder, "model")
    return any(storage.basename(file.uri) == "metadata.json" for file in files) and any(
        other == model or other.startswith(f"{model}/") for other in folders
    )


def _levanter(folder: str, files: Sequence[FileInfo]) -> Checkpoint:
    run, name, step = name_of(folder)
    return Checkpoint(
        uri=folder,
        run=run,
        name=name,
        step=step,
        modified=max(file.modified for file in files),
        kind="levanter",
        problems=("a native Levanter checkpoint: export it to Hugging Face format to serve it",),
    )


def _huggingface(folder: str, files: Sequence[FileInfo]) -> Checkpoint:
    run, name, step = name_of(folder)
    held = inspect_model_folder(folder, files)
    return Checkpoint(folder, run, name, step, held.modified, problems=held.problems, folder=held)


@task(cache_policy=NO_CACHE, persist_result=False)
def discover(
    path: str,
    selection: CheckpointSelection,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Checkpoint]:
    """The checkpoints to evaluate: complete, and selected. Those left out because they are incomplete are reported.

    Waits, if the selection says so, for incomplete ones to be finished; folders are looked at anew every second.

    Raises:
        BadInput: the location is not there, or is a file.
        NoCheckpoints: none is there, or none is complete.
    """
    deadline = clock() + selection.wait_for_incomplete_seconds
    while True:
        found = find_checkpoints(path)
        incomplete = [checkpoint for checkpoint in found if not checkpoint.complete]
        waiting_helps = any(checkpoint.kind == "huggingface" for checkpoint in incomplete)
        if not waiting_helps or clock() >= deadline:
            break
        sleep(_POLL_SECONDS)
    for checkpoint in incomplete:
        report_event(f"left out {checkpoint.uri}: {'; '.join(checkpoint.problems)}")
    complete = [checkpoint for checkpoint in found if checkpoint.complete]
    if not complete:
        reasons = "; ".join(f"{storage.basename(c.uri)}: {', '.join(c.problems)}" for c in incomplete[:5])
        raise NoCheckpoints(
            expected=f"at least one complete checkpoint at {path}",
            found=f"{len(incomplete)} incomplete ({reasons})",
            remedy="wait until one is written; `assay checkpoints` shows what is missing",
        )
    return select(complete, selection)


@task(cache_policy=NO_CACHE, persist_result=False)
def discover_one(path: str, *, latest: bool) -> Checkpoint:
    """The one checkpoint at a location or, with `latest`, the newest complete one below it.

    Raises:
        BadInput: the location is not there, or holds several checkpoints and `latest` is not set.
        NoCheckpoints: none is there, or none is complete.
    """
    found = discover.fn(path, CheckpointSelection())
    if len(found) > 1 and not latest:
        raise BadInput(
            expected=f"one checkpoint at {path}",
            found=f"{len(found)}, from {found[0].name} to {found[-1].name}",
            remedy="name one of them, set discover_latest_checkpoint, or evaluate them all with evaluate_checkpoints",
        )
    return found[-1]


def select(complete: Sequence[Checkpoint], selection: CheckpointSelection) -> list[Checkpoint]:
    """The wanted ones among complete checkpoints in order of step.

    Raises:
        NoCheckpoints: a step that was asked for is not among them.
    """
    if selection.which != "all":
        return [complete[-1] if selection.which == "latest" else complete[0]]
    if selection.steps:
        missing = sorted(set(selection.steps) - {checkpoint.step for checkpoint in complete})
        if missing:
            raise NoCheckpoints(
                expected=f"complete checkpoints of steps {', '.join(map(str, selection.steps))}",
                found=f"none of {', '.join(map(str, missing))}; there are "
                + ", ".join(str(checkpoint.step) for checkpoint in complete),
                remedy="correct the steps, or wait until they are written",
            )
        return [checkpoint for checkpoint in complete if checkpoint.step in selection.steps]
    every = selection.every_n_steps
    if every is None:
        return list(complete)
    return [checkpoint for checkpoint in complete if checkpoint.step % every == 0 or checkpoint is complete[-1]]
