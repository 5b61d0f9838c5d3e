"""Causes of process ends on Ray without an exit code."""

from __future__ import annotations

from resources.backends.programs.attempts import Outcome
from resources.backends.programs.endings import ENDINGS, OUT_OF_MEMORY, Cause

_CAUSES: dict[str, tuple[Cause, str]] = {
    "NodeDiedError": ("machine lost", "its node has died"),
    "LocalRayletDiedError": ("machine lost", "its node has died"),
    "OwnerDiedError": ("machine lost", "the worker that held its data has died"),
    "ActorDiedError": ("machine lost", "the actor that it needed has died"),
    "ActorUnavailableError": ("machine lost", "the actor that it needed cannot be reached"),
    "WorkerCrashedError": ("machine lost", "its worker has died"),
    "GetTimeoutError": ("machine lost", "the cluster did not answer in time"),
    "OutOfMemoryError": ("out of memory", OUT_OF_MEMORY),
    "ObjectLostError": ("data lost", "its data was lost with a node"),
    "ObjectFetchTimedOutError": ("data lost", "its data could not be fetched"),
    "OutOfDiskError": ("place taken", "its node ran out of disk"),
    "TaskPlacementGroupRemoved": ("place taken", "its place was taken away"),
    "ActorPlacementGroupRemoved": ("place taken", "its place was taken away"),
    "TaskUnschedulableError": ("place taken", "its place is gone"),
}
"""By name of the exception's class or of a base class, since only the backend imports ray."""


def classify_ray(error: BaseException) -> tuple[Outcome, str]:
    """Returns the budget that an error of a Ray task counts against, and a formatted reason.

    Errors without an entry, such as a runtime environment that cannot be set up, or an error in Assay's own code on the
    node, are failures, since they would recur.
    """
    for kind in type(error).__mro__:
        if (row := _CAUSES.get(kind.__name__)) is not None:
            return ENDINGS[row[0]], row[1]
    # Ray's text is a remote traceback, which ends with the exception.
    return ENDINGS["crashed"], f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
