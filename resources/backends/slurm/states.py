"""Translation of Slurm's job states and outputs into this package's; without I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from resources.backends.programs.attempts import Attempts, Outcome
from resources.backends.programs.endings import ENDINGS, OUT_OF_MEMORY, Cause, cause_of_exit
from resources.jobs.jobs import JobStatus

_ENDED: dict[str, Cause | None] = {
    "COMPLETED": "signalled",
    "BOOT_FAIL": "machine lost",
    "NODE_FAIL": "machine lost",
    "PREEMPTED": "place taken",
    "REVOKED": "place taken",
    "TIMEOUT": "place taken",
    "DEADLINE": "crashed",
    "SPECIAL_EXIT": "crashed",
    "OUT_OF_MEMORY": "out of memory",
    "FAILED": None,
    "CANCELLED": None,
}
"""Cause of a batch job's end by Slurm's state, if its program reported none; None if the state does not suffice."""
LOST = ("BOOT_FAIL", "NODE_FAIL")
"""States after which processes of the job may still run on a node that Slurm cannot reach."""
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"}
_NOT_LAUNCHED = "launch failed requeued held"
_EXIT = re.compile(r"(\d+):(\d+)")
_OF_A_JOB = re.compile(r"(?:^|\s)(JobState|Reason|ExitCode|EndTime)=(\S+)")


@dataclass(frozen=True)
class Seen:
    """A batch job in Slurm's view."""

    state: str
    """Slurm's state, such as RUNNING or NODE_FAIL."""
    reason: str = ""
    """The reason that it waits, such as Resources or Priority; empty if Slurm reports none."""
    exit_code: int = 0
    """Exit code of its program; negative for signals."""
    ended_at: float | None = None
    """Unix time of its end, if Slurm reports it."""
    is_forgotten: bool = False
    """True if only the accounting has the job: the controller cannot requeue it."""

    @property
    def has_ended(self) -> bool:
        """Returns True if no process of it runs and Slurm will not start it without a requeue."""
        return self.state in _ENDED or self.is_forgotten

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def waits_after_requeue(self) -> bool:
        """Returns True if only a start time delays it: requeued jobs wait for two minutes."""
        return self.state == "PENDING" and self.reason == "BeginTime"

    @property
    def was_not_launched(self) -> bool:
        """Returns True if a node could not start it, after which Slurm holds it until it is released."""
        return self.is_waiting and self.reason.replace("_", " ").startswith(_NOT_LAUNCHED)


def classify_slurm(seen: Seen) -> Outcome | None:
    """Returns the kind of end of a batch job by Slurm's state, if its program reported none; None while it runs."""
    if seen.state not in _ENDED:
        return None
    if seen.state == "CANCELLED":
        return "stopped"
    return ENDINGS[_ENDED[seen.state] or cause_of_exit(seen.exit_code)]


