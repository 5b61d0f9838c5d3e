"""Manifests of a job's objects in a cluster, as pure functions of the request.

An attempt is an Indexed `batch/v1` Job, or for several multi-VM slices a JobSet of such Jobs. Neither restarts pods by
itself (`backoffLimitPerIndex: 0`, `maxRestarts: 0`), so that `owner.py` can classify and count each ending.
Variables, callable and programs travel in a Secret that the Job or JobSet owns. The record of the job, with its owner's
heartbeat, is a ConfigMap without secrets.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resources.backends.kubernetes.devices import Placement, placement
from resources.backends.kubernetes.names import (
    JOBSET_LABEL,
    NAME_ANNOTATION,
    QUEUE_LABEL,
    SLICE,
    SLICE_LABEL,
    attempt_name,
    keeper_pod_name,
    labels,
)
from resources.backends.processes import device_variables
from resources.errors import BadInput, UnsatisfiableResources
from resources.jobs.jobs import Call, JobRequest
from resources.jobs.results import pickled

HEARTBEAT = "beat"
"""Key of the heartbeat in the ConfigMap of a job's record, the only key that the pods see."""
MAIN, ANNOUNCER = "replica", "announcer"
"""The two containers of a pod; the log of the second holds only announcements and the result."""
LARGEST_SECRET_BYTES = 1_000_000
"""Below the limit of etcd and the API server for an object, which is 1 MiB with names and labels."""
KEPT_SECONDS = 24 * 3600
"""Time for which a finished Job is kept, with its pods and their logs."""
_PROGRAMS = Path(__file__).parents[1] / "programs"
_JOB, _RUN, _HEARTBEAT = "/assay/job", "/assay/run", "/assay/heartbeat"
_MOUNTS: list[dict[str, Any]] = [
    {"name": "job", "mountPath": _JOB, "readOnly": True},
    {"name": "run", "mountPath": _RUN},
]
_HEARTBEAT_FILE = {"key": HEARTBEAT, "path": HEARTBEAT}
_MESSAGE = "/dev/termination-log"
_UNPRIVILEGED: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_NOT_ROOT: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
NO_FAILURE_OF_THE_POD: dict[str, Any] = {
    "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
}
"""`podFailurePolicy` of Jobs that Kubernetes restarts itself: disruptions by nodes do not count."""
_A_NODE_POOL_FOR_EACH_SLICE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
_ANNOUNCER_LIMITS = {"cpu": "50m", "memory": "64Mi", "ephemeral-storage": "64Mi"}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Settings of the process that controls a job, for the job's pods and for the start of its attempts."""

    jobs_url: str
    """Value of `ASSAY_JOBS` in the job."""
    image: str | None
    """Default container image of jobs."""
    queue: str | None = None
    """Kueue queue for the attempts; with a queue, only Kueue starts them."""
    grace_seconds: float = 10.0
    """Time between SIGTERM and SIGKILL."""
    lease_seconds: float = 300.0
    """Time after which pods end without a heartbeat."""
    stuck_seconds: float = 300.0
    """An image that cannot be pulled or a container that cannot be created fails the attempt after this time."""
    gang_seconds: float = 600.0
    """If some pods run while others still wait, all are ended after this time, which counts as a preemption."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job as its owner needs it for attempts; a keeper pod reads it from a pickle."""

    job_id: str
    request: JobRequest
    """Without its entrypoint, which is in the files."""
    image: str
    files: Mapping[str, bytes]
    """Content of the job folder of a pod."""
    owner: Owner

    @property
    def where(self) -> Placement:
        return placement(self.request.resources)

    @property
    def python(self) -> str:
        return str(self.request.environment.python or "python3")


def image_of(request: JobRequest, *, default: str | None) -> str:
    """Returns the container image of a job."""
    environment = request.environment
    if environment.pip_packages or environment.extras:
        raise UnsatisfiableResources(
            expected="an image that holds all packages of the job; Kubernetes builds no environments",
            found=f"pip_packages={list(environment.pip_packages)}, extras={list(environment.extras)}",
            remedy="Build them into the image, or submit to a backend that builds environments.",
        )
    image = environment.docker_image or request.resources.image or default
    if not image:
        raise UnsatisfiableResources(
            expected="a container image that holds the job's code, with a python3",
            found="neither environment.docker_image nor resources.image nor ASSAY_JOB_IMAGE is set",
            remedy="Build an image from the workspace, push it, and name it in resources.image.",
        )
    return image


