"""Stages data sets, tokenizers and texts of suites once per machine or region, for workers without a network.

A lock allows a single process at a time. Revisions and sizes of the fetched data are written last, to `staged.json` in
the cache folder. A shared copy in a store saves other machines of the region from downloads from the hub.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from resources.backends.local.client import local_client
from resources.config import ResourceConfig
from resources.environments.environments import EnvironmentSpec, ensure_environment
from resources.errors import BadInput, JobTimeout
from resources.jobs import inheritance
from resources.jobs.jobs import Command, JobRequest, JobStatus, create_environment
from resources.settings import process_environment, settings
from resources.storage import storage
from resources.storage.files import locked
from tasks.errors import StagingIncomplete
from tasks.evaluators.environments import HELM, LM_EVAL
from tasks.evaluators.harness import cache_variables
from tasks.offline.shared_copy import MANIFEST, Tree, fill, read_manifest, share
from tasks.offline.texts import stage_texts, text_source
from tasks.offline.wanted import PARTS, Wanted, chosen_of, missing_of
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.suites import texts_folder

_PROGRAMS = Path(__file__).parent / "programs"
_JOB_FILE = "job.json"
_PROBLEMS = "problems.json"
_FETCH = {
    "HF_HUB_OFFLINE": "0",
    "HF_DATASETS_OFFLINE": "0",
    # A benchmark that runs code executes a line of its own when it is loaded.
    "HF_ALLOW_CODE_EVAL": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
_PROVE = {**_FETCH, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_ALL_LINES = 1_000_000


_STAGERS: dict[str, tuple[EnvironmentSpec, tuple[str, ...]]] = {
    "stage_data.py": (LM_EVAL, ("benchmarks", "tokenizers", "files_of_datasets")),
    "stage_helm.py": (HELM, ("helm",)),
}
"""The environment of each program, and the parts of the manifest that it stages."""


def stage(
    required: Wanted,
    *,
    benchmarks_path: str | None = None,
    revisions: dict[str, str] | None = None,
    texts_from: str | None = None,
    refresh: bool = False,
    prove: bool = True,
    on_event: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fetches missing data; returns the manifest of all data staged on this machine.

    Args:
        benchmarks_path: local folder with your own benchmarks.
        revisions: branch, tag or commit by data set, and SHA-256 by address; the newest when unset.
        texts_from: folder or address with the text files, in place of their source.
        refresh: also fetch the newest revision of staged data.
        prove: load everything again without a network.
    """
    with _alone(on_event):
        manifest = settings().cache_dir / MANIFEST
        staged = read_manifest(str(manifest.parent)) or {}
        missing = missing_of(required, staged, refresh=refresh)
        problems: dict[str, str] = {}
        job = {
            "benchmarks_path": str(storage.local_path(benchmarks_path or str(BUNDLED)).absolute()),
            "scenarios_path": str(_scenarios()),
            "revisions": revisions or {},
            "refresh": refresh,
            "manifest": str(manifest.absolute()),
        }
        for program, (environment, parts) in _STAGERS.items():
            asked = {part: getattr(missing, part) for part in parts}
            if not any(asked.values()):
                continue
            python = ensure_environment(environment, on_progress=on_event).python
            failures = _run(python, program, "fetch", {**job, **asked}, variables=_FETCH, on_event=on_event)
            staged = read_manifest(str(manifest.parent)) or {}
            if prove:
                on_event("loading everything without a network")
                fetched = {part: _without(names, failures) for part, names in asked.items()}
                unproved = _run(python, program, "prove", {**job, **fetched}, variables=_PROVE, on_event=on_event)
                staged |= {part: _without(staged.get(part, {}), unproved) for part in parts}
                _write(manifest, staged)
                failures |= unproved
            problems |= failures
        for name in required.texts:
            source = text_source(name)
            if texts_from is not None:
                source = source.model_copy(update={"base": storage.absolute(texts_from)})
            staged.setdefault("texts", {})[name] = stage_texts(source, Path(texts_folder(name)), on_event=on_event)
        _write(manifest, staged)
    if problems:
        raise StagingIncomplete(
            expected="everything to be staged, and to load without a network",
            found="\n".join(f"{name}: {why}" for name, why in problems.items()),
            remedy="see to what is named (HF_TOKEN for what is behind a form), then run it again: the rest is there",
        )
    return staged


def share_staged(uri: str, *, on_event: Callable[[str], None] = lambda line: None) -> int:
    """Updates the shared copy at `uri` with all data staged on this machine; returns the number of bytes sent."""
    with _alone(on_event):
        staged = read_manifest(str(settings().cache_dir)) or {}
        return share(_tree(), uri, staged, is_included=_files_of(staged))


