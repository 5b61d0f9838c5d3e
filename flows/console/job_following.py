"""Watching a job of any backend: its new lines as they come, why it waits, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from resources.errors import BackendUnavailable, BadInput
from resources.jobs.jobs import JobDetails, JobHandle, JobStatus

_LINES_AT_ONCE = 2000  # that a look at a log asks for; what was written beyond them between two looks is not seen
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 2.0


class LogTail:
    """A log of which only the end can be seen, and what is new in it."""

    def __init__(self) -> None:
        self._seen: list[str] = []
        self._printed = 0
        self.missed = False
        """True if lines before those that were returned last have never been seen: there were too many at once."""

    def new_lines(self, text: str, *, final: bool = False) -> list[str]:
        """The lines that were not returned before.

        The last line may be half of one: it is returned once it has stayed the same, or another one follows. If it
        grows after that, what is new of it is returned.

        Args:
            text: the end of the log, as it is now.
            final: whether nothing will be added any more.
        """
        lines = text.splitlines()
        known = _overlap(self._seen, lines)
        self.missed = bool(self._seen and lines and not known)
        printed = max(0, self._printed - (len(self._seen) - known)) if known else 0
        grown = "" if not known else lines[known - 1].removeprefix(self._seen[-1])
        settled = final or (bool(self._seen) and known == len(lines) and not grown)
        complete = len(lines) if settled else max(len(lines) - 1, printed)
        rest = [grown] if grown and printed == known else []
        self._seen, self._printed = lines, complete
        return rest + lines[printed:complete]


def follow(
    job: JobHandle,
    *,
    replicas: Sequence[int],
    write: Callable[[str], None],
    note: Callable[[str], None],
    patience_seconds: float = 60.0,
) -> JobDetails:
    """Writes what the job logs until it has finished, and returns how it did.

    Args:
        job: what to watch.
        replicas: whose logs; with several, each line begins with the number of its replica.
        write: gets one line of a log.
        note: gets what there is to say about the job itself: why it waits, that it was started again.
        patience_seconds: how long a backend may be silent; its head may be starting again.

    Raises:
        BackendUnavailable: it was silent for longer.
    """
    tails = {replica: LogTail() for replica in replicas}
    noted: str | None = None
    pause = _FIRST_PAUSE_SECONDS
    last_answer = time.monotonic()
    while True:
        try:
            details = job.details()  # before the logs: what a finished job has logged is all there then
            texts = {replica: job.logs(_LINES_AT_ONCE, replica=replica) for replica in tails}
        except BackendUnavailable as error:
            if time.monotonic() - last_answer > patience_seconds:
                raise
            note(f"no answer, asking again: {error.found}")
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE_SECONDS)
            continue
        last_answer = time.monotonic()
        finished, anything = details.status.finished, False
        for replica, tail in tails.items():
            lines = tail.new_lines(texts[replica], final=finished)
            if tail.missed:
                note(f"replica {replica} writes faster than can be read from here: lines before the next are missing")
            for line in lines:
                write(f"[{replica}] {line}" if len(tails) > 1 else line)
                anything = True
        if finished:
            return details
        if (remark := _remark(details)) and remark != noted:
            note(remark)
        noted = remark or noted
        pause = _FIRST_PAUSE_SECONDS if anything else min(pause * 1.5, _LAST_PAUSE_SECONDS)
        time.sleep(pause)


def replicas_of(job: JobHandle) -> list[int]:
    """The numbers of a job's replicas."""
    count = 0
    try:
        while True:
            job.logs(1, replica=count)
            count += 1
    except BadInput:
        return list(range(count))


def is_lost(details: JobDetails) -> bool:
    """Returns whether a job failed though it never did by its own doing: what ran it is to blame."""
    return details.status is JobStatus.FAILED and details.failures == 0


def ending_of(details: JobDetails) -> str:
    """One sentence about how a job ended."""
    verb = f"was {details.status}" if details.status is JobStatus.STOPPED else str(details.status)
    reason = f": {details.reason}" if details.reason else ""
    count = details.preemptions
    preempted = f", after {count} preemption{'s' if count > 1 else ''}" if count else ""
    return f"{details.job_id} {verb}{reason}{preempted}"


def _overlap(before: Sequence[str], now: Sequence[str]) -> int:
    """Returns how many of the lines seen before are the first ones now; the last of them may have grown since."""
    for dropped in range(len(before)):
        kept = before[dropped:]
        if len(kept) <= len(now) and kept[:-1] == now[: len(kept) - 1] and now[len(kept) - 1].startswith(kept[-1]):
            return len(kept)
    return 0


def _remark(details: JobDetails) -> str | None:
    if details.status is JobStatus.PENDING:
        return f"pending: {details.reason}" if details.reason else None
    if details.attempts > 1:
        return f"attempt {details.attempts}, after {details.failures} failures and {details.preemptions} preemptions"
    return None
