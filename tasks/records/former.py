"""Records under the names that earlier versions gave to checkpoints, which are found again by their digests.

By the former rule a checkpoint was `$RUN-$N` of `$RUN` only if its folder was `$RUN/step-$N`, `$RUN/hf/step-$N` or
`$RUN/step-$N/hf`; any other folder was a run of its own at step 0. The name of a cell's folder ends in a digest over
checkpoint and settings, so the former place of a cell follows from the path of its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from pools.weights.merges import merge_of
from pools.weights.overrides import override_of
from resources.storage import storage
from tasks.records.details import CheckpointReference
from tasks.records.index import note_record
from tasks.records.record import Record, broken_seal, read_record, write_record
from tasks.records.samples import SAMPLES_NAME
from tasks.spec.labels import folder_of
from tasks.spec.names import name_of, parts_of

_STEP = re.compile(r"(?:global_)?(?:step|checkpoint|iter)[-_]?([0-9]{1,18})")


def former_name_of(uri: str) -> tuple[str, int]:
    """Returns the run and the step that a checkpoint's path had by the former rule."""
    parts = parts_of(uri)
    if len(parts) > 1 and parts[-1] == "hf" and _STEP.fullmatch(parts[-2]):
        parts = parts[:-1]
    stepped = _STEP.fullmatch(parts[-1]) if parts else None
    parts = parts[:-1] if stepped else parts
    parts = parts[:-1] if parts[-1:] == ["hf"] else parts
    run = re.sub(r"[^A-Za-z0-9._+=@-]", "-", parts[-1] if parts else "").lstrip("._+=@-") or "model"
    return run, int(stepped[1]) if stepped else 0


def former_record(
    cell_uri: str, reference: CheckpointReference, model_path: str, *, is_folder: Callable[[str], bool]
) -> Record | None:
    """Returns the success of a cell under a former name of its checkpoint, copied with its samples to the cell's folder
    and renamed; None if there is none, or if it was changed since it was written.

    `model_path` is the path of the evaluation: the run was named after it, or after the checkpoint. `is_folder` tells
    if a folder exists; of many checkpoints it is asked about the same few.
    """
    new_kind = override_of(reference.uri) is not None or reference.uri.startswith("hf://")
    if new_kind or merge_of(reference.uri) is not None:
        return None
    run, step = former_name_of(reference.uri)
    cell = cell_uri.rstrip("/").split("/")[-2:]
    run_uri = storage.parent(storage.parent(storage.parent(cell_uri)))
    whole = name_of(model_path)[0]
    by_path = (run, former_name_of(model_path)[0]) if reference.run == whole else ()
    places = [(name, folder_of(step, None)) for name in (reference.run, *by_path)]
    if reference.run.startswith(f"{whole}-"):  # a series, which was the whole run before another lay next to it
        places += [(whole, reference.folder), (run, folder_of(step, None))]
    for name, folder in dict.fromkeys(places):
        outer = storage.join(storage.parent(run_uri), name, folder)
        place = storage.join(outer, *cell)
        if place == cell_uri or not is_folder(outer) or (record := read_record(place)) is None:
            continue
        if record.succeeded and record.checkpoint.digest == reference.digest and broken_seal(record) is None:
            with suppress(FileNotFoundError):  # its samples
                return _copied(record, place, cell_uri, reference, run_uri)
    return None


def _copied(record: Record, place: str, cell_uri: str, reference: CheckpointReference, run_uri: str) -> Record:
    if record.samples is not None:
        samples = (record.attempt, SAMPLES_NAME)
        content = storage.read_bytes(storage.join(place, *samples), within=place)
        storage.write_bytes(storage.join(cell_uri, *samples), content)
    renamed = write_record(cell_uri, record.model_copy(update={"checkpoint": reference, "sinks": {}, "links": {}}))
    note_record(run_uri, cell_uri, renamed)
    return renamed
