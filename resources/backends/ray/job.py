"""Handle on a job of a Ray cluster: calls the job's controller."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from resources.backends.ray.connection import ControllerGone, RayConnection
from resources.errors import JobTimeout
from resources.jobs.jobs import JobDetails, JobStatus
from resources.jobs.logs import LogPart
from resources.jobs.results import raised_by, result_of
from resources.jobs.waiting import wait_until_finished

_LONG_POLL_SECONDS = 20.0


class RayJob:
    """Handle on a job, submitted by this process or attached to."""

    def __init__(self, connection: RayConnection, controller: Any, details: JobDetails, *, own: bool) -> None:
        self._connection = connection
        self._controller = controller
        self._known = details
        self._own = own

    @property
    def job_id(self) -> str:
        return self._known.job_id

    def details(self) -> JobDetails:
        """Returns the job's details; a job with an ended controller counts as failed or stopped."""
        if self._known.status.finished:
            return self._known
        try:
            self._known = self._ask("details")
        except ControllerGone:
            status = JobStatus.FAILED if self._own else JobStatus.STOPPED
            reason = "its controller was killed" if self._own else "the process that submitted it has ended"
            self._known = replace(self._known, status=status, reason=reason)
        return self._known

    def status(self) -> JobStatus:
        return self.details().status

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        begun = time.monotonic()
        while not self._known.status.finished:
            left = _LONG_POLL_SECONDS if timeout is None else timeout - (time.monotonic() - begun)
            if left <= 0:
                break
            try:
                seconds = min(left, _LONG_POLL_SECONDS)
                if not self._ask("finished", seconds=seconds).finished:
                    continue
            except ControllerGone:
                pass
            break
        remaining = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        return wait_until_finished(
            self,
            remaining,
            raise_on_failure=raise_on_failure,
            where=self._where,
            cause=lambda: raised_by(self, self._left),
        )

    def result(self, timeout: float | None = None, *, replica: int = 0) -> Any:
        """Returns the call's result, which the controller keeps until it ends."""
        return result_of(self, timeout, replica=replica, read=lambda: self._left(replica), where=self._where)

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        """Returns the last lines; empty if the job's controller has ended."""
        return self._ask_living("logs", "", max_lines=max_lines, replica=replica)

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        """Returns the next part of the log; empty if the job's controller has ended."""
        return self._ask_living("read_log", LogPart(b"", after), after=after, replica=replica)

    def announced(self, replica: int = 0) -> str | None:
        return self._ask_living("announced", None, replica=replica)

    def terminate(self) -> None:
        seconds: float | None = self._ask_living("stop", None)
        if seconds is not None:
            self.wait(seconds, raise_on_failure=False)

    @property
    def _where(self) -> str:
        return f"read the logs of {self.job_id}"

    def _left(self, replica: int) -> bytes | None:
        return self._ask_living("result", None, replica=replica)

    def _ask(self, method: str, **arguments: Any) -> Any:
        return self._connection.ask(self._controller, method, job_id=self.job_id, **arguments)

    def _ask_living(self, method: str, otherwise: Any, **arguments: Any) -> Any:
        try:
            return self._ask(method, **arguments)
        except ControllerGone:
            return otherwise


def wait_for_all(connection: RayConnection, controller: Any, job_ids: list[str], *, seconds: float) -> None:
    """Returns when all jobs have finished; raises `JobTimeout` after that many seconds."""
    deadline = time.monotonic() + seconds
    for job_id in job_ids:
        left = max(0.1, deadline - time.monotonic())
        status: JobStatus = connection.ask(controller, "finished", job_id=job_id, seconds=left)
        if not status.finished:
            raise JobTimeout(
                expected=f"job {job_id} to have ended {seconds:g} s after it was asked to",
                found=f"it is {status}",
                remedy="Look at the node that it runs on.",
            )
