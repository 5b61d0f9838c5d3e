"""The record of a job: its state as published by its owner for all processes with a handle.

A ConfigMap with two keys: the owner writes `record`, requesters of a stop write `stop`. The heartbeat is a ConfigMap
too, which the pods mount, so that they can read it without rights in the cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from resources.backends.kubernetes.manifests import config_map_manifest
from resources.backends.kubernetes.names import (
    MANAGED_BY,
    NAME_ANNOTATION,
    PART_LABEL,
    heartbeat_name,
    labels,
    selector,
)
from resources.backends.programs.run_in_pod import ORPHANED
from resources.jobs.jobs import JobDetails, JobStatus

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

_KEPT_JOBS = 200
_KEPT_HEARTBEAT_SECONDS = 24 * 3600
BEATS_PER_LEASE = 10
_SILENT_LEASES = 2  # a heartbeat older than this many leases, by the local clock, counts as ended


@dataclass(frozen=True, kw_only=True)
class Record(JobDetails):
    """Complete state of a job."""

    status: JobStatus = JobStatus.PENDING
    replicas: int = 1
    owner: str
    """Name of the heartbeat of the job's owner."""
    vms: int
    """Pods per replica."""
    grace_seconds: float
    lease_seconds: float
    outlives_parent: bool
    counted: int = 0
    """The last attempt that `failures` and `preemptions` include."""

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

    def details(self) -> JobDetails:
        return JobDetails(**{field.name: getattr(self, field.name) for field in fields(JobDetails)})


def create_record(cluster: Cluster, record: Record) -> None:
    """Creates the record of a job."""
    manifest = config_map_manifest(record.job_id, labels(record.job_id, "record"), {"record": _text(record)})
    manifest["metadata"]["annotations"] = {NAME_ANNOTATION: record.name}
    cluster.create("configmaps", manifest)


def write_record(cluster: Cluster, record: Record) -> None:
    """Replaces the record; only for the owner, or for a process that takes over from an owner that is gone."""
    cluster.patch("configmaps", record.job_id, {"data": {"record": _text(record)}})


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
    values = json.loads(config_map["data"]["record"])
    return Record(**{**values, "status": JobStatus(values["status"])})


def beat(cluster: Cluster, owner: str) -> None:
    """Writes the heartbeat of an owner."""
    now = {"beat": f"{time.time():.6f}"}
    if cluster.patch("configmaps", heartbeat_name(owner), {"data": now}) is None:
        tags = {**MANAGED_BY, PART_LABEL: "heartbeat"}
        cluster.create("configmaps", config_map_manifest(heartbeat_name(owner), tags, now))


def is_silent(heartbeat: Mapping[str, Any] | None, *, lease_seconds: float) -> bool:
    """Returns True if an owner is gone, by the age of its heartbeat on the local clock."""
    if heartbeat is None:
        return True
    return time.time() - float(heartbeat["data"]["beat"]) > _SILENT_LEASES * lease_seconds


def as_seen(record: Record, heartbeat: Mapping[str, Any] | None) -> Record:
    """Returns the record, as stopped if its owner has died: its pods have then ended, or are about to."""
    if record.finished or record.outlives_parent or not is_silent(heartbeat, lease_seconds=record.lease_seconds):
        return record
    return replace(record, status=JobStatus.STOPPED, reason=ORPHANED)


def all_records(cluster: Cluster) -> list[Record]:
    """Returns the records of all processes that use the namespace, corrected by `as_seen`, newest first."""
    beats = _heartbeats(cluster)
    records = [record_in(configmap) for configmap in cluster.list("configmaps", selector(part="record"))]
    seen = [as_seen(record, beats.get(heartbeat_name(record.owner))) for record in records]
    return sorted(seen, key=lambda record: record.submitted_at or 0.0, reverse=True)


def prune(cluster: Cluster) -> None:
    """Removes the oldest records of ended jobs, and old heartbeats without a record."""
    records = all_records(cluster)
    for record in records[_KEPT_JOBS:]:
        if record.finished:
            for configmap in cluster.list("configmaps", selector(job=record.job_id)):
                cluster.delete("configmaps", configmap["metadata"]["name"])
    owners = {heartbeat_name(record.owner) for record in records}
    for name, heartbeat in _heartbeats(cluster).items():
        if name not in owners and is_silent(heartbeat, lease_seconds=_KEPT_HEARTBEAT_SECONDS):
            cluster.delete("configmaps", name)


def _heartbeats(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {
        configmap["metadata"]["name"]: configmap for configmap in cluster.list("configmaps", selector(part="heartbeat"))
    }


def _text(record: Record) -> str:
    return json.dumps(asdict(record))
