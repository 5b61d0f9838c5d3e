"""Fetches the data of HELM's run entries, and proves it offline. Executed in the HELM environment.

    python stage_helm.py fetch <job file>     writes the manifest that the job names
    python stage_helm.py prove <job file>     tries everything again without a network; writes the failures

The evaluating program tries each run whole with a single instance, with HELM's simple client, which only returns the
prompt's last words, in place of a model. So all data that scenarios and metrics fetch, from the hub or by address, is
where a worker expects it. Failures to score the client's output are ignored: only missing data count.

Data at an address has no revision. Its SHA-256 is recorded, and other content is refused from then on.
"""

# ruff: noqa: E402 - HELM is imported without the garbage collector
from __future__ import annotations

import gc
import hashlib
import json
import re
import shutil
import socket
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).parent))  # -I leaves it out
sys.path += [str(Path(__file__).parents[2] / "evaluators" / place) for place in ("helm/programs", "programs")]

gc.disable()  # collection would take a quarter of the time and find no garbage
import helm_asking
import helm_runs
import run_helm
from helm.benchmark.model_deployment_registry import ClientSpec, ModelDeployment, register_model_deployment
from helm.benchmark.model_metadata_registry import (
    FULL_FUNCTIONALITY_TEXT_MODEL_TAG,
    TEXT_MODEL_TAG,
    ModelMetadata,
    register_model_metadata,
)
from helm.common import general
from stage_hub import CannotBeHadError, Pinned, Staging, patiently, prove_each, shown, size_of, tell

gc.freeze()
gc.enable()

PARTS = ("helm", "scenarios", "datasets")
"""Parts of the manifest that this program writes; other parts are left unchanged."""
PLACEHOLDER = "stand-in"


class Downloads:
    """Replaces HELM's download function and pins the content: its SHA-256 by address."""

    def __init__(self, pinned: dict[str, str], *, refresh: bool) -> None:
        self._pinned, self._refresh = pinned, refresh
        self.used: dict[tuple[str, str], dict[str, Any]] = {}
        """Bytes and SHA-256 by address and path."""
        self._fetch = general.ensure_file_downloaded
        modules: list[Any] = list(sys.modules.values())
        for module in modules:  # modules of some scenarios have imported the function by name
            if getattr(module, "ensure_file_downloaded", None) is self._fetch:
                module.ensure_file_downloaded = self

    def __call__(self, source_url: str, target_path: str, *args: Any, **options: Any) -> None:
        """Fetches an address unless it was fetched before."""
        if (source_url, target_path) in self.used:
            return
        target = Path(target_path)
        if self._refresh:
            remove(target)
        patiently(lambda: self._fetch(source_url, target_path, *args, **options))
        digest, pinned = digest_of(target), self._pinned.get(source_url)
        if pinned not in (None, digest):
            remove(target)
            raise ValueError(f"{source_url} holds {digest}, and not {pinned} as pinned; it was not kept")
        size = target.stat().st_size if target.is_file() else size_of(target)
        self.used[source_url, target_path] = {"bytes": size, "sha256": digest}


def main(arguments: list[str]) -> None:
    """Fetches, or proves."""
    action, path = arguments
    job = json.loads(Path(path).read_text())
    run_helm.setup_default_logging()
    run_helm.put_downloads_off()
    run_helm.built_in()
    helm_asking.bound_retries()
    helm_asking.leave_prompts_out_of_the_log()
    register_placeholder()
    {"fetch": fetch, "prove": prove}[action](job)


def fetch(job: dict[str, Any]) -> None:
    """Fetches data that the manifest lacks; the manifest is written last."""
    staging = Staging(job, PARTS)
    staged, known = staging.staged, staging.known()
    if not job["refresh"]:
        known |= {
            url: download["sha256"]
            for scenario in staged["scenarios"].values()
            for url, download in scenario["addresses"].items()
        }
    pinned = Pinned({**known, **job["revisions"]})
    downloads = Downloads({**known, **job["revisions"]}, refresh=job["refresh"])

    def entries(key: str, run_entries: dict[str, Any]) -> tuple[dict[str, Any], str]:
        pinned.used = {}
        runs, scenarios = tried(key, run_entries, job)
        for path, revision in pinned.used.items():
            staged["datasets"].setdefault(path, {})["revision"] = revision
        for name in scenarios:
            folder = Path(job["scenarios_path"]) / name
            staged["scenarios"][name] = described(folder, staged["scenarios"].get(name), downloads)
        versions = {name: metadata.version(name) for name in ("crfm-helm", "datasets")}
        return {"runs": runs, "scenarios": scenarios, "datasets": dict(pinned.used), "versions": versions}, "staged"

    for key, run_entries in job["helm"].items():
        staging.attempt("helm", key, partial(entries, key, run_entries))
    staging.finish()


