"""Waiting for a job of any backend, and the error that says how it ended."""

from __future__ import annotations

import time

from resources.errors import JobFailed, JobTimeout
from resources.jobs import JobHandle, JobStatus

_FIRST_POLL_SECONDS = 0.01
_SHOWN_LINES = 20


def wait_until_finished(
    job: JobHandle,
    timeout: float | None,
    *,
    raise_on_failure: bool,
    where: str,
    last_poll_seconds: float = 1.0,
) -> JobStatus:
    """Blocks until a job has finished, asking for its status less and less often.

    Args:
        job: what to wait for.
        timeout: seconds; for ever when None.
        raise_on_failure: whether a job that failed or was stopped is an error.
        where: what to do to learn more, a clause such as "read …/replica-*.log".
        last_poll_seconds: the longest pause between two looks.

    Raises:
        JobTimeout: it was still running by then; it goes on.
        JobFailed: it failed or was stopped.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    poll_seconds = _FIRST_POLL_SECONDS
    while not (status := job.status()).finished:
        remaining = poll_seconds if deadline is None else deadline - time.monotonic()
        if remaining <= 0:
            reason = job.details().reason
            raise JobTimeout(
                expected=f"job {job.job_id} to have finished after {timeout:g} s",
                found=f"it is {status}" + (f": {reason}" if reason else ""),
                remedy=f"Wait longer, terminate it, or {where}",
            )
        time.sleep(min(poll_seconds, remaining))
        poll_seconds = min(poll_seconds * 1.5, last_poll_seconds)
    if raise_on_failure and status is not JobStatus.SUCCEEDED:
        raise failure_of(job, where=where)
    return status


def failure_of(job: JobHandle, *, where: str) -> JobFailed:
    """The error for a job that failed or was stopped, with the reason and its last lines."""
    details = job.details()
    reason = f": {details.reason}" if details.reason else ""
    return JobFailed(
        expected=f"job {job.job_id} to succeed",
        found=f"it {'was ' if details.status is JobStatus.STOPPED else ''}{details.status}{reason}\n"
        f"{job.logs(_SHOWN_LINES)}".rstrip(),
        remedy=where[:1].upper() + where[1:],
    )
