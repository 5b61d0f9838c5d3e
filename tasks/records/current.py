"""Current records among several of a checkpoint, series with the same settings, and unique checkpoint names."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from resources.storage import storage
from tasks.records.details import CheckpointReference
from tasks.records.record import Record
from tasks.spec.names import in_few_words, run_folder_of
from tasks.spec.steps import label_of

_Set = tuple[str, str, tuple[str, ...]]


def current_records(records: Sequence[Record]) -> list[Record]:
    """Returns the newest record of each checkpoint, benchmarks and settings, sorted by run and step, then by label.

    Leaves out a failure if the same benchmarks succeeded later with other settings; an evaluation limited to some
    questions never replaces a full evaluation. A checkpoint rewritten at its path counts as the same, a checkpoint of
    the same name elsewhere does not.
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
        if record.succeeded
        or not any(s.created >= record.created and (is_full(s) or not is_full(record)) for s in successes[asked])
    ]
    return sorted(kept, key=lambda record: (apart(record.checkpoint).run, record.checkpoint.order))


def newest_settings(records: Sequence[Record]) -> list[Record]:
    """Returns the newest current record by checkpoint and benchmarks, across settings; prefers full evaluations."""
    apart = told_apart([record.checkpoint for record in records])
    newest: dict[_Set, Record] = {}
    for record in sorted(records, key=lambda record: (is_full(record), record.created)):
        newest[apart(record.checkpoint).name, record.evaluator, record.benchmarks] = record
    return list(newest.values())