def prove(job: dict[str, Any]) -> None:
    """Tries everything as an offline worker does; writes the failures by name."""
    socket.socket.connect = general.shell = unreachable
    prove_each(job, ((key, partial(tried, key, run_entries, job)) for key, run_entries in job["helm"].items()))


def tried(key: str, run_entries: dict[str, Any], job: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Tries each run of some benchmarks with a single instance; returns the runs and their scenarios."""
    output = Path("trials", key).absolute()
    output.mkdir(parents=True, exist_ok=True)
    given = {**PLACEHOLDER_JOB, **run_entries, "output": str(output)}
    given |= {name: job[name] for name in ("benchmarks_path", "scenarios_path")}
    run_helm.keep_words(given)
    try:
        runs = run_helm.plan_runs(given)
    except run_helm.Refused as refused:
        raise CannotBeHadError(str(refused)) from refused
    harness = helm_runs.Harness(given, runs, local_path=str(output))
    scenarios = harness.scenarios
    for number, run in enumerate(runs, 1):
        name = name_of(run)
        tell(f"{number} of {len(runs)} {name}")
        before = len(scenarios)
        try:
            run_helm.with_words(harness, run)
        except Exception as error:  # scenarios and metrics of HELM raise any exception
            reason = helm_asking.missing_data(error, run)
            if len(scenarios) == before or reason:
                raise CannotBeHadError(f"{name}: {reason.found if reason else shown(error)}") from error
            tell(f"{name}: its data are staged; placeholder answers cannot be scored ({type(error).__name__})")
    return [name_of(run) for run in runs], sorted(set(scenarios))


def name_of(run: helm_asking.Run) -> str:
    """Returns a run's name without the model's."""
    return re.sub(f"[:,]model=assay_{PLACEHOLDER}", "", run.spec.name)


PLACEHOLDER_JOB: dict[str, Any] = {
    "apply_chat_template": False,
    "exit_on_error": False,
    "failed_control": "note",
    "limit": 1,
    "max_truncated": 1.0,
    "model": PLACEHOLDER,
    "num_threads": 1,
    "num_train_trials": 1,
    "prompt_logprobs": True,
    "results_folder": "helm",
    "run_specs": None,
    "site": False,
    "skip_completed_runs": False,
}
"""The evaluating program's job, without the values that differ between evaluations."""


def register_placeholder() -> None:
    """Registers HELM's simple client, which calls no model, as a model of ours."""
    name = f"assay/{PLACEHOLDER}"
    tags = [TEXT_MODEL_TAG, FULL_FUNCTIONALITY_TEXT_MODEL_TAG]
    register_model_metadata(ModelMetadata(name, "Assay", name, "Calls no model.", "open", None, tags))
    client = ClientSpec("helm.clients.simple_client.SimpleClient")
    register_model_deployment(
        ModelDeployment(name, client, tokenizer_name="simple/tokenizer1", max_sequence_length=1_000_000)
    )


def described(folder: Path, before: dict[str, Any] | None, downloads: Downloads) -> dict[str, Any]:
    """Returns the size of a scenario's folder, and its files that were downloaded by address."""
    addresses = dict((before or {}).get("addresses", {}))
    for (url, path), download in downloads.used.items():
        if Path(path).is_relative_to(folder):
            addresses[url] = {**download, "path": str(Path(path).relative_to(folder))}
    return {"bytes": size_of(folder), "addresses": addresses}


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file, or of the names and contents of a folder's files."""
    if path.is_file():
        return file_digest(path)
    whole = hashlib.sha256()
    for file in sorted(filter(Path.is_file, path.rglob("*"))):
        whole.update(f"{file.relative_to(path).as_posix()} {file_digest(file)}\n".encode())
    return whole.hexdigest()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Removes a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def unreachable(*_: Any, **__: Any) -> NoReturn:
    """Replaces all network access."""
    raise ConnectionError("no network while staged data are proved")


if __name__ == "__main__":
    main(sys.argv[1:])