def fill_from(
    uri: str, required: Wanted | None = None, *, on_event: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, Any], int]:
    """Copies wanted data, or all, from the shared copy at `uri`; returns this machine's manifest and the byte count.

    Reads nothing but the manifest if this machine has the same data already.
    """
    with _alone(on_event):
        cache = settings().cache_dir
        staged = read_manifest(str(cache)) or {}
        copy = read_manifest(uri) or {}
        lacking = missing_of(required or Wanted(), copy, refresh=False)
        if copy and lacking.names:
            raise BadInput(
                expected=f"the shared copy at {uri} to hold what is asked for",
                found=f"not there: {', '.join(lacking.names)}",
                remedy="add it with `assay stage … --target` on a machine that reaches the hub",
            )
        parts = {part: copy.get(part, {}) if required is None else chosen_of(part, copy, required) for part in PARTS}
        if copy and all(
            staged.get(part, {}).get(name) == entry for part, all_ in parts.items() for name, entry in all_.items()
        ):
            return staged, 0
        number = fill(_tree(), uri, is_included=_files_of(parts))
        merged = {part: {**staged.get(part, {}), **parts[part]} for part in PARTS}
        _write(cache / MANIFEST, {**staged, **merged})
        return {**staged, **merged}, number


def _files_of(staged: dict[str, Any]) -> Callable[[str], bool]:
    prefixes = ["modules/", "evaluate/", "nltk/"]
    for path, dataset in {**staged.get("datasets", {}), **staged.get("files_of_datasets", {})}.items():
        prefixes += [f"hub/datasets--{path.replace('/', '--')}/"]
        prefixes += [f"datasets/{dataset['folder']}/"] if dataset.get("folder") else []
    prefixes += [f"hub/models--{name.replace('/', '--')}/" for name in staged.get("tokenizers", {})]
    prefixes += [f"benchmarks/{name}/" for name in staged.get("texts", {})]
    prefixes += [f"scenarios/{name}/" for name in staged.get("scenarios", {})]
    return lambda relative: relative.startswith(tuple(prefixes))


def _tree() -> Tree:
    variables = {**process_environment(), **cache_variables()}
    home = Path(variables.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Tree(
        {
            "hub": Path(variables.get("HF_HUB_CACHE") or home / "hub"),
            "datasets": Path(variables.get("HF_DATASETS_CACHE") or home / "datasets"),
            "modules": home / "modules",
            "evaluate": home / "evaluate",
            "benchmarks": Path(texts_folder("any")).parent,
            "scenarios": _scenarios(),
            "nltk": _scenarios().with_name("nltk"),
        },
        notes=settings().cache_dir / "filling",
    )


def _scenarios() -> Path:
    return (settings().cache_dir / "helm" / "scenarios").absolute()


def _without(names: Any, left_out: Mapping[str, str]) -> Any:
    if isinstance(names, Mapping):
        return {name: value for name, value in names.items() if name not in left_out}
    return [name for name in names if name.partition("@")[0] not in left_out]


def _run(
    python: Path,
    program: str,
    action: str,
    job: dict[str, Any],
    *,
    variables: dict[str, str],
    on_event: Callable[[str], None],
) -> dict[str, str]:
    name = f"stage-{secrets.token_hex(4)}"
    folder = (settings().cache_dir / "staging" / name).absolute()
    folder.mkdir(parents=True)
    problems, job_file = folder / _PROBLEMS, folder / _JOB_FILE
    job_file.write_text(json.dumps({**job, "problems": str(problems)}, indent=2))
    request = JobRequest(
        name,
        Command(str(python), ("-I", "-u", str(_PROGRAMS / program), action, str(job_file))),
        resources=ResourceConfig(),
        environment=create_environment(
            workspace=folder,
            python=python,
            env_vars={**cache_variables(), **variables},
            inherited=inheritance.NATIVE_HARNESS,
        ),
        max_retries_preemption=0,
    )
    handle = local_client().submit(request)
    shown, finished = 0, False
    try:
        while not finished:
            with suppress(JobTimeout):
                finished = handle.wait(0.5, raise_on_failure=False).finished
            lines = [line for line in handle.logs(_ALL_LINES).splitlines() if line.startswith("staging: ")]
            for line in lines[shown:]:
                on_event(line.removeprefix("staging: "))
            shown = len(lines)
    finally:
        handle.terminate()
    if handle.status() is not JobStatus.SUCCEEDED:
        raise StagingIncomplete(
            expected="the program that stages data to end well",
            found=f"it did not. Its last lines:\n{handle.logs(25).rstrip()}",
            remedy="run it again: it goes on where it was",
        )
    return json.loads(problems.read_text())


def _alone(on_event: Callable[[str], None]) -> AbstractContextManager[None]:
    def waiting() -> None:
        on_event("another process is staging; waiting for it")

    return locked(settings().cache_dir / "staging.lock", waiting=waiting)


def _write(manifest: Path, staged: dict[str, Any]) -> None:
    storage.write_bytes(str(manifest), json.dumps(staged, indent=2, sort_keys=True).encode())
