"""Handle on a job of this machine: reads the job's folder, and signals its supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from resources.jobs.jobs import JobDetails, JobStatus
from resources.jobs.logs import LogPart, check_replica, logs_by_replica, part_of_file
from resources.jobs.results import raised_by, result_of
from resources.jobs.waiting import wait_until_finished
from resources.storage import storage
from resources.storage.files import replace_json, tail

CALL = "call.pickle"
"""File name of a job's callable in its folder."""
_SUPERVISOR_START_SECONDS = 60.0  # 0.05 s on an idle machine
_TERMINATE_MARGIN_SECONDS = 40.0  # more than the supervisor itself waits for a process to die of SIGKILL


class LocalJob:
    """Handle on a job of this machine, submitted by this process or attached to."""

    def __init__(self, folder: Path, *, supervisor: subprocess.Popen[bytes] | None = None) -> None:
        self._folder = folder
        self._supervisor = supervisor  # kept: the supervisor detects the end of this process by its standard input
        self._last: dict[str, Any] | None = None
        self._specification: dict[str, Any] = json.loads((folder / "specification.json").read_text())

    @property
    def job_id(self) -> str:
        return self._folder.name

    @property
    def outlives_parent(self) -> bool:
        return self._specification["outlives_parent"]

    def details(self) -> JobDetails:
        """Returns the job's state and reason; failed if its supervisor was killed."""
        now = self.process_details()
        return JobDetails(
            job_id=self.job_id,
            name=self._specification["name"],
            status=JobStatus(now["status"]),
            reason=now["reason"],
            attempts=now["attempts"],
            failures=now["failures"],
            preemptions=now["preemptions"],
            submitted_at=self._specification["submitted_at"],
            replicas=self._specification["replicas"],
            returns=(self._folder / CALL).exists(),
        )

    def process_details(self) -> dict[str, Any]:
        """Returns its `status.json`, with the supervisor's process id, and each replica's process id and exit code."""
        details = self._read()
        if not JobStatus(details["status"]).finished and not self._is_supervised(details):
            details = self._read()  # it may have finished before it ended
            details = details if JobStatus(details["status"]).finished else self._bury(details)
        pipe = self._supervisor.stdin if self._supervisor is not None else None
        if pipe is not None and JobStatus(details["status"]).finished:
            pipe.close()
        return details

    def status(self) -> JobStatus:
        return JobStatus(self.process_details()["status"])

    def has_ended(self) -> bool:
        """Returns True if it has finished and its supervisor is gone; reads files only after the supervisor's end."""
        return self._supervisor is not None and self._supervisor.poll() is not None and self.status().finished

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        return wait_until_finished(
            self,
            timeout,
            raise_on_failure=raise_on_failure,
            where=self._where,
            cause=lambda: raised_by(self, self._left),
            longest_pause_seconds=0.25,
        )

    def result(self, timeout: float | None = None, *, replica: int = 0) -> Any:
        return result_of(self, timeout, replica=replica, read=lambda: self._left(replica), where=self._where)

    def _left(self, replica: int) -> bytes | None:
        with suppress(FileNotFoundError):
            return storage.read_bytes(str(self._folder / f"result-{replica}"))
        return None

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        return logs_by_replica(
            lambda index: tail(self._folder / f"replica-{index}.log", max_lines),
            self._specification["replicas"],
            replica=replica,
        )

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        check_replica(replica, self._specification["replicas"])
        return part_of_file(self._folder / f"replica-{replica}.log", after)

    def announced(self, replica: int = 0) -> str | None:
        try:
            return storage.read_bytes(str(self._folder / f"announced-{replica}")).decode()
        except FileNotFoundError:
            return None

    def terminate(self) -> None:
        self.request_stop()
        patience_seconds = self._specification["grace_seconds"] + _TERMINATE_MARGIN_SECONDS
        deadline = time.monotonic() + patience_seconds
        self.wait(patience_seconds, raise_on_failure=False)
        details = self.process_details()
        while details["supervisor_pid"] and self._is_supervised(details) and time.monotonic() < deadline:
            time.sleep(0.005)  # the supervisor writes the final status before it exits

    def request_stop(self) -> None:
        """Signals the supervisor to end the job; waits only for the supervisor's start."""
        self.wait_until_started()  # an earlier signal would kill the supervisor
        details = self.process_details()
        if not JobStatus(details["status"]).finished and details["supervisor_pid"] is not None:
            _send(details["supervisor_pid"], signal.SIGTERM)

    def wait_until_started(self) -> None:
        """Blocks until the supervisor has started, so that other processes can attach."""
        deadline = time.monotonic() + _SUPERVISOR_START_SECONDS
        while time.monotonic() < deadline:
            details = self.process_details()
            if details["supervisor_pid"] is not None or JobStatus(details["status"]).finished:
                return
            time.sleep(0.005)

    @property
    def _where(self) -> str:
        return f"read {self._folder}/replica-*.log"

    def _read(self) -> dict[str, Any]:
        try:
            details = json.loads((self._folder / "status.json").read_text())
        except FileNotFoundError:
            if (details := self._last) is None:
                raise
            if not JobStatus(details["status"]).finished:  # its supervisor cannot report any more
                self._kill_processes()
                details = {**details, "status": JobStatus.FAILED, "reason": f"{self._folder} was removed"}
        self._last = details
        return details

    def _is_supervised(self, details: dict[str, Any]) -> bool:
        if self._supervisor is not None:
            return self._supervisor.poll() is None
        pid = details["supervisor_pid"]
        if pid is None:  # another process is submitting it, or died while submitting it
            return time.time() - self._specification["submitted_at"] < _SUPERVISOR_START_SECONDS
        try:
            if not Path("/proc/self").exists():
                os.kill(pid, 0)
                return True
            # A reused process id has another command line, and a zombie has none.
            return os.fsencode(self._folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False

    def _bury(self, details: dict[str, Any]) -> dict[str, Any]:
        self._kill_processes()
        killed = details["supervisor_pid"] is not None
        reason = "its supervisor was killed" if killed else "its supervisor never started"
        preemptions = details["preemptions"] + killed
        details = {**details, "status": JobStatus.FAILED, "reason": reason, "preemptions": preemptions}
        replace_json(self._folder / "status.json", details)
        return details

    def _kill_processes(self) -> None:
        marker = f"ASSAY_JOB_ID={self.job_id}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if marker in (folder / "environ").read_bytes().split(b"\0"):
                    _send(int(folder.name), signal.SIGKILL)
            except OSError:
                continue


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
