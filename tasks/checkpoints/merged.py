"""Merged checkpoints: averages that no training wrote, resolved by name to the checkpoints of runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pools.engine.launch import staging
from pools.weights.layouts import merged_folder
from pools.weights.merges import Merge, Source, merge_of, with_each_location
from pools.weights.model_files import digest_model_folder
from resources.errors import BadInput, IncompleteCheckpoint
from resources.storage import storage
from tasks.checkpoints.checkpoint import Checkpoint
from tasks.errors import NoCheckpoints
from tasks.records.details import MergedInput, MergeReference
from tasks.spec.names import in_few_words, name_of_merge


def merged_checkpoint(merge: Merge, find: Callable[[str], Sequence[Checkpoint]]) -> Checkpoint:
    """Returns the checkpoint that a merge currently resolves to; `find` lists the checkpoints at a path, by step."""
    inputs = [checkpoint for source in merge.sources for checkpoint in _chosen(source, find(source.location))]
    if len(inputs) < 2:
        raise BadInput(
            expected="at least two checkpoints to average",
            found=f"{in_few_words(checkpoint.name for checkpoint in inputs)} in {merge}",
            remedy="name more steps, or evaluate the checkpoint itself",
        )
    resolved = Merge.of_folders(merge.kind, [checkpoint.uri for checkpoint in inputs], merge.parameter)
    run, name, step = name_of_merge(resolved, [(each.run, each.name, each.step) for each in inputs])
    uri = str(resolved)
    problems = tuple(f"{checkpoint.name}: {problem}" for checkpoint in inputs for problem in checkpoint.problems)
    merged = Checkpoint(uri, run, name, step, max(each.modified for each in inputs), "huggingface", problems)
    folders = [checkpoint.folder for checkpoint in inputs if checkpoint.folder is not None]
    return replace(merged, folder=None if problems else merged_folder(uri, folders), inputs=tuple(inputs))


def merge_reference(checkpoint: Checkpoint) -> MergeReference | None:
    """Returns how a complete merged checkpoint is computed, for its records; None for other checkpoints."""
    if (merge := merge_of(checkpoint.uri)) is None:
        return None
    inputs: list[MergedInput] = []
    for each, weight in zip(checkpoint.inputs, merge.weights(len(checkpoint.inputs)), strict=True):
        assert each.folder is not None, "only complete checkpoints are evaluated"
        digest = digest_model_folder(each.folder).checkpoint
        place = {"run": each.run, "step": each.step, "label": each.label}
        inputs.append(MergedInput(uri=each.uri, **place, digest=digest, weight=weight))
    return MergeReference(kind=merge.kind, parameter=merge.parameter, inputs=tuple(inputs))


def write_checkpoint(found: Sequence[Checkpoint], target: Path, *, trusted: bool = False) -> None:
    """Writes the single checkpoint that was found, as an engine loads it: merged, or with the safetensors that are made
    of its weights, with tokenizer and config. The folder appears once it is complete. `trusted`: as in `staging`."""
    if len(found) != 1:
        raise BadInput(
            expected="a single checkpoint, or the name of a merged checkpoint, such as mean(runs/a@last:5)",
            found=in_few_words(checkpoint.name for checkpoint in found),
            remedy="name the folder of one of them",
        )
    [checkpoint] = found
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise BadInput(expected=f"{target} to be absent or empty", found="something in it", remedy="name another")
    if checkpoint.folder is None:
        problems = "; ".join(checkpoint.problems)
        raise IncompleteCheckpoint(
            expected=f"complete checkpoints in {checkpoint.uri}",
            found=problems,
            remedy="wait, or export them as named; for DeepSpeed and verl, --trust-remote-code lets Assay do it",
        )
    checkpoint.folder.require_complete()
    digests = digest_model_folder(checkpoint.folder)
    uri = with_each_location(checkpoint.uri, storage.absolute)
    with (
        storage.reported(str(target), "write"),
        staging(trusted=trusted) as copies,
        copies.stage(uri, digests) as staged,
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as aside:
            content = Path(aside) / target.name
            content.mkdir()
            for file in staged.path.iterdir():
                shutil.copyfile(file, content / file.name)
                with (content / file.name).open("rb") as written:
                    os.fsync(written.fileno())
            staged.verify()
            content.rename(target)


def _chosen(source: Source, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    if not source.steps:
        if len(checkpoints) != 1:
            raise BadInput(
                expected=f"a single checkpoint at {source.location}, or steps, such as {source.location}@last:5",
                found=f"{len(checkpoints)} checkpoints",
                remedy="say which of them",
            )
        return list(checkpoints)
    by_step = _by_step(checkpoints)
    if source.last is not None:
        incomplete = [checkpoint for checkpoint in by_step.values() if not checkpoint.complete]
        by_step = {step: checkpoint for step, checkpoint in by_step.items() if checkpoint.complete}
        if len(by_step) < source.last:
            reasons = "; ".join(f"{each.name}: {', '.join(each.problems)}" for each in incomplete[:5])
            exported = not all(each.has_known_layout for each in incomplete)
            raise NoCheckpoints(
                expected=f"{source.last} complete checkpoints at {source.location}",
                found=f"{len(by_step)}{f'; {reasons}' if reasons else ''}",
                remedy=f"{'export them as named' if exported else 'wait until they are written'}, or name fewer",
            )
    steps = source.taken(by_step)
    if missing := [str(step) for step in steps if step not in by_step]:
        raise NoCheckpoints(
            expected=f"checkpoints of the steps {', '.join(map(str, steps))} at {source.location}",
            found=f"none of {', '.join(missing)}; there are {', '.join(map(str, by_step)) or 'none'}",
            remedy="correct the steps, or wait until they are written",
        )
    return [by_step[step] for step in steps]


def _by_step(checkpoints: Sequence[Checkpoint]) -> dict[int, Checkpoint]:
    exports = [checkpoint for checkpoint in checkpoints if checkpoint.kind == "huggingface"]
    by_step: dict[int, Checkpoint] = {}
    for checkpoint in (each for each in exports or checkpoints if each.label is None):
        other = by_step.get(checkpoint.step)
        if other is None or not other.complete:
            by_step[checkpoint.step] = checkpoint
        elif checkpoint.complete:
            raise BadInput(
                expected=f"a single checkpoint of step {checkpoint.step}",
                found=f"{other.uri} and {checkpoint.uri}",
                remedy="name the folder that holds the intended checkpoint",
            )
    return dict(sorted(by_step.items()))
