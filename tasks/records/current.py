"""The records that count of several for one checkpoint, and names by which checkpoints are told apart in reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from resources.storage import storage
from tasks.records.record import CheckpointReference, Record
from tasks.records.series import is_full
from tasks.spec.names import run_folder_of

_Set = tuple[str, str, tuple[str, ...]]


def current_records(records: Sequence[Record]) -> list[Record]:
    """The newest record of each checkpoint, benchmarks and settings, in the order of runs and steps.

    A failure is left out once the same benchmarks succeeded in another way; a quick look, an evaluation that was
    limited to some questions, never hides a full one. A checkpoint that was rewritten in its place is the same one,
    another of its name elsewhere is not.
    """
    apart = told_apart([record.checkpoint for record in records])
    newest: dict[tuple[_Set, str], Record] = {}
    for record in sorted(records, key=lambda record: (is_full(record), record.created)):
        asked = (apart(record.checkpoint).name, record.evaluator, record.benchmarks)
        newest[asked, record.evaluation_hash] = record
    successes: dict[_Set, list[Record]] = defaultdict(list)
    for (asked, _), record in newest.items():
        successes[asked] += [record] if record.succeeded else []
    kept = [
        record
        for (asked, _), record in newest.items()
        if record.succeeded or not any(_replaces(later, record) for later in successes[asked])
    ]
    return sorted(kept, key=lambda record: (apart(record.checkpoint).run, record.checkpoint.step))


def newest_settings(records: Sequence[Record]) -> list[Record]:
    """Of current records, the newest of each checkpoint and benchmarks, whatever the settings; a full one if any is."""
    apart = told_apart([record.checkpoint for record in records])
    newest: dict[_Set, Record] = {}
    for record in sorted(records, key=lambda record: (is_full(record), record.created)):
        newest[apart(record.checkpoint).name, record.evaluator, record.benchmarks] = record
    return list(newest.values())


def _replaces(later: Record, record: Record) -> bool:
    return later.created >= record.created and (is_full(later) or not is_full(record))


def told_apart(checkpoints: Iterable[CheckpointReference]) -> Callable[[CheckpointReference], CheckpointReference]:
    """Names for reports: those of records, with the end of its place behind a run's name that stands for several runs.

    Merged checkpoints are points of a curve of their own, which is a run of its own in reports: see `merged_by`.

    Runs of one name are several if they have a checkpoint of one name in different folders, which are nowhere the same.
    Checkpoints of one name in one run, such as step-1 and checkpoint-1, have their folders behind their names.
    """
    checkpoints = list(checkpoints)
    by_run: dict[str, dict[str, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for checkpoint in checkpoints:
        by_run[checkpoint.run][run_folder_of(checkpoint.uri)].add((checkpoint.name, checkpoint.digest))
    labels = {
        (run, folder): label
        for run, states in by_run.items()
        if len(states) > 1
        for folder, label in _labels(run, states).items()
    }

    twins: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for checkpoint in checkpoints:
        places = twins[run_folder_of(checkpoint.uri), checkpoint.name]
        places[storage.basename(checkpoint.uri)].add(checkpoint.digest)

    def named(checkpoint: CheckpointReference) -> CheckpointReference:
        held = twins[run_folder_of(checkpoint.uri), checkpoint.name].values()
        if sum(map(len, held)) == len(set().union(*held)) and len(held) > 1:
            name = f"{checkpoint.name} ({storage.basename(checkpoint.uri)})"
            checkpoint = checkpoint.model_copy(update={"name": name})
        of_several = labels.get((checkpoint.run, run_folder_of(checkpoint.uri))) if labels else None
        label = of_several or checkpoint.run
        curve = f"{label}{merged_by(checkpoint)}"
        if curve == checkpoint.run:
            return checkpoint
        name = checkpoint.name.replace(checkpoint.run, label, 1)
        return checkpoint.model_copy(update={"run": curve, "name": name})

    return named


def merged_by(checkpoint: CheckpointReference) -> str:
    """Words for the kind of merge that a checkpoint was made by, behind a run's name; empty for one that was written.

    In reports, alerts and trackers the checkpoints that a run has by one kind of merge are a curve of their own. Of an
    exponential average the number of inputs says little, and may grow with the step.
    """
    merge = checkpoint.merge
    if merge is None:
        return ""
    number = "" if merge.kind in ("ema", "interpolate") else f" of {len(merge.inputs)}"
    return f" (merged: {' '.join(filter(None, (merge.kind + number, merge.parameter)))})"


def how_merged(checkpoint: CheckpointReference) -> str | None:
    """Words for how a merged checkpoint was made of which others; None for one that was written.

    Weights are said where they differ.
    """
    merge = checkpoint.merge
    if merge is None:
        return None
    weights = [f"{each.weight:.3g}" for each in merge.inputs]
    return f"{merge}" + (f", weights {', '.join(weights)}" if len(set(weights)) > 1 else "")


def trained_run(checkpoint: CheckpointReference) -> str:
    """The run behind a curve's name as `told_apart` gives it: less the kind of merge."""
    return checkpoint.run.removesuffix(merged_by(checkpoint))


def sharing_no_input(checkpoints: Iterable[CheckpointReference]) -> set[CheckpointReference]:
    """Points of a curve, in order: those that were written, of merged ones those without an input of the one before."""
    taken: set[CheckpointReference] = set()
    inputs: set[str] = set()
    for checkpoint in checkpoints:
        own = {each.digest for each in checkpoint.merge.inputs} if checkpoint.merge is not None else set[str]()
        if not own & inputs:
            taken.add(checkpoint)
            inputs = own
    return taken


def _labels(run: str, states: dict[str, set[tuple[str, str]]]) -> dict[str, str]:
    groups: list[tuple[list[str], set[tuple[str, str]]]] = []
    for folder, held in sorted(states.items()):
        same = [group for group in groups if group[1] & held]
        groups = [group for group in groups if not group[1] & held]
        groups.append(([*(name for names, _ in same for name in names), folder], held.union(*(h for _, h in same))))
    names = Counter(name for _, held in groups for name in {name for name, _ in held})
    if max(names.values()) == 1:
        return {}
    parts = [folders[0].split("/") for folders, _ in groups]
    longest = max(map(len, parts))
    length = next((n for n in range(2, longest) if len({tuple(part[-n:]) for part in parts}) == len(parts)), longest)
    return {
        folder: f"{run} ({'/'.join(part[-length:])})"
        for part, (folders, _) in zip(parts, groups, strict=True)
        for folder in folders
    }
