"""Shared parts of backends: the wait for a job, its error and its result; an id without a job, and a name in use."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from resources.errors import BadInput, JobFailed, JobTimeout
from resources.jobs.jobs import LONGEST_PAUSE_SECONDS, JobAlreadyExists, JobHandle, JobStatus, polls
from resources.jobs.results import raised_by, result_of

_SHOWN_LINES = 20


class BackendJob(JobHandle):
    """A handle that polls the status of its job with growing pauses while it waits."""

    longest_pause_seconds = LONGEST_PAUSE_SECONDS

    @property
    @abstractmethod
    def where(self) -> str:
        """Returns a clause with advice for errors, such as "read …/replica-*.log"."""

    @abstractmethod
    def result_bytes(self, replica: int) -> bytes | None:
        """Returns what a replica's call left in the last attempt, see `resources.jobs.results`; None if nothing."""

    def status(self) -> JobStatus:
        return self.details().status

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        for _ in polls(timeout, longest_seconds=self.longest_pause_seconds):
            if (status := self.status()).finished:
                if raise_on_failure and status is not JobStatus.SUCCEEDED:
                    raise self._failure() from raised_by(self, self.result_bytes)
                return status
        details = self.details()
        raise JobTimeout(
            expected=f"job {self.job_id} to have finished after {timeout:g} s",
            found=f"it is {details.status}" + (f": {details.reason}" if details.reason else ""),
            remedy=f"Wait longer, terminate it, or {self.where}",
        )

    def result(self, timeout: float | None = None, *, replica: int = 0) -> Any:
        return result_of(self, timeout, replica=replica, read=lambda: self.result_bytes(replica), where=self.where)

    def _failure(self) -> JobFailed:
        details = self.details()
        reason = f": {details.reason}" if details.reason else ""
        return JobFailed(
            expected=f"job {self.job_id} to succeed",
            found=f"it {'was ' if details.status is JobStatus.STOPPED else ''}{details.status}{reason}\n"
            f"{self.logs(_SHOWN_LINES)}".rstrip(),
            remedy=self.where[:1].upper() + self.where[1:],
        )


def no_such_job(place: str, job_id: str, remedy: str) -> BadInput:
    """Returns the error for an id without a job; `place` completes "the id of a job"."""
    return BadInput(expected=f"the id of a job {place}", found=repr(job_id), remedy=remedy)


Job = TypeVar("Job", bound=JobHandle)


def while_running(job: Job | None, *, adopt_existing: bool) -> Job | None:
    """Returns `job` while it runs, if `adopt_existing` allows that; None if there is none, or it has finished."""
    if job is None or job.status().finished:
        return None
    if adopt_existing:
        return job
    raise JobAlreadyExists.of(job.details(), job=job)
