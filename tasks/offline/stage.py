"""Stages data sets, tokenizers and texts of suites once per machine or region, for workers without a network.

A lock allows a single process at a time. Revisions and sizes of the fetched data are written last, to `staged.json` in
the cache folder. A shared copy in a store saves other machines of the region from downloads from the hub.

Texts that a benchmark scores whole are fetched once from a repository at a fixed commit. The benchmarks' own files are
in `suite_data/<name>/`, next to `source.yaml`, which gives the source of the texts. The output is an ordinary folder of
benchmarks: YAML files, and the data files that they name.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from resources.backends.local.client import local_client
from resources.config import Config, ResourceConfig
from resources.environments.environments import EnvironmentSpec, ensure_environment
from resources.errors import BadInput, JobTimeout, StorageError
from resources.jobs import inheritance
from resources.jobs.jobs import Command, JobRequest, JobStatus, create_environment
from resources.settings import process_environment, settings
from resources.storage import storage
from resources.storage.files import locked
from resources.storage.yaml_text import load_yaml
from tasks.errors import StagingIncomplete
from tasks.evaluators.environments import HELM, LM_EVAL
from tasks.evaluators.harness import cache_variables
from tasks.offline.shared_copy import MANIFEST, Tree, fill, read_manifest, share
from tasks.offline.wanted import PARTS, Wanted, chosen_of, missing_of
from tasks.spec.benchmark_sets import SUITE_DATA
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.suites import texts_folder

_PROGRAMS = Path(__file__).parent / "programs"
_JOB_FILE = "job.json"
_PROBLEMS = "problems.json"
_VARIABLES = {
    # A benchmark that runs code executes a line of its own when it is loaded.
    "HF_ALLOW_CODE_EVAL": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
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
            failures = _run(python, program, "fetch", {**job, **asked}, on_event=on_event)
            staged = read_manifest(str(manifest.parent)) or {}
            if prove:
                on_event("loading everything without a network")
                fetched = {part: _without(names, failures) for part, names in asked.items()}
                unproved = _run(python, program, "prove", {**job, **fetched}, on_event=on_event)
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
        parts = {part: copy.get(part, {}) for part in PARTS} if required is None else chosen_of(copy, required)
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
    python: Path, program: str, action: str, job: dict[str, Any], *, on_event: Callable[[str], None]
) -> dict[str, str]:
    name, offline = f"stage-{secrets.token_hex(4)}", "1" if action == "prove" else "0"
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
            env_vars={**cache_variables(), **_VARIABLES, "HF_HUB_OFFLINE": offline, "HF_DATASETS_OFFLINE": offline},
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


_SOURCE = "source.yaml"
_TEXTS_DONE = "staged.json"
_ATTEMPTS = 8
_SECONDS = 120
_UNTOLD_WAIT_SECONDS = 30.0
_LONGEST_WAIT_SECONDS = 900.0
_PASSING = frozenset({None, 408, 429, 500, 502, 503, 504})  # None: no answer


class TextFile(Config):
    """A file of texts: a JSON list of strings, or of objects with a field `text`."""

    path: str
    """Path of the file below `base`."""
    blob: str | None = None
    """Git's blob id of the content; unchecked when unset."""


class TextSource(Config):
    """The source of the texts of some benchmarks."""

    name: str
    """Name of the folder they are staged into."""
    revision: str
    """Commit of their repository."""
    base: str
    """Folder of the files: an http address, or any location that fsspec reads."""
    files: dict[str, TextFile]
    """Files by the name of the data file that is written."""


def text_source(name: str) -> TextSource:
    """Returns the source with that name that ships with Assay."""
    return TextSource.model_validate(load_yaml((SUITE_DATA / name / _SOURCE).read_text(encoding="utf-8")))


def stage_texts(source: TextSource, folder: Path, *, on_event: Callable[[str], None]) -> dict[str, Any]:
    """Writes a folder of benchmarks and texts atomically, unless it exists; returns revision, documents and bytes."""
    content = source.model_dump(mode="json")
    try:
        done = json.loads((folder / _TEXTS_DONE).read_text())
        if done["source"] == content:
            return done["staged"]
    except (OSError, ValueError, KeyError):
        pass
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    staged: dict[str, Any] = {"revision": source.revision, "files": {}}
    for name, file in source.files.items():
        lines = _lines(source, file, unfinished / f"{name}-{file.blob or source.revision}.original")
        target = unfinished / f"{name}.jsonl"
        target.write_text("".join(lines), encoding="utf-8")
        staged["files"][name] = {"documents": len(lines), "bytes": target.stat().st_size}
        on_event(f"{source.name}: {name}, {len(lines)} documents")
    for original in unfinished.glob("*.original"):
        original.unlink()
    for benchmark in (SUITE_DATA / source.name).glob("*.yaml"):
        if benchmark.name != _SOURCE:
            shutil.copyfile(benchmark, unfinished / benchmark.name)
    (unfinished / _TEXTS_DONE).write_text(json.dumps({"source": content, "staged": staged}, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return staged


def _lines(source: TextSource, file: TextFile, kept: Path) -> list[str]:
    uri = storage.join(source.base, file.path)
    content = kept.read_bytes() if kept.is_file() else _read(uri)
    if file.blob is not None and _blob(content) != file.blob:
        raise BadInput(
            expected=f"the content with Git's id {file.blob} at {uri}",
            found=f"content with {_blob(content)}",
            remedy="name a source that holds the same revision",
        )
    storage.write_bytes(str(kept), content)
    try:
        texts = json.loads(content)
        documents = [text if isinstance(text, str) else text["text"] for text in texts]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            expected=f"a JSON list of texts at {uri}",
            found=f"{type(error).__name__}: {error}",
            remedy="see what is there",
        ) from error
    # An empty text has no likelihood, and its benchmark no score.
    numbered = ({"id": number, "text": text} for number, text in enumerate(documents) if text.strip())
    return [json.dumps(document, ensure_ascii=False) + "\n" for document in numbered]


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _read(uri: str) -> bytes:
    if not uri.startswith(("http://", "https://")):
        try:
            return storage.read_bytes(uri, within="/")
        except FileNotFoundError:
            raise _missing(uri) from None
    attempt = 1
    while True:
        try:
            with urllib.request.urlopen(uri, timeout=_SECONDS) as answer:
                return answer.read()
        except OSError as error:  # an answer with an error's status, too
            status = error.code if isinstance(error, urllib.error.HTTPError) else None
            if status == 404:
                raise _missing(uri) from None
            if status not in _PASSING or attempt == _ATTEMPTS:
                raise StorageError(
                    expected=f"to read {uri}",
                    found=f"{type(error).__name__}: {error}",
                    remedy="see that this machine reaches it, or name a mirror; files that were read are kept",
                ) from error
            seconds = min(2.0**attempt, _UNTOLD_WAIT_SECONDS) if status is None else _UNTOLD_WAIT_SECONDS
            retry_after = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
            if retry_after.isdigit():
                seconds = min(float(retry_after), _LONGEST_WAIT_SECONDS)
        attempt += 1
        time.sleep(seconds)


def _missing(uri: str) -> BadInput:
    return BadInput(expected=f"a file at {uri}", found="nothing there", remedy="correct the source, or its revision")