def secret_content(request: JobRequest, *, job_id: str, vms: int, owner: Owner) -> dict[str, bytes]:
    """Returns the files in the job folder of a pod."""
    entrypoint, environment = request.entrypoint, request.environment
    own = {**device_variables(request.resources.device), **environment.env_vars}
    variables = {"ASSAY_JOB_LEASE_SECONDS": f"{owner.lease_seconds:g}", **own}
    if owner.image:  # default image of jobs submitted inside this job
        variables.setdefault("ASSAY_JOB_IMAGE", owner.image)
    specification = {
        "argv": None if isinstance(entrypoint, Call) else [entrypoint.command, *entrypoint.args],
        "env_vars": variables,
        "jobs": owner.jobs_url,
        "job_id": job_id,
        "replicas": request.replica_count,
        "vms": vms,
        "path_first": str(environment.python.parent) if environment.python else "",
        "lease_seconds": 0 if request.outlives_parent else owner.lease_seconds,
        "grace_seconds": owner.grace_seconds,
    }
    files = {"pod.json": json.dumps(specification).encode()}
    files["run_in_pod.py"] = (_PROGRAMS / "run_in_pod.py").read_bytes()
    if isinstance(entrypoint, Call):
        files["call.pickle"] = pickled(entrypoint, job_id=job_id)
        files["run_call.py"] = (_PROGRAMS / "run_call.py").read_bytes()
    return bounded(files)


