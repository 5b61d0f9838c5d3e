"""Handle on a job of this machine: reads the job's folder, and signals its supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from resources.backends.job_folders import FolderJob
from resources.jobs.jobs import JobStatus

_SUPERVISOR_START_SECONDS = 60.0  # 0.05 s on an idle machine
_TERMINATE_MARGIN_SECONDS = 40.0  # more than the supervisor itself waits for a process to die of SIGKILL


class LocalJob(FolderJob):
    """Handle on a job of this machine, submitted by this process or attached to."""

    longest_pause_seconds = 0.25

    def __init__(self, folder: Path, *, supervisor: subprocess.Popen[bytes] | None = None) -> None:
        super().__init__(folder)
        self._supervisor = supervisor  # kept: the supervisor detects the end of this process by its standard input
        self._last: dict[str, Any] | None = None

    def process_details(self) -> dict[str, Any]:
        """Returns its `status.json`, with the supervisor's process id, and each replica's process id and exit code.

        A job with a killed supervisor has failed.
        """
        details = self._known()
        if not JobStatus(details["status"]).finished and not self._is_supervised(details):
            details = self._known()  # it may have finished before it ended
            details = details if JobStatus(details["status"]).finished else self._bury(details)
        pipe = self._supervisor.stdin if self._supervisor is not None else None
        if pipe is not None and JobStatus(details["status"]).finished:
            pipe.close()
        return details

    def has_ended(self) -> bool:
        """Returns True if it has finished and its supervisor is gone; reads files only after the supervisor's end."""
        return self._supervisor is not None and self._supervisor.poll() is not None and self.status().finished

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

    def _file(self, name: str, replica: int) -> Path:
        stem, dot, suffix = name.partition(".")
        return self._folder / f"{stem}-{replica}{dot}{suffix}"

    def _known(self) -> dict[str, Any]:
        try:
            details = self._read()
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
        self._write(details)
        return details

    def _kill_processes(self) -> None:
        marker = f"ASSAY_JOB_ID={self.job_id}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if marker in (folder / "environ").read_bytes().split(b"\0"):
                    _send(int(folder.name), signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
