"""The record of a job: its state as published by its owner for all processes with a handle.

A ConfigMap with three keys: the owner writes `record` and, while it lives, `beat`; requesters of a stop write `stop`.
The pods mount `beat` alone, so that they can read it without rights in the cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from resources.backends.kubernetes.manifests import HEARTBEAT, config_map_manifest
from resources.backends.kubernetes.names import NAME_ANNOTATION, labels, selector
from resources.backends.programs.run_in_pod import ORPHANED
from resources.jobs.jobs import JobDetails, JobStatus

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

_KEPT_JOBS = 200
_SILENT_LEASES = 2  # a heartbeat older than this many leases, by the local clock, counts as ended


@dataclass(frozen=True, kw_only=True)
class Record(JobDetails):
    """Complete state of a job."""

    status: JobStatus = JobStatus.PENDING
    replicas: int = 1
    vms: int
    """Pods per replica."""
    grace_seconds: float
    lease_seconds: float
    outlives_parent: bool
    counted: int = 0
    """The last attempt that `failures` and `preemptions` include."""
    beaten_at: float = 0.0
    """Unix time of the owner's last heartbeat when the record was read."""

    @property
    def finished(self) -> bool:
        """Returns True if the job has ended and no pod of it is left."""
        return self.status.finished

    @property
    def kind(self) -> Literal["jobs", "jobsets"]:
        """Returns the kind of each attempt: a JobSet for several multi-VM slices, which it keeps apart, else a Job."""
        return "jobsets" if self.replicas > 1 and self.vms > 1 else "jobs"

    @property
    def pods(self) -> int:
        return self.replicas * self.vms

    @property
    def is_silent(self) -> bool:
        """Returns True if its owner is gone, by the age of the heartbeat on the local clock."""
        return time.time() - self.beaten_at > _SILENT_LEASES * self.lease_seconds

    def details(self) -> JobDetails:
        return JobDetails(**{field.name: getattr(self, field.name) for field in fields(JobDetails)})


def create_record(cluster: Cluster, record: Record) -> None:
    """Creates the record of a job, with a first heartbeat."""
    content = {"record": _text(record), HEARTBEAT: str(time.time())}
    manifest = config_map_manifest(record.job_id, labels(record.job_id, "record"), content)
    manifest["metadata"]["annotations"] = {NAME_ANNOTATION: record.name}
    cluster.create("configmaps", manifest)


def write_record(cluster: Cluster, record: Record) -> None:
    """Replaces the record; only for the owner, or for a process that takes over from an owner that is gone."""
    cluster.patch("configmaps", record.job_id, {"data": {"record": _text(record)}})


def beat(cluster: Cluster, job_id: str) -> None:
    """Writes the heartbeat of a job's owner."""
    cluster.patch("configmaps", job_id, {"data": {HEARTBEAT: str(time.time())}})


def request_stop(cluster: Cluster, job_id: str) -> None:
    """Requests the end of a job from its owner."""
    cluster.patch("configmaps", job_id, {"data": {"stop": "terminated"}})


def read_record(cluster: Cluster, job_id: str) -> tuple[Record, bool] | None:
    """Returns the record, and True if a stop was requested; None if there is no such job."""
    configmap = cluster.get("configmaps", job_id)
    if configmap is None or "record" not in configmap.get("data", {}):
        return None
    return record_in(configmap), "stop" in configmap["data"]


def record_in(config_map: Mapping[str, Any]) -> Record:
    """Returns the record that a ConfigMap holds."""
    data = config_map["data"]
    values = json.loads(data["record"])
    known = {field.name: values[field.name] for field in fields(Record) if field.name in values}
    return Record(**{**known, "status": JobStatus(values["status"]), "beaten_at": float(data.get(HEARTBEAT, 0.0))})


def as_seen(record: Record) -> Record:
    """Returns the record, as stopped if its owner has died: its pods have then ended, or are about to."""
    if record.finished or record.outlives_parent or not record.is_silent:
        return record
    return replace(record, status=JobStatus.STOPPED, reason=ORPHANED)


def all_records(cluster: Cluster) -> list[Record]:
    """Returns the records of all processes that use the namespace, corrected by `as_seen`, newest first."""
    seen = [as_seen(record_in(configmap)) for configmap in cluster.list("configmaps", selector(part="record"))]
    return sorted(seen, key=lambda record: record.submitted_at or 0.0, reverse=True)


def prune(cluster: Cluster) -> None:
    """Removes the oldest records of ended jobs."""
    for record in all_records(cluster)[_KEPT_JOBS:]:
        if record.finished:
            for configmap in cluster.list("configmaps", selector(job=record.job_id)):
                cluster.delete("configmaps", configmap["metadata"]["name"])


def _text(record: Record) -> str:
    return json.dumps(asdict(record))
