"""States of a Slurm job, translated into our words; pure, so that every row can be tested."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from resources.backends.programs.endings import ENDINGS, Cause, Outcome, cause_of_exit

Ending = Outcome | Literal["stopped"]

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
"""By Slurm's state of a batch job whose program did not say how its job ended; two depend on more than the state."""
LOST = ("BOOT_FAIL", "NODE_FAIL")
"""States after which processes of the job may still run on a node that Slurm does not hear of."""
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"}
_NOT_LAUNCHED = "launch failed requeued held"
_EXIT = re.compile(r"(\d+):(\d+)")
_OF_A_JOB = re.compile(r"(?:^|\s)(JobState|Reason|ExitCode|Restarts)=(\S+)")


@dataclass(frozen=True)
class Seen:
    """One batch job, as Slurm knows it."""

    state: str
    """Such as RUNNING or NODE_FAIL."""
    reason: str = ""
    """The reason that it waits, such as Resources or Priority; empty where Slurm has none."""
    exit_code: int = 0
    """Of its program; negative ones are signals."""
    is_forgotten: bool = False
    """Known to the accounting only: the controller cannot queue it again."""

    @property
    def has_ended(self) -> bool:
        """Returns True if nothing of it runs, and Slurm will not start it by itself."""
        return self.state in _ENDED or self.is_forgotten

    @property
    def is_waiting(self) -> bool:
        """Returns True if it has no machines."""
        return self.state in _WAITING

    @property
    def waits_after_requeue(self) -> bool:
        """Returns True if only a time keeps it from running: what Slurm queues again waits for two minutes."""
        return self.state == "PENDING" and self.reason == "BeginTime"

    @property
    def was_not_launched(self) -> bool:
        """Returns True if a node could not start it, for which Slurm holds it until somebody releases it."""
        return self.is_waiting and self.reason.replace("_", " ").startswith(_NOT_LAUNCHED)


def classify_slurm(seen: Seen) -> Ending | None:
    """Returns the kind of end of a batch job whose program did not say it; None while it has not ended."""
    if seen.state not in _ENDED:
        return None
    if seen.state == "CANCELLED":
        return "stopped"
    return ENDINGS[_ENDED[seen.state] or cause_of_exit(seen.exit_code)]


def seen_by_squeue(listing: str) -> dict[str, Seen]:
    """Returns what `squeue --format=%i|%T|%r` says, by the id of the job."""
    rows = [line.strip().split("|", 2) for line in listing.splitlines()]
    return {job_id: _seen(state, reason) for job_id, state, reason in (row for row in rows if len(row) == 3)}


def seen_by_scontrol(description: str) -> Seen | None:
    """Returns what `scontrol --oneliner show job` says of one; None where it says nothing of a job."""
    fields = dict(_OF_A_JOB.findall(description))
    if "JobState" not in fields:
        return None
    return _seen(fields["JobState"], fields.get("Reason", ""), fields.get("ExitCode", ""))


def seen_by_sacct(listing: str) -> Seen | None:
    """Returns what `sacct --parsable2 --noheader --allocations --format=State,ExitCode` says of one job."""
    rows = [line.split("|") for line in listing.splitlines() if line.count("|") == 1]
    if not rows:
        return None
    state, exit_code = rows[-1]  # of a job that was requeued, the last run
    return replace(_seen(state, exit_code=exit_code), is_forgotten=True)


def _seen(state: str, reason: str = "", exit_code: str = "") -> Seen:
    found = _EXIT.match(exit_code)
    code, signal = (int(found[1]), int(found[2])) if found else (0, 0)
    return Seen(
        state=state.split()[0] if state.strip() else "",  # "CANCELLED by 1000"
        reason="" if reason in ("None", "(null)") else reason,
        exit_code=-signal if signal else code,
    )
