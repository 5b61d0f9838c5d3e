"""The part of a controller that the Iris backend needs; `connection.py` gives it with Iris' own package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from resources.backends.iris.resources import Group, Placement
from resources.backends.iris.states import Seen, Task
from resources.config import ResourceConfig

RECORDS, RESULTS = "assay", "/assay/results"
LEASE, STOP = "lease", "stop"
"""Names that `resources/backends/programs/iris_records.py` knows too: it runs where it can import nothing of ours."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One job on its way to the controller."""

    job_id: str
    command: Sequence[str]
    files: Mapping[str, bytes]
    """Written below the job's working directory on the worker."""
    placement: Placement
    resources: ResourceConfig
    bundle: bytes
    """A zip with the workspace; empty where there is none."""
    variables: Mapping[str, str] = field(repr=False)
    pip_packages: Sequence[str]
    extras: Sequence[str]
    image: str | None
    installs: bool
    """True if a container installs the workspace's project and the packages before it starts."""
    max_retries_failure: int
    max_retries_preemption: int


class Controller(Protocol):
    """Calls of a controller. All raise `BackendUnavailable` where it does not answer, or does not let us in."""

    address: str

    def launch(self, launch: Launch) -> str:
        """Submits a job; its id, which may differ in the user whom the controller takes us for."""
        ...

    def job_states(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Iris' state of each job that it knows."""
        ...

    def job(self, job_id: str) -> Seen | None:
        """One job; None where the controller knows none of that name."""
        ...

    def jobs(self, prefix: str) -> list[Seen]:
        """Every job whose id begins so, the newest first."""
        ...

    def tasks(self, job_id: str, *, every_attempt: bool = False) -> list[Task]:
        """The tasks of a job, in order; each with its last attempt, or with all of them, which costs more calls."""
        ...

    def terminate(self, job_id: str) -> None:
        """Has Iris end a job and its children; returns before they have."""
        ...

    def records(self, name: str) -> dict[str, dict[str, str]]:
        """Returns the metadata registered under a name, by the last part of its id."""
        ...

    def register(self, name: str, *, record_id: str, task_id: str, attempt: int, metadata: Mapping[str, str]) -> bool:
        """Registers metadata under a name, in place of what had the id; False where the attempt is not current."""
        ...

    def log_lines(self, task_id: str, max_lines: int) -> list[tuple[int, str]]:
        """The last lines of a task, each with the attempt that wrote it."""
        ...

    def log_lines_after(self, task_id: str, cursor: int, max_lines: int) -> tuple[list[tuple[int, str]], int]:
        """The first lines of a task after a cursor, and the cursor after them; 0 is before all."""
        ...

    def result(self, task_id: str, *, attempt: int) -> str | None:
        """The result that a task has left in one attempt, in base64; None where there is none."""
        ...

    def groups(self) -> list[Group]:
        """The kinds of machines that the cluster can start; empty where it starts none itself."""
        ...


def tell(
    controller: Controller, job_id: str, record_name: str, metadata: Mapping[str, str], *, attempt: int = 0
) -> int | None:
    """Leaves a record for the replicas of a job; it hangs on one of its tasks, and goes with that task's attempt.

    Args:
        controller: of the job.
        job_id: whose replicas are to read it.
        record_name: `LEASE` or `STOP`.
        metadata: the record.
        attempt: the one of the first task that is probably current, which saves a question.

    Returns:
        The attempt that was current; None where no task is left to hear.
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
