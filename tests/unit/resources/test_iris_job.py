"""A handle on a job of Iris; on the controller, the task starts between two requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from resources.backends.iris.connection import IrisController
from resources.backends.iris.job import RECORDS, STOP, IrisJob
from resources.backends.iris.states import Task
from resources.jobs.jobs import JobStatus

JOB = "/user/job-0123abcd"


class LateController:
    """A controller with a job; its only task gets an attempt after the first request about it, and stops on command."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.attempt = -1
        self.seen: dict[str, dict[str, str]] = {}
        self.ended: list[str] = []

    def job_states(self, job_ids: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(job_ids, "JOB_STATE_KILLED" if self.ended else "JOB_STATE_PENDING")

    def jobs(self, prefix: str) -> list[Any]:
        return []

    def tasks(self, job_id: str) -> list[Task]:
        task = Task(f"{job_id}/0", "TASK_STATE_RUNNING" if self.attempt == 0 else "TASK_STATE_PENDING", self.attempt)
        self.attempt = 0
        return [task]

    def records(self, name: str) -> dict[str, dict[str, str]]:
        assert name == f"{JOB}/{RECORDS}"
        return self.seen

    def register(self, name: str, *, record_id: str, task_id: str, attempt: int, metadata: Mapping[str, str]) -> bool:
        if attempt != self.attempt or attempt < 0:
            return False
        self.seen = {record_id.rpartition("#")[2]: dict(metadata), "0": {"state": "stopped"}}
        return True

    def terminate(self, job_id: str) -> None:
        self.ended.append(job_id)


def test_task_that_starts_after_the_order_to_end_still_receives_it() -> None:
    controller = LateController()
    job = IrisJob(cast("IrisController", controller), JOB, hosts=1, grace_seconds=0)
    job.terminate()
    assert controller.seen[STOP] == {"reason": "terminated"}
    assert (controller.ended, job.status()) == ([JOB], JobStatus.STOPPED)