def from_outside(
    known: Mapping[str, Any],
    seen: Seen | None,
    *,
    name: str,
    max_retries_preemption: int,
    is_to_stop: bool,
    is_owned: bool,
    is_recent: bool,
    log: Path,
) -> dict[str, Any]:
    """Returns the `status.json` of an unfinished job as it follows from Slurm's view, None if Slurm has forgotten it.

    Args:
        known: `status.json` of the job, read after `seen` if that has ended.
        is_owned: True if the submitter lives, which queues the job again where Slurm does not.
        is_recent: True for an end a few seconds ago, after which Slurm may still queue it again.
    """

    def state(status: JobStatus | str, reason: str | None, **changes: int) -> dict[str, Any]:
        return {**known, "status": JobStatus(status), "reason": reason, **changes}

    def preempted(words: str, again: str | None) -> dict[str, Any]:
        attempts = Attempts(0, max_retries_preemption, preemptions=known["preemptions"])
        counted, final = attempts.ended("preempted", words)
        if final is None and again is not None:
            return state(JobStatus.PENDING, f"{words}, and {again}")
        reason = final.reason if final else f"{words}, and nothing queues it again: `scontrol requeue` does"
        return state(JobStatus.FAILED, reason, preemptions=counted.preemptions)

    if seen is None or seen.has_ended:
        if is_to_stop:
            return state(JobStatus.STOPPED, "terminated")
        if seen is None:
            words = f"Slurm knows {name} no more, and its program did not report how it ended"
            return state(JobStatus.FAILED, words)
    elif seen.was_not_launched and not is_to_stop:
        words = f"a node could not start {name}"
        if is_owned:  # the submitter counts it before it releases the job: a reader would count it twice in between
            return state(JobStatus.PENDING, f"{words}, and its submitter queues it again within its budget")
        return preempted(words, "waits for `scontrol release`")
    elif seen.is_waiting:
        return state(JobStatus.PENDING, f"{name} waits: {seen.reason or seen.state}")
    else:
        return state(known["status"], None if known["attempts"] else f"{name} begins")
    words = f"{name} ended as {seen.state}"
    outcome = classify_slurm(seen)
    if known.get("left_machines") and outcome in ("failed", "succeeded"):
        outcome = "preempted"  # Slurm shows this state briefly during a requeue
    match outcome:
        case None:
            return state(JobStatus.PENDING, f"{name} is {seen.state}")
        case "stopped":
            return state(JobStatus.STOPPED, f"cancelled with scancel: {words}")
        case "preempted" if seen.is_forgotten:
            words += ", which was read too late: Slurm has forgotten it, and cannot queue it again"
            return state(JobStatus.FAILED, words, preemptions=known["preemptions"] + 1)
        case "preempted":
            return preempted(words, "is queued again" if is_owned or is_recent else None)
        case _ if seen.state == "OUT_OF_MEMORY":
            return state(JobStatus.FAILED, OUT_OF_MEMORY, failures=known["failures"] + 1)
        case _:
            return state(JobStatus.FAILED, f"{words}; read {log}", failures=known["failures"] + 1)


def after_failed_launch(known: Mapping[str, Any], *, name: str, max_retries_preemption: int) -> dict[str, Any]:
    """Returns the `status.json` of a job that Slurm holds after a failed launch; final if its budget is used up."""
    attempts = Attempts(0, max_retries_preemption, preemptions=known["preemptions"])
    counted, final = attempts.ended("preempted", f"a node could not start {name}")
    ended = final._asdict() if final else {}
    return {**known, "preemptions": counted.preemptions, "all_ended": False, **ended}


def seen_by_squeue(listing: str) -> dict[str, Seen]:
    """Parses the output of `squeue --format=%i|%T|%r`, by job id."""
    rows = [line.strip().split("|", 2) for line in listing.splitlines()]
    return {job_id: _seen(state, reason) for job_id, state, reason in (row for row in rows if len(row) == 3)}


def seen_by_scontrol(description: str) -> Seen | None:
    """Parses the output of `scontrol --oneliner show job`; None if it describes no job."""
    fields = dict(_OF_A_JOB.findall(description))
    if "JobState" not in fields:
        return None
    seen = _seen(fields["JobState"], fields.get("Reason", ""), fields.get("ExitCode", ""))
    with suppress(ValueError):  # "Unknown"
        return replace(seen, ended_at=datetime.fromisoformat(fields.get("EndTime", "")).timestamp())
    return seen


def seen_by_sacct(listing: str) -> Seen | None:
    """Parses the output of `sacct --parsable2 --noheader --allocations --format=State,ExitCode` for a job."""
    rows = [line.split("|") for line in listing.splitlines() if line.count("|") == 1]
    if not rows:
        return None
    state, exit_code = rows[-1]  # the last run of a requeued job
    return replace(_seen(state, exit_code=exit_code), is_forgotten=True)


def _seen(state: str, reason: str = "", exit_code: str = "") -> Seen:
    match = _EXIT.match(exit_code)
    code, signal = (int(match[1]), int(match[2])) if match else (0, 0)
    return Seen(
        state=state.split()[0] if state.strip() else "",  # such as "CANCELLED by 1000"
        reason="" if reason in ("None", "(null)") else reason,
        exit_code=-signal if signal else code,
    )