def told_apart(checkpoints: Iterable[CheckpointReference]) -> Callable[[CheckpointReference], CheckpointReference]:
    """Returns a function that renames checkpoints for reports: a run's name gets the end of its path if ambiguous.

    Merged checkpoints get a curve of their own, that is a run of their own in reports: see `merged_by`.

    A run name is ambiguous if several folders with that run name hold checkpoints of the same name, and the folders
    share no identical checkpoint. Checkpoints of the same name in a run, such as step-1 and checkpoint-1, get their
    folder as suffix.
    """
    checkpoints = list(checkpoints)
    by_run: dict[str, dict[str, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for checkpoint in checkpoints:
        by_run[checkpoint.run][_run_folder(checkpoint)].add((checkpoint.name, checkpoint.digest))
    labels = {
        (run, folder): label
        for run, states in by_run.items()
        if len(states) > 1
        for folder, label in _labels(run, states).items()
    }

    twins: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for checkpoint in checkpoints:
        places = twins[_run_folder(checkpoint), checkpoint.name]
        places[storage.basename(checkpoint.uri)].add(checkpoint.digest)

    def named(checkpoint: CheckpointReference) -> CheckpointReference:
        held = twins[_run_folder(checkpoint), checkpoint.name].values()
        if sum(map(len, held)) == len(set().union(*held)) and len(held) > 1:
            name = f"{checkpoint.name} ({storage.basename(checkpoint.uri)})"
            checkpoint = checkpoint.model_copy(update={"name": name})
        of_several = labels.get((checkpoint.run, _run_folder(checkpoint))) if labels else None
        label = of_several or checkpoint.run
        curve = f"{label}{merged_by(checkpoint)}"
        if curve == checkpoint.run:
            return checkpoint
        name = checkpoint.name.replace(checkpoint.run, label, 1)
        return checkpoint.model_copy(update={"run": curve, "name": name})

    return named


def _run_folder(checkpoint: CheckpointReference) -> str:
    if checkpoint.label is None:
        return run_folder_of(checkpoint.uri)
    folder = run_folder_of(checkpoint.uri, stepped=False)
    named = checkpoint.label.endswith(label_of(storage.basename(folder)))
    return run_folder_of(storage.parent(folder), stepped=False) if named else folder  # a final model lies in its run's


def merged_by(checkpoint: CheckpointReference) -> str:
    """Returns a suffix for the run's name with the kind of merge of a checkpoint; empty for unmerged checkpoints.

    In reports, alerts and trackers, the checkpoints that a run has by the same kind of merge form a curve of their own.
    The suffix of an exponential average has no number of inputs, which means little there and may grow with the step.
    """
    merge = checkpoint.merge
    if merge is None:
        return ""
    number = "" if merge.kind in ("ema", "interpolate") else f" of {len(merge.inputs)}"
    return f" (merged: {' '.join(filter(None, (merge.kind + number, merge.parameter)))})"


def how_merged(checkpoint: CheckpointReference) -> str | None:
    """Returns a description of a merged checkpoint's inputs, with weights if they differ; None if it is not merged."""
    merge = checkpoint.merge
    if merge is None:
        return None
    weights = [f"{each.weight:.3g}" for each in merge.inputs]
    return f"{merge}" + (f", weights {', '.join(weights)}" if len(set(weights)) > 1 else "")


def trained_run(checkpoint: CheckpointReference) -> str:
    """Returns the run behind a curve's name from `told_apart`, without the kind of merge."""
    return checkpoint.run.removesuffix(merged_by(checkpoint))


def sharing_no_input(checkpoints: Iterable[CheckpointReference]) -> set[CheckpointReference]:
    """Returns points of a curve without a merged checkpoint that shares an input with the previous returned point."""
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


_NO_SETTINGS = (
    "model_path", "model_name", "evaluation_path", "benchmarks_path", "timeout_seconds", "wandb_tags", "sinks", "evals",
    "served_model_name", "discover_latest_checkpoint", "protect",
)  # fmt: skip
_WORDS: dict[str, Callable[[Any], str]] = {
    "max_eval_instances": lambda value: "all questions" if value is None else f"limit {value:,}",
    "num_fewshot": lambda value: "its own shots" if value is None else f"{value}-shot",
    "apply_chat_template": lambda value: "chat" if value else "no chat",
    "together_with": lambda value: f"with {in_few_words(value)}" if value else "alone",
}
_HASH_CHARACTERS = 8


def is_full(record: Record) -> bool:
    """Returns True if the evaluation was not limited to some of the questions."""
    return record.evaluation.get("max_eval_instances") is None


def newest_of_each_hash(records: Iterable[Record]) -> list[Record]:
    """Returns the newest record of each evaluation hash: full evaluations first, then newest first."""
    newest = {record.evaluation_hash: record for record in sorted(records, key=lambda record: record.created)}
    return sorted(newest.values(), key=lambda record: (is_full(record), record.created), reverse=True)


def words_of_settings(records: Iterable[Record], benchmark: str) -> dict[str, str]:
    """Returns labels for the differing settings of a benchmark's series, by evaluation hash; empty for a single series.

    `records` has a record of each hash, all by the same evaluator; `benchmark` may be part of a group.
    """
    records = list(records)
    if len(records) < 2:
        return {record.evaluation_hash: "" for record in records}
    settings = [dict(flat(_settings(record, benchmark))) for record in records]
    names = sorted({name for asked in settings for name in asked})
    differing = [name for name in names if len({json.dumps(asked.get(name), default=str) for asked in settings}) > 1]
    known = [name for name in differing if name.rpartition(".")[2] in _WORDS]
    words = [
        ", ".join(dict.fromkeys(_WORDS[name.rpartition(".")[2]](asked.get(name)) for name in known))
        for asked in settings
    ]
    alike = Counter(words)
    return {
        record.evaluation_hash: text
        if text and alike[text] == 1
        else ", ".join(filter(None, (text, f"settings {record.evaluation_hash[:_HASH_CHARACTERS]}")))
        for record, text in zip(records, words, strict=True)
    }


def _settings(record: Record, benchmark: str) -> dict[str, Any]:
    evals = {task.get("task_alias") or task.get("name"): task for task in record.evaluation.get("evals") or ()}
    kept = {name: value for name, value in record.evaluation.items() if name not in _NO_SETTINGS}
    others = [name for name in record.benchmarks if name != benchmark] if benchmark in record.benchmarks else []
    return {
        **kept,
        "max_eval_instances": kept.get("max_eval_instances"),
        "benchmark": {benchmark: evals[benchmark]} if benchmark in evals else evals,
        "together_with": others,
    }


def flat(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the non-empty settings; nested settings have names such as `pool_config.model.name`."""
    if isinstance(settings, dict) and settings:
        for key, inner in settings.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif settings not in (None, {}, [], ()):
        yield name, settings
