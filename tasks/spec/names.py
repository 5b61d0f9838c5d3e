"""Names of runs and checkpoints, derived from their paths, and paths that mean the same in every working folder."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pools.weights.merges import Merge, Source, locations_of, merge_of
from pools.weights.overrides import override_of, without_options
from resources.errors import BadInput
from resources.storage import storage
from tasks.spec.steps import Stepped, is_export, is_place, step_in, step_of

_NUMBERED = re.compile(r"^models:/+([^/@]+)/(\d+)(?=/|$)")
_REGISTERED = re.compile(r"^models:/+([^/@]+)[@/]([^/]+)")
_OF_RUN = re.compile(r"^runs:/+([^/]+)/?")
_RUN_ID = re.compile("[0-9a-f]{32}")


def name_of(uri: str) -> tuple[str, str, int]:
    """Returns run, checkpoint name and step of a path: `$RUN/hf/step-$N` is the checkpoint `$RUN-$N` of `$RUN`, and so
    are `$RUN/step-$N` and an export within it; see `tasks.spec.steps`. A folder without a step is a run of its own at
    step 0. Names of MLflow run artifacts end in the first 8 digits of the run's id, since all are called `model`;
    `models:/llama/3` is the run `llama-v3`. A merged checkpoint has run and step of its last input, or only its run's
    name while its steps are unresolved."""
    if (merge := merge_of(uri)) is not None:
        return name_of_merge(merge, [name_of_source(source) for source in merge.sources])
    parts = parts_of(uri)
    direct = _direct(parts)
    parts, stepped = parts[: direct.run], direct.stepped
    run = _run_of(parts)
    if stepped is not None and stepped.series:
        run = f"{run}-{stepped.series}" if without_options(uri).startswith("hf://") else stepped.series
    return run, (f"{run}-{stepped.step}" if stepped is not None else run), stepped.step if stepped is not None else 0


def run_name_of(uri: str) -> str:
    """Returns the name of a run by its folder: a number behind a word for a step, as in `llama-step-100`, is part of
    the name. `name_of` takes such a folder for a checkpoint; `run_named_by` in discovery looks at what it holds."""
    if (merge := merge_of(uri)) is not None:
        return run_name_of(merge.locations[-1])
    parts = parts_of(uri)
    return _run_of(parts[: _without_places(parts, len(parts))])


def name_of_source(source: Source) -> tuple[str, str, int]:
    """Returns run, name and step of an input of a merge. A location with `@steps` is a run."""
    if not source.steps:
        return name_of(source.location)
    run = run_name_of(source.location)
    return run, run, 0


def _run_of(parts: Sequence[str]) -> str:
    run = re.sub(r"[^A-Za-z0-9._+=@-]", "-", parts[-1] if parts else "").lstrip("._+=@-") or "model"
    ids = [part[:8] for part, folder in pairwise(parts) if folder == "artifacts" and _RUN_ID.fullmatch(part)]
    if ids:
        run = f"{run}-{ids[-1]}" if parts[-1] != "artifacts" else ids[-1]
    return run


def parts_of(uri: str) -> list[str]:
    """Returns the parts of a location's path, in which MLflow's names are the folders of their artifacts, and a
    revision on the hub is a folder of its repository."""
    uri = without_options(uri)
    uri = _OF_RUN.sub(r"/\1/artifacts/", _REGISTERED.sub(r"/\1-\2", _NUMBERED.sub(r"/\1-v\2", uri)))
    uri = uri.replace("@", "/", 1) if uri.startswith("hf://") and step_of(uri.partition("@")[2]) is not None else uri
    absolute = uri if uri.startswith("/") else storage.absolute(uri)
    local = absolute.split("://", 1)[1] if "://" in absolute else absolute
    return [part for part in local.split("/") if part not in ("", ".")]


class _Direct(NamedTuple):
    """Numbers of parts of a path up to the run's folder, and up to the folder of the step; and the step."""

    run: int
    own: int
    stepped: Stepped | None


def _direct(parts: Sequence[str]) -> _Direct:
    own = len(parts)
    while own and is_export(parts[own - 1]):
        own -= 1
    stepped = step_in(parts[own - 1 : own], above=parts[own - 2] if own > 1 else "") if own else None
    own = own if stepped is not None else len(parts)
    return _Direct(_without_places(parts, own - (stepped is not None)), own, stepped)


def _without_places(parts: Sequence[str], run: int) -> int:
    while run > 1 and is_place(parts[run - 1]) and (parts[run - 1] == "hf" or parts[run - 2] != "artifacts"):
        run -= 1
    return run


def name_of_series(run: str, series: str | None) -> str:
    """Returns the name of a selected series of a run: the run's own if there is none, or if it names the series."""
    return run if series in (None, ".") or run.endswith(f"-{series}") else f"{run}-{series}"


def name_of_merge(merge: Merge, named: Sequence[tuple[str, str, int]]) -> tuple[str, str, int]:
    """Returns run, name and step of a merged checkpoint, by run, name and step of each of its inputs."""
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


def run_folder_of(uri: str, *, stepped: bool = True) -> str:
    """Returns the folder of a checkpoint's run, without step and `hf`; for a merged checkpoint, of its last input.
    `stepped`: False if a step in its last part does not count."""
    if stepped:
        return _folders_of(locations_of(uri)[-1])[0]
    parts = _absolute(uri).split("/")
    return "/".join(parts[: _without_places(parts, len(parts))])


def place_of(uri: str) -> str:
    """Returns a checkpoint's path without `hf`, which is unchanged by rewriting it or moving it into or out of `hf`."""
    if (merge := merge_of(uri)) is not None:
        return str(merge.with_locations(place_of))
    if (override := override_of(uri)) is not None:
        return override.at(place_of(override.location))
    run, own = _folders_of(uri)
    return storage.join(run, storage.basename(own))


def _folders_of(uri: str) -> tuple[str, str]:
    parts = _absolute(uri).split("/")
    direct = _direct(parts)
    return "/".join(parts[: direct.run]), "/".join(parts[: direct.own])


def _absolute(uri: str) -> str:
    return (uri if uri.startswith("/") else storage.absolute(without_options(uri))).rstrip("/")


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
