"""Fake of the controllers of Jobs and JobSets, and for a scheduler that knows the labels of nodes."""

from __future__ import annotations

import json
import secrets
from typing import Any

from fakes.kubernetes_kubelet import now

INDEX = "batch.kubernetes.io/job-completion-index"


def new_pod_status() -> dict[str, Any]:
    return {"phase": "Pending", "conditions": []}


def advance_job(job: dict[str, Any], pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts ended pods, decides if the Job has ended, and returns the pods to create."""
    spec, status = job["spec"], job.setdefault("status", {})
    counted: dict[str, str] = job.setdefault("_counted", {})  # outcome by uid of the pod
    known: dict[str, int] = job.setdefault("_known", {})
    for pod in pods:
        uid, phase = pod["metadata"]["uid"], pod["status"]["phase"]
        known[uid] = int(pod["metadata"]["labels"].get(INDEX, 0))
        if phase in {"Succeeded", "Failed"}:
            counted.setdefault(uid, "ignored" if phase == "Failed" and _ignored(spec, pod) else phase)
        elif "deletionTimestamp" in pod["metadata"]:
            counted.setdefault(uid, "ignored" if _ignored(spec, pod) else "Failed")
    present = {pod["metadata"]["uid"] for pod in pods}
    for uid in set(known) - present:
        counted.setdefault(uid, "Failed")
    done = {known[uid] for uid, how in counted.items() if how == "Succeeded"}
    failed = [known[uid] for uid, how in counted.items() if how == "Failed"]
    active = [uid for uid in present if uid not in counted]
    status |= {"succeeded": len(done), "failed": len(failed), "active": len(active)}
    completions = spec.get("completions", 1)
    per_index = spec.get("backoffLimitPerIndex")
    lost = {index for index in failed if per_index is not None and failed.count(index) > per_index} - done
    status["completedIndexes"] = ",".join(map(str, sorted(done)))
    status["failedIndexes"] = ",".join(map(str, sorted(lost)))
    if status.get("conditions") or spec.get("suspend") or "deletionTimestamp" in job["metadata"]:
        return []
    if len(done) == completions:
        status["conditions"] = [_condition("Complete", "CompletionsReached")]
    elif not active and lost and len(done | lost) == completions:
        status["conditions"] = [_condition("Failed", "FailedIndexes")]
    elif per_index is None and len(failed) > spec.get("backoffLimit", 6):
        status["conditions"] = [_condition("Failed", "BackoffLimitExceeded")]
    else:
        taken = {known[uid] for uid in active}
        return [_new_pod(job, index) for index in range(completions) if index not in taken | done | lost]
    return []


def advance_jobset(jobset: dict[str, Any], jobs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Decides if a JobSet has ended; returns the Jobs to create and the names of Jobs to delete.

    Follows its controller with `maxRestarts` 0: the first failed Job ends the set, and the set ends the others.
    """
    spec, status, name = jobset["spec"], jobset.setdefault("status", {}), jobset["metadata"]["name"]
    ended = {kind: {job["metadata"]["name"] for job in jobs if has_ended(job, kind)} for kind in ("Complete", "Failed")}
    expected_jobs = {
        f"{name}-{part['name']}-{index}": (part, index)
        for part in spec["replicatedJobs"]
        for index in range(part["replicas"])
    }
    if not status.get("conditions"):
        if ended["Failed"]:
            status["conditions"] = [
                _condition("Failed", "FailedJobs", message="jobset failed due to one or more job failures")
            ]
        elif len(ended["Complete"]) == len(expected_jobs):
            status["conditions"] = [_condition("Completed", "AllJobsCompleted")]
    for job in jobs:
        job["spec"]["suspend"] = spec.get("suspend", False)
    if has_ended(jobset, "Failed"):
        return [], [
            job["metadata"]["name"]
            for job in jobs
            if job["metadata"]["name"] not in ended["Complete"] | ended["Failed"]
        ]
    present = {job["metadata"]["name"] for job in jobs}
    if status.get("conditions") or "deletionTimestamp" in jobset["metadata"]:
        return [], []
    return [_new_job(jobset, job, *expected_jobs[job]) for job in sorted(expected_jobs.keys() - present)], []


def has_ended(job: dict[str, Any], kind: str) -> bool:
    return any(condition["type"] == kind for condition in job.get("status", {}).get("conditions", ()))


def _new_job(jobset: dict[str, Any], name: str, part: dict[str, Any], index: int) -> dict[str, Any]:
    template = json.loads(json.dumps(part["template"]))
    set_name = jobset["metadata"]["name"]
    pod = template["spec"]["template"]
    for made in (template, pod):
        tags = {"jobset-name": set_name, "replicatedjob-name": part["name"], "job-index": str(index)}
        made.setdefault("metadata", {}).setdefault("labels", {}).update(
            {f"jobset.sigs.k8s.io/{tag}": value for tag, value in tags.items()}
        )
    pod["spec"]["subdomain"] = set_name
    template["spec"]["suspend"] = jobset["spec"].get("suspend", False)
    metadata = {**template["metadata"], "name": name, "ownerReferences": [_reference(jobset, "JobSet")]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template["spec"]}


def headless_service(jobset: dict[str, Any]) -> dict[str, Any]:
    """Returns the Service that gives the pods of a set their host names."""
    name = jobset["metadata"]["name"]
    metadata = {"name": name, "ownerReferences": [_reference(jobset, "JobSet")]}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"jobset.sigs.k8s.io/jobset-name": name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _reference(owner: dict[str, Any], kind: str) -> dict[str, Any]:
    name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]
    return {"apiVersion": owner["apiVersion"], "kind": kind, "name": name, "uid": uid}


