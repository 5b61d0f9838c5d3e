"""Follows a job of any backend: its log, its pending reasons, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from resources.errors import BackendUnavailable
from resources.jobs.jobs import JobDetails, JobHandle, JobStatus

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 2.0
_MUCH_BYTES = 64 << 10  # in a poll: more may be available already


class _ShownLog:
    def __init__(self, prefix: bytes) -> None:
        self.position = ""
        self._prefix = prefix
        self._unfinished = b""

    def shown(self, output: bytes) -> bytes:
        if not self._prefix:
            self._unfinished = output.rpartition(b"\n")[2] if output else self._unfinished
            return output
        *lines, self._unfinished = (self._unfinished + output).split(b"\n")
        return b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)

    def rest(self) -> bytes:
        return self.shown(b"\n") if self._unfinished else b""


def follow(
    job: JobHandle,
    *,
    replicas: Sequence[int],
    write: Callable[[bytes], None],
    note: Callable[[str], None],
    patience_seconds: float = 60.0,
) -> JobDetails:
    """Writes a job's log from its beginning until the job ends; returns its final details.

    Args:
        note: receives remarks about the job itself: pending reasons and restarts.
        patience_seconds: longest time without an answer of the backend, as its head may be restarting.
    """
    logs = {replica: _ShownLog(b"[%d] " % replica if len(replicas) > 1 else b"") for replica in replicas}
    noted: str | None = None
    pause = _FIRST_PAUSE_SECONDS
    last_answer = time.monotonic()
    while True:
        longest = 0
        try:
            details = job.details()  # before the logs, so that a finished job's log is complete
            for replica, log in logs.items():
                part = job.read_log(log.position, replica=replica)
                log.position = part.end
                if part.dropped_lines != 0:
                    number = f"{part.dropped_lines:,}" if part.dropped_lines else "some"
                    note(f"replica {replica}: {number} lines not shown, since they are kept no more")
                write(log.shown(part.output))
                longest = max(longest, len(part.output))
        except BackendUnavailable as error:
            if time.monotonic() - last_answer > patience_seconds:
                raise
            note(f"no answer, asking again: {error.found}")
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE_SECONDS)
            continue
        last_answer = time.monotonic()
        if details.status.finished and not longest:
            for log in logs.values():
                write(log.rest())
            return details
        if (remark := _remark(details)) and remark != noted:
            note(remark)
        noted = remark or noted
        pause = _FIRST_PAUSE_SECONDS if longest else min(pause * 1.5, _LAST_PAUSE_SECONDS)
        if longest < _MUCH_BYTES and not details.status.finished:
            time.sleep(pause)


def is_lost(details: JobDetails) -> bool:
    """Returns True if a job failed without a failure of its program, hence by its infrastructure."""
    return details.status is JobStatus.FAILED and details.failures == 0


def ending_of(details: JobDetails) -> str:
    """Returns a sentence about how a job ended."""
    verb = f"was {details.status}" if details.status is JobStatus.STOPPED else str(details.status)
    reason = f": {details.reason}" if details.reason else ""
    count = details.preemptions
    preempted = f", after {count} preemption{'s' if count > 1 else ''}" if count else ""
    return f"{details.job_id} {verb}{reason}{preempted}"


def _remark(details: JobDetails) -> str | None:
    if details.status is JobStatus.PENDING:
        return f"pending: {details.reason}" if details.reason else None
    if details.attempts > 1:
        return f"attempt {details.attempts}, after {details.failures} failures and {details.preemptions} preemptions"
    return None