def bounded(files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns the files unchanged if they fit into a Secret; otherwise raises `BadInput`."""
    if (size := sum(map(len, files.values()))) > LARGEST_SECRET_BYTES:
        largest = max(files, key=lambda name: len(files[name]))
        raise BadInput(
            expected=f"callable, arguments and variables of {LARGEST_SECRET_BYTES:,} bytes at most, to fit a Secret",
            found=f"{size:,} bytes, of which {largest} has {len(files[largest]):,}",
            remedy="Put large values into a file or an object store, and pass their path.",
        )
    return files


def attempt_manifest(job: Submission, attempt: int) -> dict[str, Any]:
    """Returns the Job or JobSet of an attempt, suspended until its Secret, which it owns, is created."""
    request, owner, where = job.request, job.owner, job.where
    job_id, image = job.job_id, job.image
    program = [job.python, "-I", "-S", f"{_JOB}/run_in_pod.py"]
    name = attempt_name(job_id, attempt)
    tags = labels(job_id, "attempt", attempt=attempt)
    annotations = {NAME_ANNOTATION: request.name}
    queued = {QUEUE_LABEL: owner.queue} if owner.queue else {}
    slices = request.replica_count if where.vms > 1 else 1
    stays = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}  # else the autoscaler may move it
    container: dict[str, Any] = {
        "name": MAIN,
        "image": image,
        "command": [*program, "run", _JOB, _RUN, _HEARTBEAT, _MESSAGE],
        "resources": {"requests": where.limits, "limits": where.limits},
        "securityContext": _UNPRIVILEGED,
        "terminationMessagePath": _MESSAGE,
        "volumeMounts": [*_MOUNTS, {"name": "heartbeat", "mountPath": _HEARTBEAT, "readOnly": True}],
    }
    if request.working_directory is not None:
        container["workingDir"] = str(request.working_directory)
    if slices > 1:  # the pod's own labels hold its slice and JobSet
        container["env"] = [
            {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
            for variable, label in (("ASSAY_JOBSET", JOBSET_LABEL), ("ASSAY_SLICE_INDEX", SLICE_LABEL))
        ]
    announcer = {
        "name": ANNOUNCER,
        "image": image,
        "command": [*program, "announce", _RUN],
        "securityContext": _UNPRIVILEGED,
        "restartPolicy": "Always",  # makes it a sidecar: it starts first, and does not delay the pod's end
        "resources": {"requests": _ANNOUNCER_LIMITS, "limits": _ANNOUNCER_LIMITS},
        "volumeMounts": _MOUNTS,  # it deletes a result after printing it
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": name,
        "enableServiceLinks": False,
        # A user's program may submit jobs and so gets a token; Assay's own programs in a cluster submit none.
        "automountServiceAccountToken": request.environment.inherited is None,
        "securityContext": _NOT_ROOT,
        "terminationGracePeriodSeconds": max(1, round(owner.grace_seconds)),
        "nodeSelector": where.node_selector,
        "affinity": where.affinity,
        "tolerations": where.tolerations,
        "initContainers": [announcer],
        "containers": [container],
        "volumes": [
            {"name": "job", "secret": {"secretName": name, "defaultMode": 0o444}},
            {"name": "run", "emptyDir": {}},
            # Optional: a pod that starts after the owner's end must not hang; the lease ends it.
            {"name": "heartbeat", "configMap": {"name": job_id, "items": [_HEARTBEAT_FILE], "optional": True}},
        ],
    }
    pods = where.vms if slices > 1 else request.replica_count * where.vms
    indexed = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimitPerIndex": 0,
        "template": {"metadata": {"labels": tags, "annotations": {**annotations, **stays}}, "spec": pod},
    }
    rest: dict[str, Any] = {"suspend": True, "ttlSecondsAfterFinished": KEPT_SECONDS}
    metadata = {"name": name, "labels": {**tags, **queued}, "annotations": annotations}
    if slices == 1:
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {**indexed, **rest}}
    template = {"metadata": {"labels": tags, "annotations": annotations}, "spec": indexed}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {**metadata, "annotations": {**annotations, **_A_NODE_POOL_FOR_EACH_SLICE}},
        "spec": {
            "replicatedJobs": [{"name": SLICE, "replicas": slices, "template": template}],
            "failurePolicy": {"maxRestarts": 0},
            **rest,
        },
    }


def keeper_pod_manifest(job: Submission) -> dict[str, Any]:
    """Returns the Job of the keeper pod for a job that outlives its parent; a lost pod is replaced and continues."""
    name, tags = keeper_pod_name(job.job_id), labels(job.job_id, "keeper")
    container = {
        "name": "keeper",
        "image": job.image,
        "command": [job.python, "-m", "resources.backends.kubernetes.owner", f"{_JOB}/keeper.pickle"],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": _UNPRIVILEGED,
        "volumeMounts": _MOUNTS[:1],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": tags},
        "spec": {
            "backoffLimit": 6,
            "podFailurePolicy": NO_FAILURE_OF_THE_POD,
            "suspend": True,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {
                "metadata": {"labels": tags},
                "spec": {
                    "restartPolicy": "Never",
                    "enableServiceLinks": False,
                    "automountServiceAccountToken": True,  # it creates and deletes the job's objects
                    "securityContext": _NOT_ROOT,
                    "containers": [container],
                    "volumes": [{"name": "job", "secret": {"secretName": name, "defaultMode": 0o444}}],
                },
            },
        },
    }


def secret_manifest(files: Mapping[str, bytes], *, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the Secret of an existing Job or JobSet, which owns it: it is deleted with its owner."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": _owned_by(job),
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }


def service_manifest(*, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the headless Service that gives the pods of a TPU slice the host names to reach each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned_by(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {name: value for name, value in job["metadata"]["labels"].items() if name != QUEUE_LABEL},
        },
    }


def config_map_manifest(name: str, tags: Mapping[str, str], content: Mapping[str, str]) -> dict[str, Any]:
    """Returns a ConfigMap: the record of a job, or its stored logs or results."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": dict(tags)},
        "data": dict(content),
    }


def _owned_by(job: Mapping[str, Any]) -> dict[str, Any]:
    name, labels, uid = (job["metadata"][field] for field in ("name", "labels", "uid"))
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": name, "uid": uid}
    return {"name": name, "labels": dict(labels), "ownerReferences": [{**owner, "blockOwnerDeletion": False}]}
