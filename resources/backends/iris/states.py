"""States of a job and its tasks on Iris, translated into our words; pure, so that every row can be tested.

Names are those of Iris' states, such as `JOB_STATE_RUNNING`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from resources.backends.programs.endings import ENDINGS, Outcome
from resources.jobs.jobs import JobStatus

Ending = Outcome | Literal["stopped", "unsatisfiable"]

MARK = "[assay] "
"""Start of the line by which `iris_replica.py` says how it ended; Iris keeps it with the attempt, too."""
UNSATISFIABLE = "JOB_STATE_UNSCHEDULABLE"
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_SAID = re.compile(re.escape(MARK) + r"(?P<reason>.*?)(?:; restarted here: (?P<restarts>\d+))?\s*$", re.DOTALL)
_GAVE_UP = "gave up: "
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
    """One start of a task by Iris."""

    state: str
    error: str = ""
    ended: bool = False
    """True once its worker has confirmed that nothing of it runs."""


@dataclass(frozen=True)
class Task:
    """One replica, or one host of a replica, as Iris knows it."""

    task_id: str
    state: str
    attempt: int
    """The current one; -1 before the first."""
    attempts: tuple[Attempt, ...] = ()
    error: str = ""

    @property
    def is_on_a_worker(self) -> bool:
        """Returns True if something of it may be running."""
        return self.state in _ON_A_WORKER

    @property
    def has_succeeded(self) -> bool:
        """Returns True if its last attempt has."""
        return self.state == "TASK_STATE_SUCCEEDED"

    @property
    def is_over(self) -> bool:
        """Returns True if Iris will not start it again."""
        return self.state in _ATTEMPTS


@dataclass(frozen=True)
class Seen:
    """One job, as Iris knows it."""

    job_id: str
    state: str
    error: str = ""
    pending_reason: str = ""
    submitted_at: float = 0.0
    failures: int = 0
    preemptions: int = 0
    hosts: int = 1
    """Tasks that one replica is made of."""
    command: tuple[str, ...] = ()
    """Program and arguments of its tasks; empty in lists."""


@dataclass(frozen=True)
class Counts:
    """Attempts of a job over all replicas, as `JobDetails` counts them."""

    attempts: int
    failures: int
    preemptions: int


def job_status(state: str) -> JobStatus:
    """Returns a job's state; one that Iris adds some day counts as running."""
    return _JOBS.get(state, JobStatus.RUNNING)


def classify_iris(state: str, *, error: str = "", job_stopped: bool = True) -> Ending | None:
    """Returns the kind of end of a task's attempt; None while it has not ended.

    Args:
        state: Iris' state of the attempt.
        error: what Iris says of it, with the last line of its output.
        job_stopped: whether the whole job was; a single attempt that is killed was taken away from it.
    """
    ending = _ATTEMPTS.get(state)
    if ending == "failed" and end_reason(error).startswith(_GAVE_UP):
        return ENDINGS["signalled"]
    return ENDINGS["place taken"] if ending == "stopped" and not job_stopped else ending


def end_reason(error: str) -> str:
    """Returns the last words of the replica's own program, or Iris' where it said nothing; one line."""
    found = _SAID.search(error)
    text = found["reason"] if found else error.partition("Traceback")[0]
    return " ".join(text.split())[:_SHOWN_CHARACTERS]


def restarts(error: str) -> int:
    """Returns the times that the replica's program had begun again on the same worker before this end."""
    found = _SAID.search(error)
    return int(found["restarts"] or 0) if found else 0


def counts(status: JobStatus, tasks: Sequence[Task], *, restarts_now: Sequence[int] = ()) -> Counts:
    """Returns the number of starts of all replicas, and the ends of those attempts.

    A lost machine may hold several replicas, whose loss is one preemption; a failure is always one replica's own.

    Args:
        status: where the job stands.
        tasks: of this job.
        restarts_now: how often each replica has begun again in its present attempt; counted where that still runs or
            has succeeded, since Iris keeps what another one has said at its end.
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
            taken += ending == "preempted" and not end_reason(attempt.error).startswith(_GAVE_UP)
            preemptions_here += restarts(attempt.error)
        preemptions_of_tasks.append(taken)
    here = zip(tasks, restarts_now or [0] * len(tasks), strict=True)
    restarted_now = sum(count for task, count in here if task.is_on_a_worker or task.has_succeeded)
    preemptions = max(preemptions_of_tasks) + preemptions_here + restarted_now
    if status is JobStatus.RUNNING:  # as the job said it; its tasks were asked later, and may have ended meanwhile
        present = any(task.is_on_a_worker or task.has_succeeded for task in tasks)
    else:
        present = status in {JobStatus.SUCCEEDED, JobStatus.STOPPED} and any(task.attempts for task in tasks)
    return Counts(attempts=failures + preemptions + present, failures=failures, preemptions=preemptions)


def reason(seen: Seen, tasks: Sequence[Task]) -> str | None:
    """Returns the reason that a job ended as it did, or the thing that it waits for."""
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
    """The name that a job was submitted under."""
    return _SUFFIX.sub("", job_id.rpartition("/")[2])
