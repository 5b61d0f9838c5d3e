"""Handle on a job of a Slurm cluster: reads the job's folder, which all machines see, and queries Slurm.

Reading changes nothing. The job's program writes its status; the process that submitted the job, which renews its lease
regularly, also takes the steps that Slurm leaves to a job's owner.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from resources.backends.job_folders import FolderJob
from resources.backends.slurm.slurm import Slurm
from resources.backends.slurm.states import LOST, Seen, after_failed_launch, from_outside
from resources.errors import JobTimeout
from resources.jobs.jobs import JobStatus
from resources.jobs.waiting import growing_pauses
from resources.storage.files import replace_text

LEASE, SLURM_ID, _STOP = "lease", "slurm_id", "stop"
"""Further files of the folder: the lease, Slurm's id of the job, and the request to end it."""
_STOP_SIGNAL, _UNTIL_HEARD_SECONDS = "USR2", 2.0
_END_MARGIN_SECONDS = 60.0  # 45 s of `slurm_batch.py` for processes that do not die, plus Slurm's time to end a job
_UNSUBMITTED_SECONDS = 120.0
_SETTLED_SECONDS = 15.0


class SlurmJob(FolderJob):
    """Handle on a job of a Slurm cluster, submitted by this process or attached to."""

    longest_pause_seconds = 2.0

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        super().__init__(folder)
        self._slurm = slurm

    @property
    def workspace(self) -> str:
        """Returns the name of the unpacked workspace folder that the job runs in."""
        return self._specification["workspace"]

    def process_details(self) -> dict[str, Any]:
        """Returns its `status.json`, or the state that follows from Slurm's if its program can report no more."""
        slurm_id = self._slurm_id
        known = self._read()
        if JobStatus(known["status"]).finished:
            return known
        return self._details(known, self._slurm.state(slurm_id) if slurm_id else None)

    def renew(self) -> bool:
        """Renews the lease, and requeues the job if Slurm has not; only for the process that submitted the job."""
        if not (self._folder / "status.json").exists():  # removed
            return False
        replace_text(self._folder / LEASE, str(time.time()))
        known, slurm_id = self._read(), self._slurm_id
        if JobStatus(known["status"]).finished:
            return False
        if not slurm_id:
            return True
        seen = self._slurm.state(slurm_id)
        is_to_stop = (self._folder / _STOP).exists()
        if seen is not None and seen.was_not_launched and not is_to_stop:
            budget: int = self._specification["max_retries_preemption"]
            now = after_failed_launch(known, name=_named(slurm_id), max_retries_preemption=budget)
            self._write(now)
            has_failed = JobStatus(now["status"]).finished
            (self._slurm.cancel if has_failed else self._slurm.release)(slurm_id)
            return not has_failed
        now = self._details(known, seen)
        if JobStatus(now["status"]).finished:
            if now != self._read():
                self._write(now)
            return False
        if seen is None or is_to_stop:
            return True
        if seen.waits_after_requeue and known.get("all_ended"):  # otherwise a copy may run on a lost node
            self._slurm.start_now(slurm_id)
        elif seen.has_ended:
            if seen.state not in LOST:
                self._write({**known, "left_machines": True, "all_ended": True})
            self._slurm.requeue(slurm_id)
        return True

    def terminate(self) -> None:
        self.request_stop()
        asked_at = time.monotonic()
        deadline = asked_at + self._specification["grace_seconds"] + _END_MARGIN_SECONDS
        has_cancelled = False
        for pause_seconds in growing_pauses():
            seen = self._slurm.state_now(self._slurm_id) if self._slurm_id else None
            status = JobStatus(self._details(self._read(), seen)["status"])
            if status.finished and (seen is None or seen.has_ended):
                return
            if seen is not None and seen.is_waiting:
                self._slurm.cancel(self._slurm_id)
            elif time.monotonic() > deadline and not has_cancelled:
                self._slurm.cancel(self._slurm_id)
                deadline, has_cancelled = time.monotonic() + _END_MARGIN_SECONDS, True
            elif time.monotonic() > deadline:
                raise JobTimeout(
                    expected=f"Slurm to end {self.job_id}, its job {self._slurm_id}",
                    found=f"it is {seen.state if seen else 'not heard of'}",
                    remedy="Look with squeue at its nodes; an operator may have to end it.",
                )
            elif time.monotonic() - asked_at > _UNTIL_HEARD_SECONDS:  # a program that had just started may miss it
                self._slurm.signal(self._slurm_id, _STOP_SIGNAL)
                asked_at = time.monotonic()
            time.sleep(pause_seconds)

    def request_stop(self) -> None:
        """Requests the end of the job, and returns at once."""
        if self.status().finished:
            return
        (self._folder / _STOP).touch()
        slurm_id = self._slurm_id
        seen = self._slurm.state_now(slurm_id) if slurm_id else None
        if seen is not None and seen.is_waiting:
            self._slurm.cancel(slurm_id)
        elif seen is not None and not seen.has_ended:
            self._slurm.signal(slurm_id, _STOP_SIGNAL)

    @property
    def _where(self) -> str:
        return f"read {self._folder}/task-*/replica-0.log, and batch.log there"

    @property
    def _slurm_id(self) -> str:
        with suppress(FileNotFoundError):
            return (self._folder / SLURM_ID).read_text().strip()
        return ""  # another process is submitting it, or died while submitting it

    def _file(self, name: str, replica: int) -> Path:
        stem, dot, suffix = name.partition(".")
        return self._folder / f"task-{replica}" / f"{stem}-0{dot}{suffix}"

    def _details(self, known: dict[str, Any], seen: Seen | None) -> dict[str, Any]:
        if not (slurm_id := self._slurm_id):
            if time.time() - self._specification["submitted_at"] < _UNSUBMITTED_SECONDS:
                return {**known, "reason": "is being submitted"}
            return {**known, "status": JobStatus.FAILED, "reason": "never submitted"}
        if seen is None or seen.has_ended:
            known = self._read()  # it may have finished before it ended
        if JobStatus(known["status"]).finished:
            return known
        return from_outside(
            known,
            seen,
            name=_named(slurm_id),
            max_retries_preemption=self._specification["max_retries_preemption"],
            is_to_stop=(self._folder / _STOP).exists(),
            is_owned=self._is_owned(),
            is_recent=seen is not None and time.time() - (seen.ended_at or 0.0) < _SETTLED_SECONDS,
            log=self._folder / "batch.log",
        )

    def _is_owned(self) -> bool:
        try:
            renewed_at = (self._folder / LEASE).stat().st_mtime
        except FileNotFoundError:
            return False
        return time.time() - renewed_at < 2 * self._specification["lease_seconds"]


def _named(slurm_id: str) -> str:
    return f"Slurm's job {slurm_id}"
