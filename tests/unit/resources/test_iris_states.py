"""Meaning of Iris's reports on jobs and tasks, row by row."""

from __future__ import annotations

import pytest

from resources.backends.iris.states import Attempt, Seen, Task, classify_iris, counts, job_status, name_of, reason
from resources.jobs.jobs import JobStatus

OWN_END = "Exit code: 5. stderr: [assay] exit code 5; restarted here: 2"
GAVE_UP = "Exit code: 1. stderr: [assay] gave up: ended from outside 2 times; restarted here: 2"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("JOB_STATE_PENDING", "pending"),
        ("JOB_STATE_BUILDING", "pending"),
        ("JOB_STATE_RUNNING", "running"),
        ("JOB_STATE_SUCCEEDED", "succeeded"),
        ("JOB_STATE_FAILED", "failed"),
        ("JOB_STATE_WORKER_FAILED", "failed"),
        ("JOB_STATE_UNSCHEDULABLE", "failed"),
        ("JOB_STATE_KILLED", "stopped"),
        ("JOB_STATE_OF_NEXT_YEAR", "running"),
    ],
)
def test_iris_job_state_has_a_single_meaning(state: str, status: str) -> None:
    assert job_status(state) == status


@pytest.mark.parametrize(
    ("state", "error", "job_stopped", "ending"),
    [
        ("TASK_STATE_SUCCEEDED", "", True, "succeeded"),
        ("TASK_STATE_FAILED", "Exit code: 1", True, "failed"),
        ("TASK_STATE_FAILED", OWN_END, True, "failed"),
        ("TASK_STATE_FAILED", GAVE_UP, True, "preempted"),
        ("TASK_STATE_WORKER_FAILED", "worker unreachable", True, "preempted"),
        ("TASK_STATE_PREEMPTED", "", True, "preempted"),
        ("TASK_STATE_COSCHED_FAILED", "", True, "preempted"),
        ("TASK_STATE_KILLED", "Terminated by user", True, "stopped"),
        ("TASK_STATE_KILLED", "", False, "preempted"),
        ("TASK_STATE_UNSCHEDULABLE", "", True, "unsatisfiable"),
        ("TASK_STATE_RUNNING", "", True, None),
        ("TASK_STATE_PENDING", "", True, None),
    ],
)
def test_iris_attempt_ends_by_its_own_doing_or_from_outside(
    state: str, error: str, job_stopped: bool, ending: str | None
) -> None:
    assert classify_iris(state, error=error, job_stopped=job_stopped) == ending


def task(state: str, *attempts: Attempt, index: int = 0) -> Task:
    return Task(f"/me/job-0123abcd/{index}", state, len(attempts) - 1, attempts, attempts[-1].error if attempts else "")


def test_iris_counts_failures_of_each_replica_and_a_lost_machine_once() -> None:
    lost, failed = Attempt("TASK_STATE_WORKER_FAILED"), Attempt("TASK_STATE_FAILED", OWN_END)
    replicas = [
        task("TASK_STATE_RUNNING", lost, failed, Attempt("TASK_STATE_RUNNING")),
        task("TASK_STATE_RUNNING", lost, Attempt("TASK_STATE_RUNNING"), index=1),
    ]
    counted = counts(JobStatus.RUNNING, replicas, restarts_now=[1, 0])
    assert counted == {"attempts": 1 + 4 + 1, "failures": 1, "preemptions": 1 + 2 + 1}


def test_iris_counts_an_attempt_that_ended_after_its_job_was_asked_once() -> None:
    failed = task("TASK_STATE_FAILED", Attempt("TASK_STATE_FAILED", OWN_END))
    counted = counts(JobStatus.RUNNING, [failed], restarts_now=[2])
    assert counted == {"attempts": 3, "failures": 1, "preemptions": 2}


def test_iris_counts_no_attempt_of_a_job_that_waits() -> None:
    assert counts(JobStatus.PENDING, [task("TASK_STATE_PENDING")])["attempts"] == 0


def test_iris_reason_is_what_the_replica_said_last_without_a_traceback() -> None:
    failed = Seen("/me/job-0123abcd", "JOB_STATE_FAILED", "Job exceeded max_task_failures")
    peer = task("TASK_STATE_KILLED", Attempt("TASK_STATE_KILLED", "Job exceeded max_task_failures"), index=1)
    assert reason(failed, [peer, task("TASK_STATE_FAILED", Attempt("TASK_STATE_FAILED", OWN_END))]) == "exit code 5"
    infrastructure = Attempt("TASK_STATE_FAILED", "RuntimeError: no bundle\n\nTraceback:\nFile x")
    assert reason(failed, [task("TASK_STATE_FAILED", infrastructure)]) == "RuntimeError: no bundle"
    assert reason(failed, []) == "Job exceeded max_task_failures"


def test_iris_reason_is_a_line_if_waiting_and_empty_if_running() -> None:
    waiting = Seen("/me/job", "JOB_STATE_PENDING", pending_reason="Scheduler: no room\n\nAutoscaler: at its limit")
    assert reason(waiting, []) == "Scheduler: no room Autoscaler: at its limit"
    assert reason(Seen("/me/job", "JOB_STATE_RUNNING"), []) is None


def test_iris_job_name_is_its_submitted_name() -> None:
    assert name_of("/me/parent-89abcdef/engine-7-0123abcd") == "engine-7"
    assert name_of("/me/of-another-tool") == "of-another-tool"