def can_go(pod: dict[str, Any], objects: dict[tuple[str, str], dict[str, Any]]) -> bool:
    """Returns True once the Job controller has counted a pod; a finalizer keeps the pod until then."""
    owner = objects.get(("jobs", pod["metadata"]["ownerReferences"][0]["name"]))
    return owner is None or pod["metadata"]["uid"] in owner.get("_counted", {})


def place(pod: dict[str, Any], nodes: list[dict[str, Any]], *, missing_images: set[str]) -> bool:
    """Puts a pod on a node; returns True if its containers can be created."""
    spec, status = pod["spec"], pod["status"]
    if not spec.get("nodeName"):
        fitting = [node for node in nodes if _fits(spec, node)]
        if not fitting:
            message = f"0/{len(nodes)} nodes are available: node(s) didn't match Pod's node affinity/selector."
            status["conditions"] = [_condition("PodScheduled", "Unschedulable", value="False", message=message)]
            return False
        spec["nodeName"] = fitting[0]["metadata"]["name"]
        status["conditions"] = [_condition("PodScheduled", "")]
    container = spec["containers"][0]
    if container["image"] in missing_images:
        waiting = {"reason": "ImagePullBackOff", "message": f"Back-off pulling image {container['image']!r}"}
        status["containerStatuses"] = [{"name": container["name"], "state": {"waiting": waiting}}]
        return False
    return True


def _fits(spec: dict[str, Any], node: dict[str, Any]) -> bool:
    tags = node["metadata"].get("labels", {})
    if not spec.get("nodeSelector", {}).items() <= tags.items():
        return False
    rules = spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in rules.get("nodeSelectorTerms", ()):
        for rule in term["matchExpressions"]:
            present = tags.get(rule["key"])
            if (rule["operator"] == "DoesNotExist" and present is not None) or (
                rule["operator"] == "In" and present not in rule["values"]
            ):
                return False
    return True


def _ignored(spec: dict[str, Any], pod: dict[str, Any]) -> bool:
    types = {condition["type"] for condition in pod["status"].get("conditions", ()) if condition["status"] == "True"}
    rules = spec.get("podFailurePolicy", {}).get("rules", ())
    return any(
        rule["action"] == "Ignore" and any(pattern["type"] in types for pattern in rule.get("onPodConditions", ()))
        for rule in rules
    )


def _new_pod(job: dict[str, Any], index: int) -> dict[str, Any]:
    template = json.loads(json.dumps(job["spec"]["template"]))
    metadata, name = template["metadata"], job["metadata"]["name"]
    metadata |= {"name": f"{name}-{index}-{secrets.token_hex(3)}", "ownerReferences": [_reference(job, "Job")]}
    metadata["labels"] |= {"batch.kubernetes.io/job-name": name}
    if job["spec"].get("completionMode") == "Indexed":
        metadata["labels"][INDEX] = str(index)
        metadata.setdefault("annotations", {})[INDEX] = str(index)
        template["spec"]["hostname"] = f"{name}-{index}"
        for container in template["spec"]["containers"]:
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
    return {"apiVersion": "v1", "kind": "Pod", **template}


def _condition(kind: str, reason: str, *, value: str = "True", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": now()}
