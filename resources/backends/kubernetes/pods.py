"""States of pods: classification of a replica's end, and the reason that a pod waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from resources.backends.kubernetes.manifests import MAIN
from resources.backends.kubernetes.names import INDEX_LABEL, SLICE_LABEL
from resources.backends.programs.attempts import Outcome, outcome_of
from resources.backends.programs.endings import ENDINGS, OUT_OF_MEMORY, Cause, classify_exit
from resources.backends.programs.run_in_pod import ORPHANED

PodStanding = Outcome | Literal["pending", "stuck", "running"]

_STUCK = {
    "ImagePullBackOff",
    "ErrImagePull",
    "ImageInspectError",
    "RegistryUnavailable",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
_HOPELESS = {"InvalidImageName", "ErrImageNeverPull"}
_NODE_REASONS = {"Evicted", "NodeShutdown", "Shutdown", "Terminated", "NodeLost", "Preempting", "Preempted"}
_REFUSED_BY_NODE = ("OutOf", "NodeAffinity", "UnexpectedAdmissionError", "NodeUnschedulable")
_DISRUPTIONS = {
    "PreemptionByScheduler": "it made room for a pod of higher priority",
    "DeletionByTaintManager": "its node failed, or was taken away",
    "EvictionByEvictionAPI": "it was evicted, as when a node is drained",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node was shut down, or short of memory or disk",
}


@dataclass(frozen=True)
class PodState:
    """State of a pod, with the reason."""

    standing: PodStanding
    reason: str | None = None

    @property
    def outcome(self) -> Outcome | None:
        """Returns None until its replica has ended."""
        return None if self.standing in ("pending", "stuck", "running") else self.standing


def _end(cause: Cause, reason: str | None = None) -> PodState:
    return PodState(ENDINGS[cause], reason)


GONE = _end("place taken", "its pod was deleted")


def classify_pod(pod: Mapping[str, Any]) -> PodState:
    """Returns a pod's state from its manifest as in the API server.

    Preempted are ends from outside: disruptions, evictions, lost nodes, deletion, and the exit codes that
    `classify_exit` counts so. A replica that exceeds its own limit has failed.
    """
    status = pod.get("status", {})
    phase, reason, message = status.get("phase", "Pending"), status.get("reason", ""), status.get("message", "")
    ended = _main_state(status).get("terminated")
    if "limit" in message and "exceed" in message and "storage" in message.lower().replace("emptydir", "storage"):
        return _end("out of its own disk", f"evicted: {message}")
    if disruption := _condition(status, "DisruptionTarget", "True"):
        words = _DISRUPTIONS.get(disruption.get("reason", ""), disruption.get("reason", "disrupted"))
        return _end("place taken", words)
    if reason in _NODE_REASONS:
        return _end("machine lost", f"{reason}: {message}" if message else reason)
    if phase == "Failed" and reason.startswith(_REFUSED_BY_NODE):
        return _end("place taken", f"its node refused it: {reason}")
    if ended is not None:
        return _ended(ended, deleted="deletionTimestamp" in pod.get("metadata", {}))
    if "deletionTimestamp" in pod.get("metadata", {}):
        return _end("place taken", "its pod is being deleted")
    if phase == "Succeeded":
        return _end("finished")
    if phase == "Failed":
        return _end("crashed", f"{reason}: {message}".strip(": ") or "its pod failed without a reason")
    return _unfinished(status)


def states_by_index(
    pods: Sequence[Mapping[str, Any]], *, count: int, vms: int, jobs: Sequence[Mapping[str, Any]]
) -> list[PodState]:
    """Returns the state of each of the `count` pods of an attempt, including pods that do not exist yet or any more.

    `vms` is the number of pods per slice; `jobs` are the Job of the attempt, or those of its JobSet.
    """
    present = {pod_index(pod, vms=vms): classify_pod(pod) for pod in pods}
    lost, done = (
        {
            _slice_index(job) * vms + index
            for job in jobs
            for index in _indexes(job.get("status", {}).get(f"{ending}Indexes"))
        }
        for ending in ("failed", "completed")
    )
    waiting = PodState("pending", "its pod is not created yet")
    return [
        present.get(index) or (_end("finished") if index in done else GONE if index in lost else waiting)
        for index in range(count)
    ]


def pod_index(pod: Mapping[str, Any], *, vms: int) -> int:
    """Returns the index of a pod in its attempt, over all slices of `vms` pods each."""
    metadata = pod["metadata"]
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
    return _slice_index(pod) * vms + int(labels.get(INDEX_LABEL) or annotations.get(INDEX_LABEL) or 0)


def without_collateral(objects: Sequence[dict[str, Any]], job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the pods or Jobs that caused a JobSet's end, not those deleted by the JobSet because it has failed."""
    if given_up(job) is None:
        return list(objects)
    return [
        each
        for each in objects
        if "deletionTimestamp" not in each["metadata"] or _condition(each.get("status", {}), "DisruptionTarget", "True")
    ]


