"""Jobs on this machine: each has a folder, and a supervisor process that ends all of its processes.

The folder (`<jobs_dir>/<job id>`) holds the specification, the status and the logs; a handle only reads it, so any
process can attach to a job by its id. Variables of a job are in the supervisor's environment, never on disk.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

from resources.backends.job_folders import JobFolders
from resources.backends.local.job import LocalJob
from resources.backends.processes import (
    PROGRAMS,
    device_variables,
    existing_folder,
    import_folders,
    interpreter_of,
    variables_of,
    workspace_of,
)
from resources.config import CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BadInput, UnsatisfiableResources
from resources.jobs.calls import pickled
from resources.jobs.jobs import Call, JobDetails, JobRequest, create_environment
from resources.jobs.waiting import while_running
from resources.settings import settings


class LocalClient:
    """Runs jobs as processes of this machine. A job ends with its client and its handle, unless it outlives its parent.

    Args:
        jobs_dir: parent of the job folders; by default `settings().jobs_dir`.
        grace_seconds: time between SIGTERM and SIGKILL.
        device_root: root of the `dev` and `proc` folders that show this machine's devices.
    """

    def __init__(
        self, jobs_dir: Path | None = None, *, grace_seconds: float = 10.0, device_root: Path = Path("/")
    ) -> None:
        self._jobs_dir = jobs_dir or settings().jobs_dir
        self._folders = JobFolders(self._jobs_dir, LocalJob)
        self._grace_seconds = grace_seconds
        self._device_root = device_root
        self._jobs: dict[str, LocalJob] = {}
        self._has_pruned = False
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Returns `local`, or an address with the folder of its jobs if that is not the default."""
        return "local" if self._jobs_dir == settings().jobs_dir else f"local://{self._jobs_dir.absolute()}"

    @property
    def description(self) -> str:
        return self.url

    @property
    def is_local(self) -> bool:
        return True

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> LocalJob:
        """Starts a job after building its environment, if it needs its own."""
        if running := while_running(self._jobs.get(request.name), adopt_existing=adopt_existing):
            return running
        self.check_resources(request.resources)
        environment = request.environment or create_environment()
        workspace = workspace_of(environment, backend="the local backend runs")
        working_directory = existing_folder(request.working_directory or workspace)
        job_id = f"{request.name}-{secrets.token_hex(4)}"
        call = pickled(request.entrypoint, job_id=job_id) if isinstance(request.entrypoint, Call) else None
        python = interpreter_of(environment, workspace=workspace)
        with self._lock:
            if running := while_running(self._jobs.get(request.name), adopt_existing=adopt_existing):
                return running
            if not self._has_pruned:
                self._folders.prune()
                self._has_pruned = True
            for name in [name for name, job in self._jobs.items() if job.has_ended()]:
                del self._jobs[name]  # each handle holds a pipe open
            folder = self._folders.create(
                request,
                job_id,
                call=call,
                python=python,
                imports=[str(workspace), *import_folders()],
                working_directory=working_directory,
                grace_seconds=self._grace_seconds,
                parent_pid=os.getpid(),
            )
            variables = variables_of(
                environment,
                python=python,
                defaults=device_variables(request.resources.device),
                given={"ASSAY_JOB_ID": job_id, "ASSAY_JOBS": self.url},
            )
            job = _start(folder, variables=variables, outlives_parent=request.outlives_parent)
            self._jobs[request.name] = job
        job.wait_until_started()
        return job

    def attach(self, job_id: str) -> LocalJob:
        """Returns a handle on a job of any process of this machine; raises `BadInput` if there is none."""
        return self._folders.attach(job_id)

    def jobs(self) -> list[JobDetails]:
        """Returns the jobs of all processes of this machine."""
        return self._folders.details()

    def check_resources(self, resources: ResourceConfig) -> None:
        _check_device(resources.device, device_root=self._device_root)

    def shutdown(self) -> None:
        jobs = [job for job in self._jobs.values() if not job.outlives_parent]
        for job in jobs:
            job.request_stop()
        for job in jobs:
            job.terminate()


def client_from_address(host: str, path: str) -> LocalClient:
    """Returns the client for the jobs in the folder `path` of this machine (empty: the default folder)."""
    if host:
        raise BadInput(
            expected="local, or local:///folder", found=f"local://{host}{path}", remedy="Correct ASSAY_JOBS."
        )
    return LocalClient(Path(path)) if path else local_client()


def local_client() -> LocalClient:
    """Returns the client of this process; a forked child gets its own."""
    return _client_of_process(os.getpid())


@cache
def _client_of_process(process_id: int) -> LocalClient:
    return LocalClient()


def _start(folder: Path, *, variables: dict[str, str], outlives_parent: bool) -> LocalJob:
    marks = ["--outlives-parent"] if outlives_parent else []
    with (folder / "supervisor.log").open("wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", str(PROGRAMS / "supervise.py"), str(folder), *marks],
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL if outlives_parent else subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return LocalJob(folder, supervisor=supervisor)


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
