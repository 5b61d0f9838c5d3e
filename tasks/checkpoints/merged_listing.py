"""Merged checkpoints of a run, derived from a listing of their inputs. Pure functions of values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pools.weights.merges import Merge
from tasks.checkpoints.checkpoint import SERVED, Inputs
from tasks.checkpoints.run_snapshot import SeenCheckpoint, listing_of_inputs
from tasks.records.index import Evaluated, RunRecords
from tasks.spec.names import name_of_merge

_MEAN = re.compile(r".+-(\d+)-to-(\d+)-mean([2-9]|\d{2,})(-[0-9a-f]{6})?")


def with_means(checkpoints: Sequence[SeenCheckpoint], inputs: Iterable[Inputs]) -> list[SeenCheckpoint]:
    """Returns the checkpoints of a run by step, with a mean for each entry of `inputs`, the steps of its inputs. A mean
    is complete once all inputs are; entries with a single step are ignored."""
    by_step: dict[int, list[SeenCheckpoint]] = defaultdict(list)
    for checkpoint in sorted(checkpoints, key=lambda seen: (seen.kind not in SERVED, not seen.complete)):
        if checkpoint.label is None:
            by_step[checkpoint.step].append(checkpoint)
    means = [_mean([by_step[step] for step in steps]) for steps in sorted(inputs) if len(steps) > 1]
    return sorted([*checkpoints, *means], key=lambda checkpoint: checkpoint.order) if means else [*checkpoints]


def _mean(candidates: Sequence[Sequence[SeenCheckpoint]]) -> SeenCheckpoint:
    inputs = [first for first, *_ in candidates]
    merge = Merge.of_folders("mean", [checkpoint.uri for checkpoint in inputs])
    run, name, step = name_of_merge(merge, [(seen.run, seen.name, seen.step) for seen in inputs])
    uri = str(merge)
    others = [checkpoint for checkpoint in inputs if checkpoint.kind not in SERVED]
    problems = [f"{seen.name}: {'; '.join(seen.problems)}" for seen in inputs if seen.problems]
    problems += [
        f"two checkpoints of step {first.step}, {first.uri} and {other.uri}: remove one of them"
        for first, *more in candidates
        for other in more[:1]
        if first.complete and other.complete and other.kind in SERVED
    ]
    problems += [f"{seen.name}: averages are made of exports to Hugging Face format" for seen in others]
    return SeenCheckpoint(
        uri,
        run,
        name,
        step,
        others[0].kind if others else "huggingface",
        listing_of_inputs(uri, [checkpoint.listing for checkpoint in inputs]),
        tuple(problems),
        merged=tuple(checkpoint.step for checkpoint in inputs),
    )


class RecordedMean(NamedTuple):
    """A mean parsed from a record's name: last step, number of inputs, and the input steps that are known."""

    last: int
    inputs: int
    known: Inputs


def recorded_mean(name: str) -> RecordedMean | None:
    """Returns the mean that a checkpoint name in a record refers to; None for other checkpoints."""
    if (matched := _MEAN.fullmatch(name)) is None:
        return None
    first, last, count = map(int, matched.group(1, 2, 3))
    between = range(count) if matched[4] is None else (0, count - 1)  # names of unevenly spaced means end in a digest
    return RecordedMean(last, count, tuple(first + (last - first) * number // (count - 1) for number in between))


def past_means(
    recorded: Mapping[str, Sequence[Evaluated]], listed: Sequence[SeenCheckpoint]
) -> dict[tuple[int, int], list[frozenset[str]]]:
    """Returns the evaluation hashes of recorded means that lost an input since, by last step and number of inputs.
    After old checkpoints are deleted, "the last N" covers other checkpoints; the recorded mean is kept instead of a
    mean over those. Of unevenly spaced steps, only the first and the last are known. `recorded` has the states of each
    checkpoint with a succeeded record, by its name."""
    if not any(checkpoint.merged for checkpoint in listed):
        return {}
    steps = {checkpoint.step for checkpoint in listed if not checkpoint.merged and checkpoint.label is None}
    hashes: dict[tuple[int, int], list[frozenset[str]]] = defaultdict(list)
    for name, states in recorded.items():
        mean = recorded_mean(name)
        if mean is not None and not steps.issuperset(mean.known):
            hashes[mean.last, mean.inputs] += [state.hashes for state in states]
    return hashes


def past_steps(records: RunRecords, run: str, listed: Sequence[SeenCheckpoint]) -> set[int]:
    """Returns the steps of a run that have a record, of any status, but no checkpoint any more."""
    names = {*records.done, *(record.checkpoint for record in records.others)}
    names -= {checkpoint.name for checkpoint in listed}
    return {int(step) for name in names if (step := name.removeprefix(f"{run}-")).isdecimal()}