def given_up(job: Mapping[str, Any]) -> PodState | None:
    """Returns a failure if Kubernetes or JobSet has given the attempt up; only its pods reveal the kind of end."""
    failed = _condition(job.get("status", {}), "Failed", "True")
    return None if failed is None else _end("crashed", failed.get("message") or failed.get("reason"))


def _slice_index(manifest: Mapping[str, Any]) -> int:
    return int(manifest["metadata"].get("labels", {}).get(SLICE_LABEL, 0))


def attempt_outcome(states: Sequence[PodState]) -> PodState | None:
    """Returns the end of an attempt from the states of its pods; None while it runs."""
    outcome = outcome_of(state.outcome for state in states)
    if outcome is None:
        return None
    index, state = next((index, state) for index, state in enumerate(states) if state.standing == outcome)
    return replace(state, reason=f"pod {index}: {state.reason}") if state.reason and len(states) > 1 else state


def _main_state(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in status.get("containerStatuses") or ():
        if container["name"] == MAIN:
            return container.get("state") or {}
    return {}


def _ended(state: Mapping[str, Any], *, deleted: bool) -> PodState:
    code, reason = int(state.get("exitCode", 0)), state.get("reason", "")
    message = (state.get("message") or "").strip()
    if message == ORPHANED:
        return _end("signalled", ORPHANED)
    if reason == "OOMKilled":
        return _end("out of memory", OUT_OF_MEMORY)
    if reason == "ContainerStatusUnknown":
        return _end("machine lost", "its node lost sight of it")
    if code == 0:
        return _end("finished")
    if deleted:
        return GONE
    words = f"exit code {code}" + (f" ({reason}: {message})" if reason not in {"", "Error"} else "")
    return PodState(classify_exit(code), words)


def _unfinished(status: Mapping[str, Any]) -> PodState:
    waiting = [
        container["state"]["waiting"]
        for part in ("initContainerStatuses", "containerStatuses")
        for container in status.get(part) or ()
        if (container.get("state") or {}).get("waiting")
    ]
    for state in waiting:
        words = f"{state.get('reason')}: {state.get('message', '')}".strip(": ")
        if state.get("reason") in _HOPELESS:
            return _end("crashed", words)
        if state.get("reason") in _STUCK:
            return PodState("stuck", words)
    if _main_state(status).get("running") is not None:
        return PodState("running")
    if unscheduled := _condition(status, "PodScheduled", "False"):
        return PodState("pending", unscheduled.get("message") or unscheduled.get("reason"))
    return PodState("pending", "its container is being created")


def _condition(status: Mapping[str, Any], kind: str, value: str) -> Mapping[str, Any] | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == value:
            return condition
    return None


def _indexes(text: str | None) -> set[int]:
    indexes: set[int] = set()
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        indexes.update(range(int(first), int(last or first) + 1))
    return indexes
