"""Protocol of the Iris controller for this backend; `connection.py` implements it with Iris' package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from resources.backends.iris.resources import Group, Placement
from resources.backends.iris.states import Seen, Task
from resources.config import ResourceConfig

RECORDS, RESULTS = "assay", "/assay/results"
LEASE, STOP = "lease", "stop"
"""Names shared with `resources/backends/programs/iris_records.py`, which cannot import this package."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Submission of a job to the controller."""

    job_id: str
    command: Sequence[str]
    files: Mapping[str, bytes]
    """Files to write below the job's working directory on the worker."""
    placement: Placement
    resources: ResourceConfig
    bundle: bytes
    """Zip of the workspace; empty without a workspace."""
    variables: Mapping[str, str] = field(repr=False)
    pip_packages: Sequence[str]
    extras: Sequence[str]
    image: str | None
    installs: bool
    """True if a container installs the workspace's project and the packages before it starts."""
    max_retries_failure: int
    max_retries_preemption: int


class Controller(Protocol):
    """Calls to a controller; each raises `BackendUnavailable` if the controller does not answer or denies access."""

    address: str

    def launch(self, launch: Launch) -> str:
        """Submits a job and returns its id, in which the controller may put its own name for the user."""
        ...

    def job_states(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Returns Iris' state of each known job; unknown ids are missing."""
        ...

    def job(self, job_id: str) -> Seen | None:
        """Returns a job, or None if the controller has no job of this id."""
        ...

    def jobs(self, prefix: str) -> list[Seen]:
        """Returns the jobs with this id prefix, newest first."""
        ...

    def tasks(self, job_id: str, *, every_attempt: bool = False) -> list[Task]:
        """Returns the tasks of a job in order, each with its last attempt or, for more calls, with all attempts."""
        ...

    def terminate(self, job_id: str) -> None:
        """Ends a job and its children; returns before they have ended."""
        ...

    def records(self, name: str) -> dict[str, dict[str, str]]:
        """Returns the metadata registered under a name, keyed by the last part of the record id."""
        ...

    def register(self, name: str, *, record_id: str, task_id: str, attempt: int, metadata: Mapping[str, str]) -> bool:
        """Registers metadata under a name, replacing a record of the same id; False if the attempt is not current."""
        ...

    def log_lines(self, task_id: str, max_lines: int) -> list[tuple[int, str]]:
        """Returns the last lines of a task, each with the number of the attempt that wrote it."""
        ...

    def log_lines_after(self, task_id: str, cursor: int, max_lines: int) -> tuple[list[tuple[int, str]], int]:
        """Returns the first lines of a task after a cursor (0: start of the log), and the next cursor."""
        ...

    def result(self, task_id: str, *, attempt: int) -> str | None:
        """Returns the result that a task wrote in an attempt, base64-encoded, or None."""
        ...

    def groups(self) -> list[Group]:
        """Returns the kinds of machines that the cluster can start; empty if it starts none."""
        ...


def tell(
    controller: Controller, job_id: str, record_name: str, metadata: Mapping[str, str], *, attempt: int = 0
) -> int | None:
    """Registers a record for a job's replicas at a task; returns the task's attempt, or None if all tasks have ended.

    The record is removed when that attempt ends.

    Args:
        record_name: `LEASE` or `STOP`.
        attempt: probable current attempt of the first task; a correct value saves a call.
    """
    name, record_id = f"{job_id}/{RECORDS}", f"{job_id}#{record_name}"
    if controller.register(name, record_id=record_id, task_id=f"{job_id}/0", attempt=attempt, metadata=metadata):
        return attempt
    for task in controller.tasks(job_id):
        if not task.is_over and controller.register(
            name, record_id=record_id, task_id=task.task_id, attempt=task.attempt, metadata=metadata
        ):
            return task.attempt
    return None
