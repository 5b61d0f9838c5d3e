"""Translation of Iris' job and task states (such as `JOB_STATE_RUNNING`) into this package's; without I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from resources.backends.programs.attempts import Outcome
from resources.backends.programs.endings import ENDINGS
from resources.backends.programs.iris_records import GAVE_UP, MARK
from resources.jobs.jobs import JobStatus

Ending = Outcome | Literal["stopped", "unsatisfiable"]

UNSATISFIABLE = "JOB_STATE_UNSCHEDULABLE"
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_SAID = re.compile(re.escape(MARK) + r"(?P<reason>.*?)(?:; restarted here: (?P<restarts>\d+))?\s*$", re.DOTALL)
_SHOWN_CHARACTERS = 500

_JOBS = {
    "JOB_STATE_PENDING": JobStatus.PENDING,
    "JOB_STATE_BUILDING": JobStatus.PENDING,
    "JOB_STATE_RUNNING": JobStatus.RUNNING,
    "JOB_STATE_SUCCEEDED": JobStatus.SUCCEEDED,
    "JOB_STATE_FAILED": JobStatus.FAILED,
    "JOB_STATE_KILLED": JobStatus.STOPPED,
    "JOB_STATE_WORKER_FAILED": JobStatus.FAILED,
    UNSATISFIABLE: JobStatus.FAILED,
}
_ATTEMPTS: dict[str, Ending] = {
    "TASK_STATE_SUCCEEDED": ENDINGS["finished"],
    "TASK_STATE_FAILED": ENDINGS["crashed"],
    "TASK_STATE_WORKER_FAILED": ENDINGS["machine lost"],
    "TASK_STATE_PREEMPTED": ENDINGS["place taken"],
    "TASK_STATE_COSCHED_FAILED": ENDINGS["machine lost"],
    "TASK_STATE_KILLED": "stopped",
    "TASK_STATE_UNSCHEDULABLE": "unsatisfiable",
}
_ON_A_WORKER = {"TASK_STATE_ASSIGNED", "TASK_STATE_BUILDING", "TASK_STATE_RUNNING"}


@dataclass(frozen=True)
class Attempt:
    """An attempt of a task."""

    state: str
    error: str = ""
    ended: bool = False
    """True once its worker has confirmed that none of its processes runs."""


@dataclass(frozen=True)
class Task:
    """A replica, or a host of a replica, in Iris' view."""

    task_id: str
    state: str
    attempt: int
    """Number of the current attempt; -1 before the first."""
    attempts: tuple[Attempt, ...] = ()
    error: str = ""

    @property
    def is_on_a_worker(self) -> bool:
        """Returns True if processes of the task may be running."""
        return self.state in _ON_A_WORKER

    @property
    def has_succeeded(self) -> bool:
        return self.state == "TASK_STATE_SUCCEEDED"

    @property
    def is_over(self) -> bool:
        """Returns True if Iris will not start it again."""
        return self.state in _ATTEMPTS


@dataclass(frozen=True)
class Seen:
    """A job in Iris' view."""

    job_id: str
    state: str
    error: str = ""
    pending_reason: str = ""
    submitted_at: float = 0.0
    failures: int = 0
    preemptions: int = 0
    hosts: int = 1
    """Tasks per replica."""
    command: tuple[str, ...] = ()
    """Program and arguments of its tasks; empty for jobs from a listing."""


def job_status(state: str) -> JobStatus:
    """Returns a job's status; a state that this version does not know counts as running."""
    return _JOBS.get(state, JobStatus.RUNNING)


def classify_iris(state: str, *, error: str = "", job_stopped: bool = True) -> Ending | None:
    """Returns how a task's attempt ended, or None while it runs.

    `error` is Iris' text, with the last line of the output. Unless the whole job was stopped, a killed attempt counts
    as preempted.
    """
    ending = _ATTEMPTS.get(state)
    if ending == "failed" and end_reason(error).startswith(GAVE_UP):
        return ENDINGS["signalled"]
    return ENDINGS["place taken"] if ending == "stopped" and not job_stopped else ending


def end_reason(error: str) -> str:
    """Returns the final message of the replica's program in a single line; without any, Iris' own message."""
    match = _SAID.search(error)
    text = match["reason"] if match else error.partition("Traceback")[0]
    return " ".join(text.split())[:_SHOWN_CHARACTERS]


def restarts(error: str) -> int:
    """Returns how often the replica's program had restarted on the same worker before this end."""
    match = _SAID.search(error)
    return int(match["restarts"] or 0) if match else 0


def counts(status: JobStatus, tasks: Sequence[Task], *, restarts_now: Sequence[int] = ()) -> dict[str, int]:
    """Returns the attempts of a job over all replicas, by the fields of `JobDetails`.

    A lost machine may hold several replicas: their loss counts as a single preemption. Each failure counts separately.
    `restarts_now` has the restarts of each replica in its current attempt; counted if that runs or has succeeded, since
    Iris keeps the final message, with its number of restarts, for attempts that ended otherwise.
    """
    failures = preemptions_here = 0
    preemptions_of_tasks = [0]
    for task in tasks:
        taken = 0
        for attempt in task.attempts:
            ending = classify_iris(
                attempt.state, error=attempt.error, job_stopped=status is JobStatus.STOPPED or task.is_over
            )
            failures += ending == "failed"
            taken += ending == "preempted" and not end_reason(attempt.error).startswith(GAVE_UP)
            preemptions_here += restarts(attempt.error)
        preemptions_of_tasks.append(taken)
    tasks_and_restarts = zip(tasks, restarts_now or [0] * len(tasks), strict=True)
    restarted_now = sum(count for task, count in tasks_and_restarts if task.is_on_a_worker or task.has_succeeded)
    preemptions = max(preemptions_of_tasks) + preemptions_here + restarted_now
    if status is JobStatus.RUNNING:  # the job's status was read before its tasks, which may have ended meanwhile
        present = any(task.is_on_a_worker or task.has_succeeded for task in tasks)
    else:
        present = status in {JobStatus.SUCCEEDED, JobStatus.STOPPED} and any(task.attempts for task in tasks)
    return {"attempts": failures + preemptions + present, "failures": failures, "preemptions": preemptions}


def reason(seen: Seen, tasks: Sequence[Task]) -> str | None:
    """Returns the reason for a job's end or for its pending state."""
    match job_status(seen.state):
        case JobStatus.PENDING:
            return " ".join(seen.pending_reason.split()) or "waits for a worker"
        case JobStatus.FAILED:
            own = [task.error for task in tasks if MARK in task.error] or [task.error for task in tasks if task.error]
            return end_reason(own[0] if own else seen.error) or "failed"
        case JobStatus.STOPPED:
            return end_reason(seen.error) or "terminated"
        case _:
            return None


def name_of(job_id: str) -> str:
    """Returns the name under which a job was submitted."""
    return _SUFFIX.sub("", job_id.rpartition("/")[2])
