"""Handle on an Iris job: queries the controller, and reads the records and logs of the replicas there."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from functools import partial

from resources.backends.iris.connection import IrisController
from resources.backends.iris.states import (
    MARK,
    UNSATISFIABLE,
    Task,
    counts,
    end_reason,
    job_status,
    name_of,
    reason,
    restarts,
)
from resources.backends.programs.iris_records import LEASE, STOP
from resources.backends.programs.iris_records import NAME as RECORDS
from resources.errors import BadInput, UnsatisfiableResources
from resources.jobs.jobs import JobDetails, JobStatus, polls
from resources.jobs.logs import LogPart, check_replica, logs_by_replica, part_of_hosts
from resources.jobs.waiting import BackendJob, no_such_job

CALLABLE, COMMAND = "assay-callable", "assay-command"
"""Last argument of a task's command; Iris returns no more of a job's entrypoint, so it marks calls and commands."""
_AGAIN = f"{MARK}another attempt"
_TAIL_BYTES = 1 << 20
_PART_LINES = 10_000
_LOG_END_SECONDS = 10.0  # a worker sends its last lines after the end, which the controller may learn earlier
_STOP_MARGIN_SECONDS = 20.0
_CONFIRM_SECONDS = 15.0
_CONTROLLER_POLL_SECONDS = 0.1


class IrisJob(BackendJob):
    """Handle on a job of an Iris cluster, submitted by this process or attached to; `hosts` is in tasks per replica."""

    def __init__(self, controller: IrisController, job_id: str, *, hosts: int, grace_seconds: float) -> None:
        self._controller = controller
        self._job_id = job_id
        self._hosts = hosts
        self._grace_seconds = grace_seconds
        self._status: JobStatus | None = None  # set once finished: it is final
        self._task_attempt: int | None = None  # of the task that has the lease

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> JobStatus:
        if self._status is None:
            states = self._controller.job_states([self._job_id])
            if self._job_id not in states:
                raise unknown_job(self._controller, self._job_id)
            status = job_status(states[self._job_id])
            if not status.finished:
                return status
            self._status = status
        return self._status

    def details(self) -> JobDetails:
        """Returns the job's state with the reason and the restarts that its replicas report."""
        seen = self._controller.job(self._job_id)
        if seen is None:
            raise unknown_job(self._controller, self._job_id)
        status, tasks = job_status(seen.state), self._controller.tasks(self._job_id, every_attempt=True)
        why = reason(seen, tasks)
        if status is JobStatus.STOPPED and (own := self._last_words(tasks)):
            why = own
        return JobDetails(
            job_id=self._job_id,
            name=name_of(self._job_id),
            status=status,
            reason=why,
            **counts(status, tasks, restarts_now=self._restarts(status, tasks)),
            submitted_at=seen.submitted_at,
            replicas=max(len(tasks) // self._hosts, 1),
            returns={CALLABLE: True, COMMAND: False}.get(seen.command[-1]) if seen.command else None,
        )

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        status = super().wait(timeout, raise_on_failure=False)
        if raise_on_failure and status is not JobStatus.SUCCEEDED:
            states = self._controller.job_states([self._job_id])
            if states.get(self._job_id) == UNSATISFIABLE:
                raise UnsatisfiableResources(
                    expected=f"a machine for job {self._job_id}",
                    found=self.details().reason or "none",
                    remedy="Ask for less or for another device, or add a scale group to the cluster's configuration.",
                )
        return super().wait(0, raise_on_failure=raise_on_failure)

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        """Returns the last lines, up to a second old; the lines of a replica's hosts follow each other."""
        tasks = self._controller.tasks(self._job_id)
        count = max(len(tasks) // self._hosts, 1)
        deadline = time.monotonic() + _LOG_END_SECONDS  # shared: replicas of a lost machine write no more lines
        return logs_by_replica(
            lambda index: self._lines(tasks, index, max_lines, deadline=deadline), count, replica=replica
        )

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        """Returns the next part of a replica's log; lines appear about a second after they were written."""
        tasks = self._controller.tasks(self._job_id)
        check_replica(replica, max(len(tasks) // self._hosts, 1))
        deadline = time.monotonic() + _LOG_END_SECONDS
        own = tasks[replica * self._hosts : (replica + 1) * self._hosts]
        return part_of_hosts(
            lambda host, position: self._part(own[host], position, deadline=deadline), self._hosts, after=after
        )

    def announced(self, replica: int = 0) -> str | None:
        """Returns the replica's announcement; None once the job has finished, when Iris removes it."""
        return self._records().get(str(replica * self._hosts), {}).get("announcement")

    def terminate(self) -> None:
        """Ends the job and the jobs submitted inside it, and returns when all their processes have ended."""
        running = [self._job_id, *self.request_stop()]
        for _ in polls(self._grace_seconds + _STOP_MARGIN_SECONDS, longest_seconds=_CONTROLLER_POLL_SECONDS):
            if not (running := [job_id for job_id in running if not self._has_stopped(job_id)]):
                break
        if not self.status().finished:
            self._controller.terminate(self._job_id)
        for _ in polls(_CONFIRM_SECONDS, longest_seconds=_CONTROLLER_POLL_SECONDS):
            if all(map(self._is_confirmed, running)):
                break
        self.status()

    def renew(self) -> bool:
        """Renews the lease of the job; returns False once it has finished."""
        if self.status().finished:
            return False
        beat, attempt = {"beat": str(time.time())}, -1 if self._task_attempt is None else self._task_attempt
        self._task_attempt = self._register(self._job_id, LEASE, beat, attempt=attempt)
        return True

    def request_stop(self) -> list[str]:
        """Requests the end of the job and of the jobs inside it, and returns the ids of the latter."""
        if self.status().finished:
            return []
        inside = [
            seen.job_id for seen in self._controller.jobs(f"{self._job_id}/") if not job_status(seen.state).finished
        ]
        for job_id in (self._job_id, *inside):
            self._tell_to_stop(job_id)
        return inside

    @property
    def where(self) -> str:
        return f"look for {self._job_id} on the dashboard at {self._controller.address}"

    def _tell_to_stop(self, job_id: str) -> None:
        self._register(job_id, STOP, {"reason": "terminated"}, attempt=0)

    def _register(self, job_id: str, record_name: str, metadata: Mapping[str, str], *, attempt: int) -> int | None:
        # Tries the probable attempt of the first task, which saves a call; a record ends with its task's attempt.
        register = partial(
            self._controller.register, f"{job_id}/{RECORDS}", record_id=f"{job_id}#{record_name}", metadata=metadata
        )
        if register(task_id=f"{job_id}/0", attempt=attempt):
            return attempt
        for task in self._controller.tasks(job_id):
            if not task.is_over and register(task_id=task.task_id, attempt=task.attempt):
                return task.attempt
        return None

    def _records(self) -> dict[str, dict[str, str]]:
        records = self._controller.records(f"{self._job_id}/{RECORDS}")
        return {key: record for key, record in records.items() if key.isdigit()}

    def result_bytes(self, replica: int) -> bytes | None:
        """Returns what the controller's log has, for as long as that log is kept."""
        task = self._controller.tasks(self._job_id)[replica * self._hosts]
        text = self._controller.result(task.task_id, attempt=task.attempt)
        return base64.b64decode(text) if text else None

    def _has_stopped(self, job_id: str) -> bool:
        states = self._controller.job_states([job_id])
        if job_id not in states or job_status(states[job_id]).finished:
            return True
        records = self._controller.records(f"{job_id}/{RECORDS}")
        for index, task in enumerate(self._controller.tasks(job_id)):
            if task.is_on_a_worker and records.get(str(index), {}).get("state") != "stopped":
                if STOP not in records:  # registered before the first attempt, or lost with an earlier attempt
                    self._tell_to_stop(job_id)
                return False
        return True

    def _is_confirmed(self, job_id: str) -> bool:
        tasks = self._controller.tasks(job_id)
        return all(task.is_over and all(attempt.ended for attempt in task.attempts) for task in tasks)

    def _lines(self, tasks: Sequence[Task], replica: int, max_lines: int, *, deadline: float) -> str:
        shown: list[str] = []
        for task in tasks[replica * self._hosts : (replica + 1) * self._hosts]:
            if task.attempts:
                lines = self._end_of_log(task, max_lines + 3, deadline=deadline)
                shown += _shown(lines, attempt=lines[0][0] if lines else 0)
        text = "\n".join(shown[-max_lines:] if max_lines > 0 else [])
        return text.encode()[-_TAIL_BYTES:].decode(errors="ignore")

    def _restarts(self, status: JobStatus, tasks: Sequence[Task]) -> list[int]:
        if not status.finished:
            records = self._records()
            return [int(records.get(str(index), {}).get("restarts", 0)) for index in range(len(tasks))]
        deadline = time.monotonic() + _LOG_END_SECONDS
        ends = [self._end_of_log(task, 1, deadline=deadline) if task.has_succeeded else [] for task in tasks]
        return [restarts(lines[-1][1]) if lines and _is_last(lines[-1][1]) else 0 for lines in ends]

    def _end_of_log(self, task: Task, max_lines: int, *, deadline: float) -> list[tuple[int, str]]:
        while True:
            lines = self._controller.log_lines(task.task_id, max_lines)
            if not task.is_over or (lines and _is_last(lines[-1][1])) or time.monotonic() >= deadline:
                return lines
            time.sleep(_CONTROLLER_POLL_SECONDS)

    def _part(self, task: Task, after: str, *, deadline: float) -> LogPart:
        cursor, attempt, ended = map(int, after.split(".")) if after else (0, 0, 0)
        shown: list[str] = []
        while not shown:
            lines, cursor = self._controller.log_lines_after(task.task_id, cursor, _PART_LINES)
            if lines:
                shown, attempt, ended = _shown(lines, attempt=attempt), lines[-1][0], int(_is_last(lines[-1][1]))
            elif not task.is_over or ended or time.monotonic() >= deadline:
                break
            else:
                time.sleep(_CONTROLLER_POLL_SECONDS)
        return LogPart("".join(f"{line}\n" for line in shown).encode(), f"{cursor}.{attempt}.{ended}")

    def _last_words(self, tasks: Sequence[Task]) -> str | None:
        lines = self._controller.log_lines(tasks[0].task_id, 3) if tasks and tasks[0].attempts else []
        words = [end_reason(line) for _, line in lines if _is_last(line)]
        return words[-1] if words else None


def _shown(lines: Sequence[tuple[int, str]], *, attempt: int) -> list[str]:
    shown: list[str] = []
    for number, line in lines:
        if number != attempt or line == _AGAIN:
            attempt = number
            shown.append("--- another attempt ---")
        if not line.startswith(MARK):
            shown.append(line)
    return shown


def _is_last(line: str) -> bool:
    return line.startswith(MARK) and line != _AGAIN


def unknown_job(controller: IrisController, job_id: str) -> BadInput:
    """Returns the error for an id without a job on the cluster."""
    place = f"on the Iris cluster {controller.address}, such as /user/name-0123abcd"
    return no_such_job(place, job_id, "Choose a job that is listed there; old jobs are removed.")
