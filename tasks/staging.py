"""Data sets, tokenizers and texts of suites, staged once per machine or region for workers without a network.

One process at a time fetches. What it fetched, at which revision and how large, stands in `staged.json` in the cache
folder, written last. A shared copy in a store saves other machines of the region the way to the hub.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resources import storage
from resources.config import ResourceConfig
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.errors import BadInput, JobTimeout, StagingIncomplete
from resources.jobs import Command, JobRequest, JobStatus, create_environment, current_client
from resources.settings import process_environment, settings
from tasks.benchmark_sets import bundled_names
from tasks.benchmarks import BUNDLED
from tasks.evaluators.harness import cache_variables
from tasks.shared_copy import MANIFEST, Tree, fill, read_manifest, share
from tasks.staged_texts import stage_texts, text_source
from tasks.suites import Suite, texts_folder

_PROGRAM = Path(__file__).parent / "programs" / "stage_data.py"
_JOB_FILE = "job.json"
_PROBLEMS = "problems.json"
_FETCH = {
    "HF_HUB_OFFLINE": "0",
    "HF_DATASETS_OFFLINE": "0",
    # A benchmark that runs code tries that with a line of its own when it is loaded.
    "HF_ALLOW_CODE_EVAL": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
_WITHOUT_NETWORK = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_ALPACA_EVAL = ("tatsu-lab/alpaca_eval", ("alpaca_eval_gpt4_baseline.json", "df_gamed.csv"))
_PARTS = ("benchmarks", "datasets", "tokenizers", "texts", "files_of_datasets")
_ALL_LINES = 1_000_000


@dataclass(frozen=True)
class Wanted:
    """What is to be there: benchmarks by name, tokenizers as `owner/name` or `owner/name@revision`, texts."""

    benchmarks: tuple[str, ...] = ()
    tokenizers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    files_of_datasets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Single files of data sets on the hub."""
    elsewhere: tuple[str, ...] = ()
    """Evaluations whose harness fetches its data by itself."""


def wanted_by(suites: Sequence[Suite], *, tokenizers: Sequence[str] = ()) -> Wanted:
    """What some suites need on a machine without a network."""
    evaluations = [one for suite in suites for one in suite.evaluations]
    lm_eval = [
        one for one in evaluations if one.evaluator in ("lm_evaluation_harness", "levanter_lm_evaluation_harness")
    ]
    alpaca = any(task.name == "alpaca_eval" for one in evaluations for task in one.evals)
    return Wanted(
        benchmarks=tuple(dict.fromkeys(task.name for one in lm_eval if one.texts is None for task in one.evals)),
        tokenizers=tuple(tokenizers),
        texts=tuple(dict.fromkeys(one.texts for one in lm_eval if one.texts is not None)),
        files_of_datasets=dict([_ALPACA_EVAL]) if alpaca else {},
        elsewhere=tuple(
            one.label
            for one in evaluations
            if one.evaluator == "helm" and not bundled_names().issuperset(task.name for task in one.evals)
        ),
    )


