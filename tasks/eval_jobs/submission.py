"""Evaluation jobs in a cluster: submitted from manifests, listed, and their logs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from resources.backends.kubernetes.logs import LogLine, ReadLog, followed, pod_lines, pods_of
from resources.backends.kubernetes.names import PART_LABEL
from resources.errors import AssayError, BackendUnavailable, BadInput, not_there
from resources.storage import storage
from resources.storage.yaml_text import load_yaml_documents
from tasks.eval_jobs.manifests import COMMIT, EVAL_JOB, EXPERIMENT, GIT_STATE, configs_name
from tasks.eval_jobs.reading import CLEAN, git_state_of, read_job

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster, Resource

_RESOURCES: dict[str, Resource] = {"Job": "jobs", "ConfigMap": "configmaps"}
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


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


def job_documents(
    file: Path | None, job_spec: Path | None, *, helm_file: Path | None, allow_dirty: bool
) -> list[dict[str, Any]]:
    """Returns the manifests to submit: rendered now, or unchanged from a file.

    With `allow_dirty`, the git state is written into them.
    """
    read = read_job(file, helm_file=helm_file) if file is not None else None
    if job_spec is None:
        if read is None:
            raise BadInput(expected="FILE or --job-spec", found="neither", remedy="name the job's file")
        state = read.git_state()
        state.require_clean(allow_dirty=allow_dirty)
        return read.manifests(state)
    documents = _read_manifests(str(job_spec))
    files = next(document for document in documents if document["kind"] == "ConfigMap").get("data")
    if read is not None and files != read.texts:
        raise BadInput(
            expected=f"{job_spec} with {file} as it is now",
            found="another version of it",
            remedy=f"render it again: assay eval-job submit {file} --output {job_spec}",
        )
    state = git_state_of([job_spec])
    state.require_clean(allow_dirty=allow_dirty)
    return documents if state.words == CLEAN else _with_git_state(documents, state.words)


def _read_manifests(uri: str) -> list[dict[str, Any]]:
    try:
        documents = load_yaml_documents(storage.read_bytes(uri))
    except FileNotFoundError:
        raise not_there("a file of manifests", uri) from None
    except yaml.YAMLError as error:
        raise BadInput(expected=f"YAML in {uri}", found=str(error), remedy="render it again") from error
    kinds = [document.get("kind") if isinstance(document, dict) else type(document).__name__ for document in documents]
    if sorted(map(str, kinds)) != sorted(_RESOURCES):
        raise BadInput(
            expected=f"a Job and a ConfigMap in {uri}",
            found=", ".join(map(str, kinds)) or "nothing",
            remedy="render it again: assay eval-job submit FILE --output job.yaml",
        )
    return documents


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
    names = [name, *(f"{name}-{number}" for number in range(2, len(used) + 2))]
    new = next(candidate for candidate in names if candidate not in used)
    made: list[Mapping[str, Any]] = []
    try:
        for document in sorted(_renamed(documents, name, new), key=lambda document: document["kind"]):
            made.append(cluster.create(_RESOURCES[document["kind"]], document))
    except AssayError:
        for document in made:
            cluster.delete(_RESOURCES[document["kind"]], document["metadata"]["name"])
        raise
    return new


def _renamed(value: Any, name: str, new: str) -> Any:
    match value:
        case dict():  # the job's files are unchanged
            return {key: part if key == "data" else _renamed(part, name, new) for key, part in value.items()}
        case list():
            return [_renamed(part, name, new) for part in value]
        case str() if value in (name, configs_name(name)):
            return new + value.removeprefix(name)
        case _:
            return value


def submitted_jobs(cluster: Cluster) -> list[SubmittedJob]:
    """Returns the evaluation jobs of a namespace, newest first.

    A job's ConfigMap outlives the Job, which prevents reuse of the name.
    """
    selector = f"{PART_LABEL}={EVAL_JOB}"
    jobs = {job["metadata"]["name"]: job for job in cluster.list("jobs", selector)}
    submitted = [_submitted(job["metadata"], *_status(job)) for job in jobs.values()]
    for config_map in cluster.list("configmaps", selector):
        name = config_map["metadata"]["name"].removesuffix(configs_name(""))
        if name not in jobs:
            metadata = {**config_map["metadata"], "name": name}
            submitted.append(_submitted(metadata, "ended", "its Job was removed; Cloud Logging has its log"))
    return sorted(submitted, key=lambda job: (job.submitted_at, job.name), reverse=True)


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


def log_lines(
    cluster: Cluster | None, name: str, *, since: str | None, follow: bool, note: Callable[[str], None], kept: ReadLog
) -> Iterator[LogLine]:
    """Yields the log lines of a job, from its pods while they exist; `kept` has the logs of deleted pods."""
    began = moment(since, now=datetime.now(UTC)) if since is not None else None
    live = cluster is not None and _may_have_pods(cluster, name, note=note)
    note(f"the log of {name} from {'its pods' if live else 'Cloud Logging: no pods of it are known'}")
    read: ReadLog = partial(pod_lines, cluster, name) if cluster is not None and live else kept
    if follow and cluster is not None and live:
        yield from followed(read, since=began, has_ended=lambda: _has_ended(cluster, name))
        return
    line = None
    for line in read(began):
        yield line
    if line is None and not live:
        raise BadInput(
            expected=f"lines of a job {name}" + (f" of the last {since}" if since else ""),
            found="none, neither in the cluster nor in Cloud Logging",
            remedy="check the name with assay eval-job list, the namespace, and --project; or look further back",
        )


def write_lines(lines: Iterable[LogLine], output: Path) -> int:
    """Writes lines as a JSON list and returns their number."""
    values = [asdict(line) for line in lines]
    output.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    return len(values)


def moment(since: str, *, now: datetime) -> datetime:
    """Returns the time `30m`, `12h`, `3d` or `2w` before `now`."""
    match = re.fullmatch(r"(\d{1,5})([mhdw])", since.strip())
    if match is None:
        raise BadInput(expected="--since 30m, 12h, 3d or 2w", found=since, remedy="write it in this way")
    return now - timedelta(**{_UNITS[match[2]]: int(match[1])})


def _may_have_pods(cluster: Cluster, name: str, *, note: Callable[[str], None]) -> bool:
    try:
        # A new job has no pod yet; an ended job may have lost its pods.
        return bool(pods_of(cluster, name)) or not _has_ended(cluster, name)
    except BackendUnavailable as error:
        note(f"the cluster does not answer: {error.found}")
        return False


def _has_ended(cluster: Cluster, name: str) -> bool:
    return all(job.ended for job in submitted_jobs(cluster) if job.name == name)
