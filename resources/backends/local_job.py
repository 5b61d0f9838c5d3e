"""A handle on a job of this machine: reads the job's folder, and signals its supervisor."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from resources.errors import BadInput, JobFailed, JobTimeout
from resources.jobs import JobStatus

_TAIL_BYTES = 1 << 20
_SUPERVISOR_START_SECONDS = 60.0  # 0.05 s on an idle machine
_TERMINATE_MARGIN_SECONDS = 40.0  # more than the supervisor itself waits for a process to die of SIGKILL


class LocalJob:
    """A handle on a job of this machine, submitted here or attached to."""

    def __init__(self, folder: Path, *, supervisor: subprocess.Popen[bytes] | None = None) -> None:
        self._folder = folder
        self._supervisor = supervisor  # kept: its standard input is what tells it that we live
        self._specification: dict[str, Any] = json.loads((folder / "specification.json").read_text())

    @property
    def job_id(self) -> str:
        """Name of the job's folder."""
        return self._folder.name

    @property
    def outlives_parent(self) -> bool:
        """Whether it goes on when the process that submitted it ends."""
        return self._specification["outlives_parent"]

    def details(self) -> dict[str, Any]:
        """Status with its reason, attempts, failures, preemptions, and process id and exit code by replica."""
        details = self._read()
        if JobStatus(details["status"]).finished or self._is_supervised(details):
            return details
        details = self._read()  # it may have finished, and only then ended
        return details if JobStatus(details["status"]).finished else self._bury(details)

    def status(self) -> JobStatus:
        """Where the job stands now; failed when its supervisor was killed."""
        return JobStatus(self.details()["status"])

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Blocks until the job has finished, for at most `timeout` seconds.

        Raises:
            JobTimeout: the job was still running by then; it goes on.
            JobFailed: the job failed or was stopped, unless `raise_on_failure` is False.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        poll_seconds = 0.01
        while not (status := self.status()).finished:
            remaining = poll_seconds if deadline is None else deadline - time.monotonic()
            if remaining <= 0:
                raise JobTimeout(
                    expected=f"job {self.job_id} to have finished after {timeout:g} s",
                    found=f"it is {status}",
                    remedy=f"Wait longer, terminate it, or see what it does in {self._folder}/replica-*.log",
                )
            time.sleep(min(poll_seconds, remaining))
            poll_seconds = min(poll_seconds * 1.5, 0.25)
        if raise_on_failure and status is not JobStatus.SUCCEEDED:
            raise self._failure()
        return status

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        """The last lines, a megabyte at most, written so far by one replica, or by each of them under a heading.

        Raises:
            BadInput: there is no such replica.
        """
        count: int = self._specification["replicas"]
        if replica is None and count > 1:
            return "\n".join(
                f"==> replica {index} <==\n{self.logs(max_lines, replica=index)}" for index in range(count)
            )
        if not 0 <= (index := replica or 0) < count:
            raise BadInput(
                expected=f"a replica from 0 to {count - 1}", found=str(replica), remedy="Choose one of those."
            )
        return _tail(self._folder / f"replica-{index}.log", max_lines)

    def terminate(self) -> None:
        """Ends the job with everything it started, and returns when nothing of it is left.

        Raises:
            JobTimeout: a process survived SIGKILL, which only a broken disk or driver makes possible.
        """
        self.request_stop()
        grace_seconds: float = self._specification["grace_seconds"]
        self.wait(grace_seconds + _TERMINATE_MARGIN_SECONDS, raise_on_failure=False)

    def request_stop(self) -> None:
        """Asks the supervisor to end the job, and returns at once."""
        details = self.details()
        if not JobStatus(details["status"]).finished and details["supervisor_pid"] is not None:
            _send(details["supervisor_pid"], signal.SIGTERM)

    def wait_until_started(self) -> None:
        """Blocks until the supervisor has taken over, so that whoever attaches finds it."""
        deadline = time.monotonic() + _SUPERVISOR_START_SECONDS
        while time.monotonic() < deadline:
            details = self.details()
            if details["supervisor_pid"] is not None or JobStatus(details["status"]).finished:
                return
            time.sleep(0.005)

    def _read(self) -> dict[str, Any]:
        return json.loads((self._folder / "status.json").read_text())

    def _is_supervised(self, details: dict[str, Any]) -> bool:
        if self._supervisor is not None:
            return self._supervisor.poll() is None
        pid = details["supervisor_pid"]
        if pid is None:
            return True  # another process is submitting it just now
        try:
            if not Path("/proc/self").exists():
                os.kill(pid, 0)
                return True
            # A reused process id has another command line, and a zombie has none.
            return os.fsencode(self._folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False

    def _bury(self, details: dict[str, Any]) -> dict[str, Any]:
        """Ends what a killed supervisor has left, known by the job's id in its environment, and says so."""
        marker = f"ASSAY_JOB_ID={self.job_id}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if marker in (folder / "environ").read_bytes().split(b"\0"):
                    _send(int(folder.name), signal.SIGKILL)
            except OSError:
                continue
        details = {**details, "status": JobStatus.FAILED, "reason": "its supervisor was killed"}
        write_json(self._folder / "status.json", details)
        return details

    def _failure(self) -> JobFailed:
        details = self.details()
        codes = ", ".join(str(replica["exit_code"]) for replica in details["replicas"])
        reason = f": {details['reason']}" if details["reason"] else ""
        return JobFailed(
            expected=f"job {self.job_id} to succeed",
            found=f"it {'was ' if details['status'] == JobStatus.STOPPED else ''}{details['status']}{reason} "
            f"(exit codes: {codes or 'none'})\n{self.logs(20)}".rstrip(),
            remedy=f"Read {self._folder}/replica-*.log",
        )


def _tail(path: Path, max_lines: int) -> str:
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:  # nothing has started yet
        return ""
    return "\n".join(lines[-max_lines:] if max_lines > 0 else [])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a file at once, so that no reader sees half of it."""
    write_text(path, json.dumps(content))


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once, so that no reader sees half of it."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    unfinished.write_text(text)
    unfinished.replace(path)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