def stage(
    wanted: Wanted,
    *,
    benchmarks_path: str | None = None,
    revisions: dict[str, str] | None = None,
    texts_from: str | None = None,
    refresh: bool = False,
    prove: bool = True,
    on_event: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fetches what is wanted and not there yet; what is staged on this machine then.

    Args:
        wanted: what is to be there.
        benchmarks_path: local folder of benchmarks of one's own.
        revisions: branch, tag or commit by data set; the newest when unset.
        texts_from: where texts are read instead: a folder or address that holds their files.
        refresh: fetch the newest revision of what is there already, too.
        prove: load everything once more without a network.
        on_event: told in a line of text what happens.

    Raises:
        StagingIncomplete: something could not be fetched, or does not load without a network; the rest is staged.
        BadInput: a source of texts is not what it should be.
    """
    with _alone(on_event):
        manifest = settings().cache_dir / MANIFEST
        staged = read_manifest(str(manifest.parent)) or {}
        missing = _missing(wanted, staged, refresh=refresh)
        problems: dict[str, str] = {}
        if missing.benchmarks or missing.tokenizers or missing.files_of_datasets:
            job = {
                "benchmarks": missing.benchmarks,
                "benchmarks_path": str(storage.local_path(benchmarks_path or str(BUNDLED)).absolute()),
                "tokenizers": missing.tokenizers,
                "files_of_datasets": missing.files_of_datasets,
                "revisions": revisions or {},
                "refresh": refresh,
                "manifest": str(manifest.absolute()),
            }
            problems = _run("fetch", job, variables=_FETCH, on_event=on_event)
            staged = read_manifest(str(manifest.parent)) or {}
            if prove:
                fetched = {**job, "benchmarks": [name for name in missing.benchmarks if name not in problems]}
                on_event("loading everything without a network")
                unproved = _run("prove", fetched, variables={**_FETCH, **_WITHOUT_NETWORK}, on_event=on_event)
                for part in ("benchmarks", "tokenizers"):
                    staged[part] = {name: one for name, one in staged[part].items() if name not in unproved}
                problems |= unproved
        for name in wanted.texts:
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
    """Brings the shared copy at `uri` up to date with all that is staged on this machine; the bytes that were sent."""
    with _alone(on_event):
        staged = read_manifest(str(settings().cache_dir)) or {}
        return share(_tree(), uri, staged, wanted=_files_of(staged))


def fill_from(
    uri: str, wanted: Wanted | None = None, *, on_event: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, Any], int]:
    """Copies what is wanted, or all, from the shared copy at `uri`; what is staged here then, and the bytes.

    Nothing is read but the manifest if this machine has the same already.

    Raises:
        BadInput: there is no shared copy, or something is not in it.
        StorageError: something could not be read or written.
    """
    with _alone(on_event):
        here = settings().cache_dir
        staged = read_manifest(str(here)) or {}
        copy = read_manifest(uri) or {}
        lacking = _missing(wanted or Wanted(), copy, refresh=False)
        absent = [*lacking.benchmarks, *lacking.tokenizers, *lacking.files_of_datasets, *lacking.texts]
        if copy and absent:
            raise BadInput(
                expected=f"the shared copy at {uri} to hold what is asked for",
                found=f"not there: {', '.join(absent)}",
                remedy="add it with `assay stage … --target` on a machine that reaches the hub",
            )
        parts = {part: copy.get(part, {}) if wanted is None else _chosen(part, copy, wanted) for part in _PARTS}
        if copy and all(
            staged.get(part, {}).get(name) == one for part, all_ in parts.items() for name, one in all_.items()
        ):
            return staged, 0
        number = fill(_tree(), uri, wanted=_files_of(parts))
        merged = {part: {**staged.get(part, {}), **parts[part]} for part in _PARTS}
        _write(here / MANIFEST, {**staged, **merged})
        return {**staged, **merged}, number


def _missing(wanted: Wanted, staged: dict[str, Any], *, refresh: bool) -> Wanted:
    """What is wanted and not staged; of tokenizers, those of another revision too."""
    if refresh:
        return wanted
    tokenizers = staged.get("tokenizers", {})

    def is_there(asked: str) -> bool:
        name, _, revision = asked.partition("@")
        return name in tokenizers and revision in ("", tokenizers[name]["asked"], tokenizers[name]["revision"])

    return Wanted(
        benchmarks=tuple(name for name in wanted.benchmarks if name not in staged.get("benchmarks", {})),
        tokenizers=tuple(asked for asked in wanted.tokenizers if not is_there(asked)),
        texts=tuple(name for name in wanted.texts if name not in staged.get("texts", {})),
        files_of_datasets={
            name: files
            for name, files in wanted.files_of_datasets.items()
            if name not in staged.get("files_of_datasets", {})
        },
    )


def _chosen(part: str, copy: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    content: dict[str, Any] = copy.get(part, {})
    names = {
        "benchmarks": set(wanted.benchmarks),
        "datasets": {path for name in wanted.benchmarks for path in copy["benchmarks"].get(name, {})},
        "tokenizers": {asked.partition("@")[0] for asked in wanted.tokenizers},
        "texts": set(wanted.texts),
        "files_of_datasets": set(wanted.files_of_datasets),
    }[part]
    return {name: one for name, one in content.items() if name in names}


def _files_of(staged: dict[str, Any]) -> Callable[[str], bool]:
    """Which files of a copy belong to what is staged; modules are few, and shared by all."""
    prefixes = ["modules/", "evaluate/"]
    for path, one in {**staged.get("datasets", {}), **staged.get("files_of_datasets", {})}.items():
        prefixes += [f"hub/datasets--{path.replace('/', '--')}/"]
        prefixes += [f"datasets/{one['folder']}/"] if one.get("folder") else []
    prefixes += [f"hub/models--{name.replace('/', '--')}/" for name in staged.get("tokenizers", {})]
    prefixes += [f"benchmarks/{name}/" for name in staged.get("texts", {})]
    return lambda relative: relative.startswith(tuple(prefixes))


def _tree() -> Tree:
    """Where the hub's clients keep things, as the user or we set them."""
    variables = {**process_environment(), **cache_variables()}
    home = Path(variables.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Tree(
        {
            "hub": Path(variables.get("HF_HUB_CACHE") or home / "hub"),
            "datasets": Path(variables.get("HF_DATASETS_CACHE") or home / "datasets"),
            "modules": home / "modules",
            "evaluate": home / "evaluate",
            "benchmarks": Path(texts_folder("any")).parent,
        },
        notes=settings().cache_dir / "filling",
    )


def _run(
    what: str, job: dict[str, Any], *, variables: dict[str, str], on_event: Callable[[str], None]
) -> dict[str, str]:
    """Runs our program in lm-eval's environment; what could not be done, by name.

    Raises:
        StagingIncomplete: it ended without saying.
    """
    python = ensure_environment(ENVIRONMENTS["lm-eval"], on_progress=on_event).python
    name = f"stage-{secrets.token_hex(4)}"
    folder = settings().cache_dir / "staging" / name
    folder.mkdir(parents=True)
    problems = folder / _PROBLEMS
    (folder / _JOB_FILE).write_text(json.dumps({**job, "problems": str(problems.absolute())}, indent=2))
    request = JobRequest(
        name,
        Command(str(python), ("-I", "-u", str(_PROGRAM), what, str((folder / _JOB_FILE).absolute()))),
        resources=ResourceConfig(),
        environment=create_environment(workspace=folder, python=python, env_vars={**cache_variables(), **variables}),
        max_retries_preemption=0,
    )
    handle = current_client().submit(request)
    shown = 0
    try:
        while True:
            finished = _ended(handle)
            lines = [line for line in handle.logs(_ALL_LINES).splitlines() if line.startswith("staging: ")]
            for line in lines[shown:]:
                on_event(line.removeprefix("staging: "))
            shown = len(lines)
            if finished:
                break
    finally:
        handle.terminate()
    if handle.status() is not JobStatus.SUCCEEDED:
        last_lines = "\n".join(handle.logs(25).splitlines())
        raise StagingIncomplete(
            expected="the program that stages data to end well",
            found=f"it did not. Its last lines:\n{last_lines}",
            remedy="run it again: it goes on where it was",
        )
    return json.loads(problems.read_text())


def _ended(handle: Any) -> bool:
    try:
        return handle.wait(0.5, raise_on_failure=False).finished
    except JobTimeout:
        return False


@contextmanager
def _alone(on_event: Callable[[str], None]) -> Iterator[None]:
    """One process of this machine at a time; the lock ends with the process."""
    path = settings().cache_dir / "staging.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_event("another process is staging; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(manifest: Path, staged: dict[str, Any]) -> None:
    storage.write_bytes(str(manifest), json.dumps(staged, indent=2, sort_keys=True).encode())
