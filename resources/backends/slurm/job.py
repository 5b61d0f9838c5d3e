"""Handle on a job of a Slurm cluster: reads the job's folder, which all machines see, and queries Slurm."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from resources.backends.programs.endings import OUT_OF_MEMORY
from resources.backends.slurm.slurm import Slurm
from resources.backends.slurm.states import LOST, Seen, classify_slurm
from resources.errors import JobTimeout
from resources.jobs.jobs import JobDetails, JobStatus
from resources.jobs.logs import LogPart, check_replica, logs_by_replica, part_of_file
from resources.jobs.results import raised_by, result_of
from resources.jobs.waiting import growing_pauses, wait_until_finished
from resources.storage import storage
from resources.storage.files import replace_json, tail

CALL = "call.pickle"
SLURM_ID = "slurm_id"
STOP = "stop"
_STOP, _UNTIL_HEARD_SECONDS = "USR2", 2.0
_END_MARGIN_SECONDS = 60.0  # 45 s of `slurm_batch.py` for processes that do not die, plus Slurm's time to end a job
_UNSUBMITTED_SECONDS = 120.0
_LONGEST_PAUSE_SECONDS = 2.0


class SlurmJob:
    """Handle on a job of a Slurm cluster, submitted by this process or attached to."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self._slurm = slurm
        self._folder = folder
        self._specification: dict[str, Any] = json.loads((folder / "specification.json").read_text())

    @property
    def job_id(self) -> str:
        return self._folder.name

    @property
    def lease(self) -> Path:
        """Returns the file that the submitter rewrites regularly."""
        return self._folder / "lease"

    @property
    def workspace(self) -> str:
        """Returns the name of the unpacked workspace folder that the job runs in."""
        return self._specification["workspace"]

    def status(self) -> JobStatus:
        return self._look()[0]

    def details(self) -> JobDetails:
        """Returns the job's state with, for a waiting job, Slurm's reason."""
        status, reason, counts = self._look()
        return JobDetails(
            job_id=self.job_id,
            name=self._specification["name"],
            status=status,
            reason=reason,
            attempts=counts["attempts"],
            failures=counts["failures"],
            preemptions=counts["preemptions"],
            submitted_at=self._specification["submitted_at"],
            replicas=self._specification["replicas"],
            returns=(self._folder / CALL).exists(),
        )

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        return wait_until_finished(
            self,
            timeout,
            raise_on_failure=raise_on_failure,
            where=self._where,
            cause=lambda: raised_by(self, self._left),
            longest_pause_seconds=_LONGEST_PAUSE_SECONDS,
        )

    def result(self, timeout: float | None = None, *, replica: int = 0) -> Any:
        return result_of(self, timeout, replica=replica, read=lambda: self._left(replica), where=self._where)

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        return logs_by_replica(
            lambda index: tail(self._task(index) / "replica-0.log", max_lines),
            self._specification["replicas"],
            replica=replica,
        )

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        check_replica(replica, self._specification["replicas"])
        return part_of_file(self._task(replica) / "replica-0.log", after)

    def announced(self, replica: int = 0) -> str | None:
        with suppress(FileNotFoundError):
            return storage.read_bytes(str(self._task(replica) / "announced-0")).decode()
        return None

    def terminate(self) -> None:
        self.request_stop()
        asked_at = time.monotonic()
        deadline = asked_at + self._specification["grace_seconds"] + _END_MARGIN_SECONDS
        has_cancelled = False
        for pause_seconds in growing_pauses():
            seen = self._slurm.state_now(self._slurm_id) if self._slurm_id else None
            if self._look(seen)[0].finished and (seen is None or seen.has_ended):
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
                self._slurm.signal(self._slurm_id, _STOP)
                asked_at = time.monotonic()
            time.sleep(pause_seconds)

    def request_stop(self) -> None:
        """Requests the end of the job, and returns at once."""
        if self.status().finished:
            return
        (self._folder / STOP).touch()
        slurm_id = self._slurm_id
        seen = self._slurm.state_now(slurm_id) if slurm_id else None
        if seen is not None and seen.is_waiting:
            self._slurm.cancel(slurm_id)
        elif seen is not None and not seen.has_ended:
            self._slurm.signal(slurm_id, _STOP)

    @property
    def _where(self) -> str:
        return f"read {self._folder}/task-*/replica-0.log, and batch.log there"

    @property
    def _slurm_id(self) -> str:
        with suppress(FileNotFoundError):
            return (self._folder / SLURM_ID).read_text().strip()
        return ""  # another process is submitting it, or died while submitting it

    def _task(self, replica: int) -> Path:
        return self._folder / f"task-{replica}"

    def _left(self, replica: int) -> bytes | None:
        with suppress(FileNotFoundError):
            return storage.read_bytes(str(self._task(replica) / "result-0"))
        return None

    def _read(self) -> dict[str, Any]:
        return json.loads((self._folder / "status.json").read_text())

    def _look(self, seen: Seen | None = None) -> tuple[JobStatus, str | None, dict[str, Any]]:
        known = self._read()
        if JobStatus(known["status"]).finished:
            return JobStatus(known["status"]), known["reason"], known
        slurm_id = self._slurm_id
        if not slurm_id:
            young = time.time() - self._specification["submitted_at"] < _UNSUBMITTED_SECONDS
            return (
                (JobStatus.PENDING, "is being submitted", known) if young else self._bury("failed", "never submitted")
            )
        seen = seen or self._slurm.state(slurm_id)
        if seen is None or seen.has_ended:
            known = self._read()  # it may have finished before it ended
            if JobStatus(known["status"]).finished:
                return JobStatus(known["status"]), known["reason"], known
            return self._settle(slurm_id)
        if seen.waits_after_requeue and known.get("all_ended"):  # otherwise a copy may run on a lost node
            self._slurm.start_now(slurm_id)
        if seen.was_not_launched and not (self._folder / STOP).exists():
            return self._launch_again(slurm_id, known)
        if seen.is_waiting:
            return JobStatus.PENDING, f"Slurm's job {slurm_id} waits: {seen.reason or seen.state}", known
        reason = None if known["attempts"] else f"Slurm's job {slurm_id} begins"
        return JobStatus(known["status"]), reason, known

    def _launch_again(self, slurm_id: str, known: dict[str, Any]) -> tuple[JobStatus, str | None, dict[str, Any]]:
        words = f"a node could not start Slurm's job {slurm_id}"
        if self._is_used_up(known):
            self._slurm.cancel(slurm_id)
            return self._bury_used_up(known, words)
        known = {**known, "preemptions": known["preemptions"] + 1, "all_ended": False}
        replace_json(self._folder / "status.json", known)
        self._slurm.release(slurm_id)
        return JobStatus.PENDING, f"{words}, and it is queued again", known

    def _settle(self, slurm_id: str) -> tuple[JobStatus, str | None, dict[str, Any]]:
        known, seen = self._read(), self._slurm.state_now(slurm_id)
        if (self._folder / STOP).exists():
            return self._bury("stopped", "terminated")
        if seen is None:
            return self._bury(
                "failed", f"Slurm knows its job {slurm_id} no more, and its program did not say how it ended"
            )
        words = f"Slurm's job {slurm_id} ended as {seen.state}"
        ending = classify_slurm(seen)
        if known.get("left_machines") and ending in ("failed", "succeeded"):
            ending = "preempted"  # Slurm shows this state briefly during a requeue
        if seen.is_forgotten and ending in ("preempted", None):
            return self._bury(
                "failed",
                f"{words}, which was read too late: Slurm has forgotten it, and cannot queue it again",
                preempted=1,
            )
        match ending:
            case None:
                return JobStatus.PENDING, f"Slurm's job {slurm_id} is {seen.state}", known
            case "stopped":
                return self._bury("stopped", f"cancelled with scancel: {words}")
            case "preempted":
                if self._is_used_up(known):
                    return self._bury_used_up(known, words)
                if seen.state not in LOST:
                    replace_json(self._folder / "status.json", {**known, "left_machines": True, "all_ended": True})
                self._slurm.requeue(slurm_id)
                return JobStatus.PENDING, f"{words}, and is queued again", known
            case _ if seen.state == "OUT_OF_MEMORY":
                return self._bury("failed", OUT_OF_MEMORY, failed=1)
            case _:
                return self._bury("failed", f"{words}; read {self._folder}/batch.log", failed=1)

    def _is_used_up(self, known: dict[str, Any]) -> bool:
        return known["preemptions"] >= self._specification["max_retries_preemption"]

    def _bury_used_up(self, known: dict[str, Any], words: str) -> tuple[JobStatus, str | None, dict[str, Any]]:
        return self._bury("failed", f"ended from outside {known['preemptions'] + 1} times: {words}", preempted=1)

    def _bury(
        self, status: str, reason: str, *, failed: int = 0, preempted: int = 0
    ) -> tuple[JobStatus, str | None, dict[str, Any]]:
        known = self._read()
        counts = {"failures": known["failures"] + failed, "preemptions": known["preemptions"] + preempted}
        known = {**known, **counts, "status": status, "reason": reason}
        replace_json(self._folder / "status.json", known)
        return JobStatus(status), reason, known
