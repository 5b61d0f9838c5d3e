"""Shared parts of all backends' handles: waiting, and the error for a failed job."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from resources.errors import JobFailed, JobTimeout
from resources.jobs.jobs import JobAlreadyExists, JobHandle, JobStatus

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
_SHOWN_LINES = 20


def growing_pauses(longest_seconds: float = _LONGEST_PAUSE_SECONDS) -> Iterator[float]:
    """Yields the seconds between two polls, from 0.05 s growing by half each time up to `longest_seconds`."""
    seconds = _FIRST_PAUSE_SECONDS
    while True:
        yield min(seconds, longest_seconds)
        seconds = min(seconds * 1.5, longest_seconds)


def wait_until_finished(
    job: JobHandle,
    timeout: float | None,
    *,
    raise_on_failure: bool,
    where: str,
    cause: Callable[[], Exception | None],
    longest_pause_seconds: float = _LONGEST_PAUSE_SECONDS,
) -> JobStatus:
    """Blocks until a job has finished, for at most `timeout` seconds, with growing pauses between polls of its status.

    `where` is a clause with advice for the error, such as "read …/replica-*.log"; `cause` returns the exception of the
    job's callable, if known (see `resources.jobs.results.raised_by`).
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    pauses = growing_pauses(longest_pause_seconds)
    while not (status := job.status()).finished:
        remaining = math.inf if deadline is None else deadline - time.monotonic()
        if remaining <= 0:
            reason = job.details().reason
            raise JobTimeout(
                expected=f"job {job.job_id} to have finished after {timeout:g} s",
                found=f"it is {status}" + (f": {reason}" if reason else ""),
                remedy=f"Wait longer, terminate it, or {where}",
            )
        time.sleep(min(next(pauses), remaining))
    if raise_on_failure and status is not JobStatus.SUCCEEDED:
        raise failure_of(job, where=where) from cause()
    return status


def failure_of(job: JobHandle, *, where: str) -> JobFailed:
    """Returns the error for a job that failed or was stopped, with the reason and its last log lines."""
    details = job.details()
    reason = f": {details.reason}" if details.reason else ""
    return JobFailed(
        expected=f"job {job.job_id} to succeed",
        found=f"it {'was ' if details.status is JobStatus.STOPPED else ''}{details.status}{reason}\n"
        f"{job.logs(_SHOWN_LINES)}".rstrip(),
        remedy=where[:1].upper() + where[1:],
    )


Job = TypeVar("Job", bound=JobHandle)


def while_running(job: Job | None, *, adopt_existing: bool) -> Job | None:
    """Returns `job` while it runs, for reuse of its name; None if there is none, or it has finished.

    Raises:
        JobAlreadyExists: it runs, and `adopt_existing` is False.
    """
    if job is None or job.status().finished:
        return None
    if adopt_existing:
        return job
    raise JobAlreadyExists.of(job.details(), job=job)
