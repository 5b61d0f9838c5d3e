"""Names of runs and checkpoints, derived from their paths, and paths that mean the same in every working folder."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pools.weights.merges import Merge, locations_of, merge_of
from pools.weights.overrides import override_of, without_options
from resources.errors import BadInput
from resources.storage import storage

_NUMBERED = re.compile(r"^models:/+([^/@]+)/(\d+)(?=/|$)")
_REGISTERED = re.compile(r"^models:/+([^/@]+)[@/]([^/]+)")
_OF_RUN = re.compile(r"^runs:/+([^/]+)/?")
_RUN_ID = re.compile("[0-9a-f]{32}")
_STEP = re.compile(r"(?:global_)?(?:step|checkpoint|iter)[-_]?([0-9]{1,18})")  # more digits are no step


def step_of(component: str) -> int | None:
    """Returns the training step in a folder name such as step-2000, checkpoint-500 or global_step_10."""
    match = _STEP.fullmatch(component)
    return int(match.group(1)) if match else None


def name_of(uri: str) -> tuple[str, str, int]:
    """Returns run, checkpoint name and step of a path: `$RUN/hf/step-$N` is the checkpoint `$RUN-$N` of `$RUN`.
    `$RUN/step-$N` and an export within it, `$RUN/step-$N/hf`, are the same. A folder without a step is a run of its own
    at step 0. Names of MLflow run artifacts end in the first 8 digits of the run's id, since all are called `model`;
    `models:/llama/3` is the run `llama-v3`. A merged checkpoint has run and step of its last input, or only its run's
    name while its steps are unresolved."""
    if (merge := merge_of(uri)) is not None:
        return _name_of_merge(merge)
    uri = without_options(uri)
    uri = _OF_RUN.sub(r"/\1/artifacts/", _REGISTERED.sub(r"/\1-\2", _NUMBERED.sub(r"/\1-v\2", uri)))
    absolute = uri if uri.startswith("/") else storage.absolute(uri)
    local = absolute.split("://", 1)[1] if "://" in absolute else absolute
    parts = [part for part in local.split("/") if part not in ("", ".")]
    if len(parts) > 1 and parts[-1] == "hf" and step_of(parts[-2]) is not None:
        parts = parts[:-1]
    step = step_of(parts[-1]) if parts else None
    if step is not None:
        parts = parts[:-1]
    if parts and parts[-1] == "hf":
        parts = parts[:-1]
    run = re.sub(r"[^A-Za-z0-9._+=@-]", "-", parts[-1] if parts else "").lstrip("._+=@-") or "model"
    ids = [part[:8] for part, folder in pairwise(parts) if folder == "artifacts" and _RUN_ID.fullmatch(part)]
    if ids:
        run = f"{run}-{ids[-1]}" if parts[-1] != "artifacts" else ids[-1]
    return run, (f"{run}-{step}" if step is not None else run), step or 0


def _name_of_merge(merge: Merge) -> tuple[str, str, int]:
    named = [name_of(location) for location in merge.locations]
    run, _, last = named[-1]
    if any(source.steps for source in merge.sources):
        return run, run, 0
    inputs = [(name, step) for name, _, step in named]
    steps = [step for _, step in inputs]
    even = len({name for name, _ in inputs}) == 1 and len({after - before for before, after in pairwise(steps)}) == 1
    kind = f"{merge.kind}{len(steps) if merge.kind != 'interpolate' else ''}"
    parts = [f"{run}-{steps[0]}-to-{last}", kind, merge.parameter]
    if not even:
        parts.append(hashlib.blake2b(repr(inputs).encode(), digest_size=3).hexdigest())
    return run, "-".join(filter(None, parts)), last


def in_steps(steps: Sequence[int]) -> str:
    """Returns a few steps for display: as a range such as 1000..3000 by 1000, or listed."""
    distances = {after - before for before, after in pairwise(steps)}
    if len(steps) > 2 and len(distances) == 1:
        return f"{steps[0]}..{steps[-1]} by {distances.pop()}"
    return ", ".join(map(str, steps))


def run_folder_of(uri: str) -> str:
    """Returns the folder of a checkpoint's run, without step and `hf`; for a merged checkpoint, of its last input."""
    folder = _without_export(locations_of(uri)[-1])
    if step_of(storage.basename(folder)) is not None:
        folder = storage.parent(folder)
    return storage.parent(folder) if storage.basename(folder) == "hf" else folder


def place_of(uri: str) -> str:
    """Returns a checkpoint's path without `hf`, which is unchanged by rewriting it or moving it into or out of `hf`."""
    if (merge := merge_of(uri)) is not None:
        return str(merge.with_locations(place_of))
    if (override := override_of(uri)) is not None:
        return override.at(place_of(override.location))
    return storage.join(run_folder_of(uri), storage.basename(_without_export(uri)))


def _without_export(uri: str) -> str:
    folder = (uri if uri.startswith("/") else storage.absolute(uri)).rstrip("/")
    inside = storage.basename(folder) == "hf" and step_of(storage.basename(storage.parent(folder))) is not None
    return storage.parent(folder) if inside else folder


def in_few_words(names: Iterable[str]) -> str:
    """Returns the first two names, and the number of further names."""
    every = list(names)
    return ", ".join(every[:2]) + (f" and {len(every) - 2} more" if len(every) > 2 else "")


def how_many(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 cell, 2,000 cells."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def artifact_key(title: str) -> str:
    """Returns the prefix of the keys of Prefect's artifacts about a run."""
    cleaned = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in title.lower())
    return "-".join(part for part in cleaned.split("-") if part)[:60] or "evaluation"


def job_label(flow_run: str | None) -> str | None:
    """Returns a label in the names of a flow run's jobs, by which they are found later; None outside of flow runs."""
    return f"run{flow_run.replace('-', '')[:12]}" if flow_run else None


def pool_label(run: str, flow_run: str | None) -> str:
    """Returns a label in the names of a pool's jobs: the served run, and the flow run if any."""
    return "-".join(part for part in (_in_job_names(run)[:50], job_label(flow_run)) if part)


def job_name(*parts: str, flow_run: str | None) -> str:
    """Returns a unique name for a job, of its kind and subject, then the flow run; 100 characters at most."""
    tail = "-".join(part for part in (job_label(flow_run), secrets.token_hex(4)) if part)
    return f"{_in_job_names('-'.join(parts))[: 99 - len(tail)]}-{tail}"


def suites_in(tags: Iterable[str]) -> list[str]:
    """Returns the suites named in tags of a record or of an evaluation."""
    return [tag.removeprefix("suite=") for tag in tags if tag.startswith("suite=")]


def _in_job_names(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")


def is_relative(path: str) -> bool:
    """Returns True if a path depends on the working folder; addresses in a store never do."""
    return any(storage.is_local(place) and not storage.local_path(place).is_absolute() for place in locations_of(path))


def check_deployed_paths(paths: Iterable[str]) -> None:
    """Refuses relative paths, for a flow that a worker runs in a temporary folder."""
    relative = [path for path in paths if is_relative(path)]
    if relative:
        raise BadInput(
            expected="absolute paths in a deployed flow: a worker runs it in a folder that it deletes afterwards",
            found=", ".join(relative),
            remedy="write the whole path",
        )
