"""Whose doing it was that a process of a job on Ray ended without an exit code of its own."""

from __future__ import annotations

from typing import Literal

_FROM_OUTSIDE = {
    "NodeDiedError": "its node has died",
    "LocalRayletDiedError": "its node has died",
    "OwnerDiedError": "the worker that held its data has died",
    "ActorDiedError": "the actor that it needed has died",
    "ActorUnavailableError": "the actor that it needed cannot be reached",
    "WorkerCrashedError": "its worker has died",
    "ObjectLostError": "its data was lost with a node",
    "ObjectFetchTimedOutError": "its data could not be fetched",
    "GetTimeoutError": "the cluster did not answer in time",
    "OutOfMemoryError": "its node ran out of memory",
    "OutOfDiskError": "its node ran out of disk",
    "TaskPlacementGroupRemoved": "its place was taken away",
    "ActorPlacementGroupRemoved": "its place was taken away",
    "TaskUnschedulableError": "its place is gone",
}
"""By the name of the exception's class, or of one that it derives from: only the backend imports ray."""


def classify_ray(error: BaseException) -> tuple[Literal["preempted", "failed"], str]:
    """Whether an error of a Ray task counts as a preemption or as a failure of the job, and why in words.

    Nodes, workers and places that were lost were taken from outside. Everything else, such as a runtime environment
    that cannot be set up, or an error of our own code on the node, is a failure, since it would come again.
    """
    for kind in type(error).__mro__:
        if (words := _FROM_OUTSIDE.get(kind.__name__)) is not None:
            return "preempted", words
    # Ray's text is a remote traceback, whose last line says what was raised.
    return "failed", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
