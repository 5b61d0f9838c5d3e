"""Evaluation jobs in a cluster: submitted from manifests, and listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from resources.backends.kubernetes.names import PART_LABEL
from resources.errors import AssayError, BadInput
from resources.storage import storage
from resources.storage.yaml_text import load_yaml_documents
from tasks.eval_jobs.git_state import CLEAN, git_state_of, require_clean
from tasks.eval_jobs.manifests import COMMIT, EVAL_JOB, EXPERIMENT, files_of, renamed
from tasks.eval_jobs.reading import EvalJob, read_job
from tasks.eval_jobs.tracking import GIT_STATE

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster, Resource

_RESOURCES: dict[str, Resource] = {"Job": "jobs", "ConfigMap": "configmaps"}


@dataclass(frozen=True)
class SubmittedJob:
    """An evaluation job as listed in the cluster."""

    name: str
    status: str
    """pending, running, succeeded, failed, or ended if only its ConfigMap is left."""
    submitted_at: str
    experiment: str
    commit: str
    reason: str | None = None

    @property
    def ended(self) -> bool:
        return self.status in ("succeeded", "failed", "ended")

    def as_values(self) -> dict[str, Any]:
        return asdict(self)


def read_manifests(uri: str) -> list[dict[str, Any]]:
    """Returns the manifests in a file that `render` wrote."""
    try:
        documents = load_yaml_documents(storage.read_bytes(uri))
    except FileNotFoundError:
        raise BadInput(expected="a file of manifests", found=f"{uri} is not there", remedy="check the path") from None
    except yaml.YAMLError as error:
        raise BadInput(expected=f"YAML in {uri}", found=str(error), remedy="render it again") from error
    kinds = [document.get("kind") if isinstance(document, dict) else type(document).__name__ for document in documents]
    if sorted(map(str, kinds)) != sorted(_RESOURCES):
        raise BadInput(
            expected=f"a Job and a ConfigMap in {uri}",
            found=", ".join(map(str, kinds)) or "nothing",
            remedy="render it again: assay eval-job render FILE --output job.yaml",
        )
    return documents


def job_documents(
    file: Path | None, job_spec: Path | None, *, helm_file: Path | None, allow_dirty: bool
) -> list[dict[str, Any]]:
    """Returns the manifests to submit: rendered now, or unchanged from a file.

    With `allow_dirty`, the git state is written into them.
    """
    if job_spec is None:
        if file is None:
            raise BadInput(expected="FILE or --job-spec", found="neither", remedy="name the job's file")
        read = read_job(file, helm_file=helm_file)
        state = read.git_state()
        require_clean(state, allow_dirty=allow_dirty)
        return load_yaml_documents(read.manifests(state))
    documents = read_manifests(str(job_spec))
    if file is not None:
        _require_same_files(read_job(file, helm_file=helm_file), documents, job_spec=job_spec)
    state = git_state_of([job_spec])
    require_clean(state, allow_dirty=allow_dirty)
    return documents if state.words == CLEAN else _with_git_state(documents, state.words)


def _require_same_files(read: EvalJob, documents: list[dict[str, Any]], *, job_spec: Path) -> None:
    held = next(document for document in documents if document["kind"] == "ConfigMap").get("data")
    if held != files_of(read.texts):
        raise BadInput(
            expected=f"{job_spec} with {read.file} as it is now",
            found="another version of it",
            remedy=f"render it again: assay eval-job render {read.file} --output {job_spec}",
        )


def _with_git_state(value: Any, words: str) -> Any:
    if isinstance(value, list):
        return [_with_git_state(part, words) for part in value]
    if not isinstance(value, dict):
        return value
    if value.get("name") == GIT_STATE:
        return {**value, "value": words}
    return {key: _with_git_state(part, words) for key, part in value.items()}


def names_in(documents: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Returns the name of a job's manifests and their namespace."""
    metadata = next(document for document in documents if document["kind"] == "Job")["metadata"]
    return metadata["name"], metadata.get("namespace", "default")


def submit_manifests(cluster: Cluster, documents: list[dict[str, Any]], *, again: bool = False) -> str:
    """Creates the objects of manifests and returns the job's name; `again` appends a number to a name in use."""
    name, _ = names_in(documents)
    used = {job.name for job in submitted_jobs(cluster)}
    if name in used and not again:
        raise BadInput(
            expected="a job that was not submitted before",
            found=f"{name} is in {cluster.namespace} already",
            remedy=f"see assay eval-job logs {name}; or submit it once more under another name, with --again",
        )
    new = next(candidate for number in range(1, len(used) + 2) if (candidate := _numbered(name, number)) not in used)
    made: list[Mapping[str, Any]] = []
    try:
        for document in sorted(renamed(documents, name, new), key=lambda document: document["kind"]):
            made.append(cluster.create(_RESOURCES[document["kind"]], document))
    except AssayError:
        for document in made:
            cluster.delete(_RESOURCES[document["kind"]], document["metadata"]["name"])
        raise
    return new


def submitted_jobs(cluster: Cluster) -> list[SubmittedJob]:
    """Returns the evaluation jobs of a namespace, newest first.

    A job's ConfigMap outlives the Job, which prevents reuse of the name.
    """
    selector = f"{PART_LABEL}={EVAL_JOB}"
    jobs = {job["metadata"]["name"]: job for job in cluster.list("jobs", selector)}
    submitted = [_submitted(job["metadata"], *_status(job)) for job in jobs.values()]
    for config_map in cluster.list("configmaps", selector):
        name = config_map["metadata"]["name"].removesuffix("-configs")
        if name not in jobs:
            metadata = {**config_map["metadata"], "name": name}
            submitted.append(_submitted(metadata, "ended", "its Job was removed; Cloud Logging has its log"))
    return sorted(submitted, key=lambda job: (job.submitted_at, job.name), reverse=True)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _submitted(metadata: Mapping[str, Any], status: str, reason: str | None) -> SubmittedJob:
    notes = metadata.get("annotations", {})
    created = metadata.get("creationTimestamp", "")
    return SubmittedJob(metadata["name"], status, created, notes.get(EXPERIMENT, ""), notes.get(COMMIT, ""), reason)


def _status(job: Mapping[str, Any]) -> tuple[str, str | None]:
    status = job.get("status", {})
    for condition in status.get("conditions") or ():
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            failed = condition["type"] == "Failed"
            words = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
            return ("failed", words or None) if failed else ("succeeded", None)
    failures = status.get("failed") or 0
    reason = f"{failures} of its pods failed" if failures else None
    return ("running" if status.get("active") else "pending"), reason
