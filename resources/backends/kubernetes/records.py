"""The record of a job: what its owner has found out so far, for every process that holds a handle.

A ConfigMap with two keys and one writer each: the owner writes `record`, whoever wants the job to end writes `stop`.
The heartbeat is a ConfigMap as well, which the pods have mounted, so that they see it without any right in the cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
_SILENT_LEASES = 2  # a heartbeat that is older than this many leases, by our own clock, will not come again


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that is known of a job."""

    job_id: str
    name: str
    owner: str
    """Names the heartbeat of whoever looks after the job."""
    submitted_at: float
    replicas: int
    vms: int
    """Pods per replica."""
    grace_seconds: float
    lease_seconds: float
    outlives_parent: bool
    returns: bool | None = None
    """True if it calls a callable."""
    status: str = JobStatus.PENDING
    reason: str | None = None
    attempts: int = 0
    counted: int = 0
    """The last attempt whose ending is in the counts below."""
    failures: int = 0
    preemptions: int = 0

    @property
    def finished(self) -> bool:
        """Returns True if the job has ended, and nothing of it is left."""
        return JobStatus(self.status).finished

    @property
    def kind(self) -> Literal["jobs", "jobsets"]:
        """Kind of each attempt: several slices of several VMs each are a JobSet, which keeps them apart."""
        return "jobsets" if self.replicas > 1 and self.vms > 1 else "jobs"

    @property
    def pods(self) -> int:
        """Pods of each attempt."""
        return self.replicas * self.vms

    def details(self) -> JobDetails:
        """Returns the record in the words of every backend."""
        return JobDetails(
            job_id=self.job_id,
            name=self.name,
            status=JobStatus(self.status),
            reason=self.reason,
            attempts=self.attempts,
            failures=self.failures,
            preemptions=self.preemptions,
            submitted_at=self.submitted_at,
            replicas=self.replicas,
            returns=self.returns,
        )


def create_record(cluster: Cluster, record: Record) -> None:
    """Writes the first record of a job."""
    manifest = config_map_manifest(record.job_id, labels(record.job_id, "record"), {"record": _text(record)})
    manifest["metadata"]["annotations"] = {NAME_ANNOTATION: record.name}
    cluster.create("configmaps", manifest)


def write_record(cluster: Cluster, record: Record) -> None:
    """Replaces the record; only the owner does, or who takes over from an owner that is gone."""
    cluster.patch("configmaps", record.job_id, {"data": {"record": _text(record)}})


def request_stop(cluster: Cluster, job_id: str) -> None:
    """Asks the owner, whoever it is, to end the job."""
    cluster.patch("configmaps", job_id, {"data": {"stop": "terminated"}})


def read_record(cluster: Cluster, job_id: str) -> tuple[Record, bool] | None:
    """The record and whether the job is to end; None if there is no such job."""
    found = cluster.get("configmaps", job_id)
    if found is None or "record" not in found.get("data", {}):
        return None
    return record_in(found), "stop" in found["data"]


def record_in(config_map: Mapping[str, Any]) -> Record:
    """The record that a ConfigMap holds."""
    return Record(**json.loads(config_map["data"]["record"]))


def create_heartbeat(cluster: Cluster, owner: str) -> None:
    """The first beat of an owner."""
    tags = {**MANAGED_BY, PART_LABEL: "heartbeat"}
    cluster.create("configmaps", config_map_manifest(heartbeat_name(owner), tags, _beat()))


def beat(cluster: Cluster, owner: str) -> None:
    """Another beat."""
    cluster.patch("configmaps", heartbeat_name(owner), {"data": _beat()})


def is_silent(heartbeat: Mapping[str, Any] | None, *, lease_seconds: float) -> bool:
    """Returns True if an owner is gone, as far as the ConfigMap of its heartbeat tells by our clock."""
    if heartbeat is None:
        return True
    return time.time() - float(heartbeat["data"]["beat"]) > _SILENT_LEASES * lease_seconds


def as_seen(record: Record, heartbeat: Mapping[str, Any] | None) -> Record:
    """The record, corrected where its owner died before it could: then its pods have ended, or are about to."""
    if record.finished or record.outlives_parent or not is_silent(heartbeat, lease_seconds=record.lease_seconds):
        return record
    return Record(**{**asdict(record), "status": JobStatus.STOPPED, "reason": ORPHANED})


def all_records(cluster: Cluster) -> list[Record]:
    """The records of every process that uses the namespace, as they are to be seen, the newest first."""
    beats = _heartbeats(cluster)
    records = [record_in(found) for found in cluster.list("configmaps", selector(part="record"))]
    seen = [as_seen(record, beats.get(heartbeat_name(record.owner))) for record in records]
    return sorted(seen, key=lambda record: record.submitted_at, reverse=True)


def prune(cluster: Cluster) -> None:
    """Removes the oldest records of jobs that have ended, and heartbeats nobody gives any more."""
    records = all_records(cluster)
    for record in records[_KEPT_JOBS:]:
        if record.finished:
            for found in cluster.list("configmaps", selector(job=record.job_id)):
                cluster.delete("configmaps", found["metadata"]["name"])
    owners = {heartbeat_name(record.owner) for record in records}
    for name, found in _heartbeats(cluster).items():
        if name not in owners and is_silent(found, lease_seconds=_KEPT_HEARTBEAT_SECONDS):
            cluster.delete("configmaps", name)


def _heartbeats(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in cluster.list("configmaps", selector(part="heartbeat"))}


def _beat() -> dict[str, str]:
    return {"beat": f"{time.time():.6f}"}


def _text(record: Record) -> str:
    return json.dumps(asdict(record))
