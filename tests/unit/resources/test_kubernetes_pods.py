"""The table of pod endings, row by row, and the ending of an attempt with several pods."""

from __future__ import annotations

from typing import Any

import pytest

from resources.backends.kubernetes.names import INDEX_LABEL
from resources.backends.kubernetes.pods import (
    PodState,
    attempt_outcome,
    classify_pod,
    given_up,
    states_by_index,
    without_collateral,
)


def pod(phase: str = "Running", *, index: int = 0, deleted: bool = False, **status: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": f"pod-{index}", "labels": {INDEX_LABEL: str(index)}}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def main(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "replica", "state": state}]}


def exited(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return main(terminated={"exitCode": code, "reason": reason, "message": message})


def condition(kind: str, value: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": value, "reason": reason, "message": message}]}


ENDINGS = {
    "done": (pod("Succeeded", **exited(0, "Completed")), "succeeded", None),
    "main done, sidecar still ending": (pod("Running", **exited(0, "Completed")), "succeeded", None),
    "failed": (pod("Failed", **exited(3)), "failed", "exit code 3"),
    "segmentation fault": (pod("Failed", **exited(139)), "failed", "139"),
    "killed": (pod("Failed", **exited(137)), "preempted", "137"),
    "terminated": (pod("Failed", **exited(143)), "preempted", "143"),
    "out of its own memory": (pod("Failed", **exited(137, "OOMKilled")), "failed", "resources.ram"),
    "no python in the image": (pod("Failed", **exited(128, "StartError", "exec: python3")), "failed", "exec: python3"),
    "node lost sight": (pod("Failed", **exited(137, "ContainerStatusUnknown")), "preempted", "lost sight"),
    "orphaned": (pod("Failed", **exited(143, message="the process that submitted it has ended")), "preempted", "ended"),
    "drained": (
        pod("Failed", **exited(1), **condition("DisruptionTarget", "True", "EvictionByEvictionAPI")),
        "preempted",
        "evicted",
    ),
    "made room": (pod(**condition("DisruptionTarget", "True", "PreemptionByScheduler")), "preempted", "priority"),
    "spot node taken": (
        pod("Failed", **condition("DisruptionTarget", "True", "TerminationByKubelet")),
        "preempted",
        "shut down",
    ),
    "node tainted": (pod(**condition("DisruptionTarget", "True", "DeletionByTaintManager")), "preempted", "taken away"),
    "node short of memory": (
        pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
        "preempted",
        "low on resource",
    ),
    "own disk": (
        pod("Failed", reason="Evicted", message="Pod ephemeral local storage usage exceeds the total limit of 1Gi."),
        "failed",
        "exceeds",
    ),
    "node shut down": (
        pod("Failed", reason="Terminated", message="Pod was terminated in response to imminent node shutdown."),
        "preempted",
        "shutdown",
    ),
    "node gone": (pod("Failed", reason="NodeLost"), "preempted", "NodeLost"),
    "refused by its node": (pod("Failed", reason="OutOfnvidia.com/gpu"), "preempted", "refused"),
    "deleted while it ran": (pod("Running", deleted=True, **main(running={})), "preempted", "deleted"),
    "deleted, ended with an error": (pod("Failed", deleted=True, **exited(1)), "preempted", "deleted"),
    "no such image name": (
        pod("Pending", **main(waiting={"reason": "InvalidImageName", "message": "bad"})),
        "failed",
        "InvalidImageName",
    ),
    "image that cannot be pulled": (
        pod("Pending", **main(waiting={"reason": "ImagePullBackOff", "message": "not found"})),
        "stuck",
        "not found",
    ),
    "secret missing": (pod("Pending", **main(waiting={"reason": "CreateContainerConfigError"})), "stuck", "Config"),
    "no node": (
        pod("Pending", **condition("PodScheduled", "False", "Unschedulable", "0/3 nodes are available")),
        "pending",
        "0/3 nodes",
    ),
    "being made": (pod("Pending", **main(waiting={"reason": "ContainerCreating"})), "pending", "created"),
    "running": (pod(**main(running={})), "running", None),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_pod_is_classified_by_the_table_with_a_reason(name: str) -> None:
    pod, standing, reason = ENDINGS[name]
    state = classify_pod(pod)
    assert state.standing == standing
    assert (reason or "") in (state.reason or "")


def test_missing_pods_are_classified_by_counts_of_their_job() -> None:
    job = {"metadata": {}, "status": {"failedIndexes": "1,4-5", "completedIndexes": "2"}}
    states = states_by_index([pod(index=0, **main(running={}))], count=5, vms=1, jobs=[job])
    assert [state.standing for state in states] == ["running", "preempted", "succeeded", "pending", "preempted"]


@pytest.mark.parametrize(
    ("standings", "outcome"),
    [
        ("succeeded succeeded", "succeeded"),
        ("succeeded running", None),
        ("running failed", "failed"),
        ("failed preempted", "preempted"),
        ("stuck running", None),
    ],
)
def test_attempt_ends_with_its_first_loss_and_preemption_wins(standings: str, outcome: str | None) -> None:
    ending = attempt_outcome([PodState(standing, "why") for standing in standings.split()])  # pyright: ignore[reportArgumentType]
    assert (ending.standing if ending else None) == outcome


SLICE_LABEL = "jobset.sigs.k8s.io/job-index"
FAILED_SET = {"status": condition("Failed", "True", "FailedJobs", "a job failed")}


def of_slice(pod: dict[str, Any], number: int) -> dict[str, Any]:
    pod["metadata"].setdefault("labels", {})[SLICE_LABEL] = str(number)
    return pod


def test_slices_that_a_failed_jobset_deletes_do_not_make_a_preemption_of_its_failure() -> None:
    # All pods of the first slice failed between two polls; of the second, a pod is gone and another is terminating.
    jobs = [
        of_slice({"metadata": {}, "status": {"failedIndexes": "0-1"}}, 0),
        of_slice({"metadata": {"deletionTimestamp": "now"}, "status": {"failedIndexes": "0-1"}}, 1),
    ]
    pods = [of_slice(pod("Failed", index=index, **exited(3)), 0) for index in range(2)]
    pods.append(of_slice(pod("Running", index=1, deleted=True, **main(running={})), 1))

    def outcome(jobset: dict[str, Any]) -> PodState | None:
        present, counted = without_collateral(pods, jobset), without_collateral(jobs, jobset)
        return attempt_outcome(states_by_index(present, count=4, vms=2, jobs=counted))

    assert outcome(FAILED_SET) == PodState("failed", "pod 0: exit code 3")
    assert outcome({"status": {}}) == PodState("preempted", "pod 2: its pod was deleted")
    evicted = pod("Running", index=0, deleted=True, **condition("DisruptionTarget", "True", "X"))
    pods.append(of_slice(evicted, 1))
    assert outcome(FAILED_SET) == PodState("preempted", "pod 2: X")


def test_jobset_that_was_given_up_and_left_no_pod_has_failed_with_its_own_words() -> None:
    assert given_up(FAILED_SET) == PodState("failed", "a job failed")
    assert given_up({"status": {}}) is None
