"""Jobs on this machine: each has a folder, and a supervisor process that ends all of its processes.

The folder (`<jobs_dir>/<job id>`) holds the specification, the status and the logs; a handle only reads it, so any
process can attach to a job by its id. Variables of a job are in the supervisor's environment, never on disk.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from resources.backends.current import client_from_url
from resources.backends.job_folders import FolderClient, FolderJob
from resources.backends.processes import (
    device_variables,
    existing_folder,
    import_folders,
    interpreter_of,
    start_supervisor,
    variables_of,
    workspace_of,
)
from resources.backends.programs.endings import end_marked
from resources.config import CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BadInput, UnsatisfiableResources
from resources.jobs.jobs import JobRequest, JobStatus, polls
from resources.jobs.waiting import while_running
from resources.settings import settings

_SOON_SECONDS = 0.005
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
        self.wait(patience_seconds, raise_on_failure=False)
        details = self.process_details()
        for _ in polls(patience_seconds, longest_seconds=_SOON_SECONDS):
            if not (details["supervisor_pid"] and self._is_supervised(details)):  # it exits after its final status
                return

    def request_stop(self) -> None:
        """Signals the supervisor to end the job; waits only for the supervisor's start."""
        self.wait_until_started()  # an earlier signal would kill the supervisor
        details = self.process_details()
        if not JobStatus(details["status"]).finished and details["supervisor_pid"] is not None:
            with suppress(ProcessLookupError):
                os.kill(details["supervisor_pid"], signal.SIGTERM)

    def wait_until_started(self) -> None:
        """Blocks until the supervisor has started, so that other processes can attach."""
        for _ in polls(_SUPERVISOR_START_SECONDS, longest_seconds=_SOON_SECONDS):
            details = self.process_details()
            if details["supervisor_pid"] is not None or JobStatus(details["status"]).finished:
                return

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
                end_marked(ASSAY_JOB_ID=self.job_id)
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
        end_marked(ASSAY_JOB_ID=self.job_id)
        killed = details["supervisor_pid"] is not None
        reason = "its supervisor was killed" if killed else "its supervisor never started"
        preemptions = details["preemptions"] + killed
        details = {**details, "status": JobStatus.FAILED, "reason": reason, "preemptions": preemptions}
        self._write(details)
        return details


class LocalClient(FolderClient[LocalJob]):
    """Runs jobs as processes of this machine. A job ends with its client and its handle, unless it outlives its parent.

    Its processes get `grace_seconds` between SIGTERM and SIGKILL. The folders `dev` and `proc` below `device_root` show
    this machine's devices.
    """

    def __init__(
        self, jobs_dir: Path | None = None, *, grace_seconds: float = 10.0, device_root: Path = Path("/")
    ) -> None:
        super().__init__(jobs_dir or settings().jobs_dir, LocalJob)
        self._grace_seconds = grace_seconds
        self._device_root = device_root
        self._has_pruned = False

    @property
    def url(self) -> str:
        """Returns `local`, or an address with the folder of its jobs if that is not the default."""
        return "local" if self._root == settings().jobs_dir else f"local://{self._root.absolute()}"

    @property
    def is_local(self) -> bool:
        return True

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> LocalJob:
        if running := while_running(self._jobs.get(request.name), adopt_existing=adopt_existing):
            return running
        self.check_resources(request.resources)
        workspace = workspace_of(request.environment, backend="the local backend runs")
        working_directory = existing_folder(request.working_directory or workspace)
        python = interpreter_of(request.environment, workspace=workspace)
        with self._lock:
            if running := while_running(self._jobs.get(request.name), adopt_existing=adopt_existing):
                return running
            if not self._has_pruned:
                self._prune()
                self._has_pruned = True
            for name in [name for name, job in self._jobs.items() if job.has_ended()]:
                del self._jobs[name]  # each handle holds a pipe open
            folder = self._create_folder(
                request,
                python=python,
                imports=[str(workspace), *import_folders()],
                working_directory=working_directory,
                grace_seconds=self._grace_seconds,
                parent_pid=os.getpid(),
            )
            variables = variables_of(
                request.environment,
                python=python,
                defaults=device_variables(request.resources.device),
                given={"ASSAY_JOB_ID": folder.name, "ASSAY_JOBS": self.url},
            )
            marks = ["--outlives-parent"] if request.outlives_parent else []
            pipe = subprocess.DEVNULL if request.outlives_parent else subprocess.PIPE
            job = LocalJob(folder, supervisor=start_supervisor(folder, *marks, variables=variables, stdin=pipe))
            self._jobs[request.name] = job
        job.wait_until_started()
        return job

    def check_resources(self, resources: ResourceConfig) -> None:
        _check_device(resources.device, device_root=self._device_root)


def client_from_address(host: str, path: str) -> LocalClient:
    """Returns the client for the jobs in the folder `path` of this machine (empty: the default folder)."""
    if host:
        raise BadInput(
            expected="local, or local:///folder", found=f"local://{host}{path}", remedy="Correct ASSAY_JOBS."
        )
    return LocalClient(Path(path) if path else None)


def local_client() -> LocalClient:
    """Returns the client of this process; a forked child gets its own."""
    client = client_from_url("local")
    assert isinstance(client, LocalClient)
    return client


def _check_device(device: Device, *, device_root: Path) -> None:
    match device:
        case CpuConfig():
            return
        case TpuConfig() as tpu:
            devices = device_root / "dev"
            chips = max(len(list(devices.glob("accel[0-9]*"))), len(list((devices / "vfio").glob("[0-9]*"))))
            if tpu.slice.vms > 1 or chips < tpu.slice.chips:
                raise UnsatisfiableResources(
                    expected=f"the {tpu.slice.chips} chips of a TPU slice {tpu.variant} in a single machine",
                    found=f"{chips} TPU chips on this machine",
                    remedy="Submit to a backend with TPUs, or use ResourceConfig.with_cpu().",
                )
        case GpuConfig(count=count):
            driver = device_root / "proc/driver/nvidia/gpus"
            present = max(len(list(driver.glob("*"))), len(list((device_root / "dev").glob("nvidia[0-9]*"))))
            if present < count:
                raise UnsatisfiableResources(
                    expected=f"{count} NVIDIA GPUs",
                    found=f"{present} on this machine",
                    remedy="Ask for fewer, install the driver, or use ResourceConfig.with_cpu().",
                )
