"""Jobs on this machine: each has a folder, and a supervisor process that leaves nothing of it behind.

The folder (`<jobs_dir>/<job id>`) holds the specification, the status and the logs; a handle only reads it, so any
process can attach to a job by its id. Variables of a job travel in the supervisor's environment, never on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from resources.backends.calls import pickled
from resources.backends.local_job import LocalJob
from resources.config import CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig
from resources.environments import EnvironmentSpec, ensure_environment
from resources.errors import BadInput, UnsatisfiableResources
from resources.files import replace_json, replace_text
from resources.jobs import (
    Call,
    Command,
    EnvironmentConfig,
    JobAlreadyExists,
    JobDetails,
    JobRequest,
    create_environment,
)
from resources.settings import process_environment, settings

_PROGRAMS = Path(__file__).parents[1] / "programs"
_KEPT_JOBS = 200


class LocalClient:
    """Runs jobs as processes of this machine. A job ends when its client and its handle are gone.

    Args:
        jobs_dir: parent of the job folders; the one in the settings when None.
        grace_seconds: what processes get between SIGTERM and SIGKILL.
        device_root: where `dev` and `proc` show the devices of this machine.
    """

    def __init__(
        self, jobs_dir: Path | None = None, *, grace_seconds: float = 10.0, device_root: Path = Path("/")
    ) -> None:
        self._jobs_dir = jobs_dir or settings().jobs_dir
        self._grace_seconds = grace_seconds
        self._device_root = device_root
        self._jobs: dict[str, LocalJob] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """See `Client.url`."""
        return "local"

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> LocalJob:
        """Starts a job, after building its environment where it wants one of its own.

        Raises:
            JobAlreadyExists: a job of that name is running; with `adopt_existing` its handle is returned instead.
            UnsatisfiableResources: a device or an image that this backend cannot give.
            BadInput: the callable cannot be pickled, or a folder does not exist.
            EnvironmentBuildFailed: the packages asked for cannot be installed.
        """
        if running := self._running(request.name, adopt_existing=adopt_existing):
            return running
        self.check_resources(request.resources)
        environment = request.environment or create_environment()
        workspace = _workspace(environment)
        working_directory = _folder(request.working_directory or workspace)
        payload = pickled(request.entrypoint) if isinstance(request.entrypoint, Call) else None
        python = _interpreter(environment, workspace=workspace)
        with self._lock:
            if running := self._running(request.name, adopt_existing=adopt_existing):
                return running
            if not self._jobs:
                self._prune()
            folder = self._jobs_dir / f"{request.name}-{secrets.token_hex(4)}"
            folder.mkdir(parents=True, mode=0o700)
            if payload is not None:
                (folder / "call.pickle").write_bytes(payload)
            specification = {
                "name": request.name,
                "submitted_at": time.time(),
                "argv": _argv(request.entrypoint, folder=folder, python=python, workspace=workspace),
                "working_directory": str(working_directory),
                "replicas": request.replica_count,
                "max_retries_failure": request.max_retries_failure,
                "max_retries_preemption": request.max_retries_preemption,
                "outlives_parent": request.outlives_parent,
                "grace_seconds": self._grace_seconds,
                "parent_pid": os.getpid(),
            }
            job = _start(folder, specification, env=_variables(environment, python=python, job_id=folder.name))
            self._jobs[request.name] = job
        job.wait_until_started()
        return job

    def attach(self, job_id: str) -> LocalJob:
        """A handle on a job that was submitted by any process of this machine.

        Raises:
            BadInput: this machine has no such job.
        """
        folder = self._jobs_dir / job_id
        if not re.fullmatch(r"[\w.-]+", job_id) or not (folder / "status.json").is_file():
            raise BadInput(
                expected=f"the id of a job in {self._jobs_dir}",
                found=repr(job_id),
                remedy="Choose one of the folders there; those of old jobs are removed.",
            )
        return LocalJob(folder)

    def jobs(self) -> list[JobDetails]:
        """See `Client.jobs`; those of every process of this machine."""
        found: list[JobDetails] = []
        for status in self._jobs_dir.glob("*/status.json"):
            with suppress(OSError):  # another process prunes them
                found.append(LocalJob(status.parent).details())
        return sorted(found, key=lambda one: one.submitted_at or 0.0, reverse=True)

    def check_resources(self, resources: ResourceConfig) -> None:
        """See `Client.check_resources`."""
        _check_device(resources.device, device_root=self._device_root)

    def shutdown(self) -> None:
        """Terminates all jobs of this client that do not outlive their parent."""
        jobs = [job for job in self._jobs.values() if not job.outlives_parent]
        for job in jobs:
            job.request_stop()
        for job in jobs:
            job.terminate()

    def _running(self, name: str, *, adopt_existing: bool) -> LocalJob | None:
        job = self._jobs.get(name)
        if job is None or job.status().finished:
            return None
        if adopt_existing:
            return job
        raise JobAlreadyExists(
            expected=f"no running job named {name}",
            found=f"{job.job_id} is {job.status()}",
            remedy="Choose another name, wait for it, or submit with adopt_existing=True.",
        )

    def _prune(self) -> None:
        """Removes the folders of the oldest jobs, but of none that runs."""
        finished_at: dict[Path, float] = {}
        for status in self._jobs_dir.glob("*/status.json"):
            with suppress(OSError):  # another process prunes too
                finished_at[status.parent] = status.stat().st_mtime
        for folder in sorted(finished_at, key=finished_at.__getitem__, reverse=True)[_KEPT_JOBS:]:
            with suppress(OSError, ValueError):
                if LocalJob(folder).status().finished:
                    shutil.rmtree(folder)


def local_client() -> LocalClient:
    """The client of this process; a forked child gets its own."""
    return _client_of_process(os.getpid())


@cache
def _client_of_process(process_id: int) -> LocalClient:
    return LocalClient()


def _start(folder: Path, specification: dict[str, Any], *, env: dict[str, str]) -> LocalJob:
    (folder / "specification.json").write_text(json.dumps(specification))
    pending = {"status": "pending", "reason": None, "attempts": 0, "failures": 0, "preemptions": 0}
    replace_json(folder / "status.json", {**pending, "supervisor_pid": None, "replicas": []})
    with (folder / "supervisor.log").open("wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAMS / "supervise.py"), str(folder)],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL if specification["outlives_parent"] else subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return LocalJob(folder, supervisor=supervisor)


def _argv(entrypoint: Command | Call, *, folder: Path, python: Path, workspace: Path) -> list[str]:
    match entrypoint:
        case Command(command=command, args=args):
            return [command, *args]
        case Call():
            imports = [str(workspace), *_import_folders()]
            return [str(python), str(_PROGRAMS / "run_call.py"), str(folder / "call.pickle"), *imports]


def _import_folders() -> list[str]:
    """Where our own modules come from: all of `sys.path` that does not belong to an interpreter."""
    interpreters = (Path(sys.prefix), Path(sys.base_prefix))
    folders = [Path(entry).absolute() for entry in sys.path]
    return [str(folder) for folder in folders if not any(folder.is_relative_to(root) for root in interpreters)]


def _variables(environment: EnvironmentConfig, *, python: Path, job_id: str) -> dict[str, str]:
    variables = process_environment(
        {"PYTHONUNBUFFERED": "1", **environment.env_vars, "ASSAY_JOB_ID": job_id, "ASSAY_JOBS": "local"}
    )
    return {**variables, "PATH": os.pathsep.join([str(python.parent), variables.get("PATH", os.defpath)])}


def _interpreter(environment: EnvironmentConfig, *, workspace: Path) -> Path:
    """The interpreter of the job's environment, built first where packages are asked for."""
    if environment.python is not None:
        if not environment.python.exists():
            raise BadInput(
                expected="the interpreter of a finished environment",
                found=f"{environment.python} does not exist",
                remedy="Correct its path; an environment of Assay's own is built anew at the next run",
            )
        return environment.python.absolute()
    requirements = list(environment.pip_packages)
    if environment.extras:
        project = _folder(workspace) / "pyproject.toml"
        if not project.is_file():
            raise BadInput(
                expected=f"a project with extras {', '.join(environment.extras)} in {workspace}",
                found="no pyproject.toml there",
                remedy="Correct the workspace, or name the packages in pip_packages.",
            )
        requirements += [f"# project {hashlib.sha256(project.read_bytes()).hexdigest()}"]  # a change means a new one
        requirements += [f"-e {workspace}[{','.join(environment.extras)}]"]
    if not requirements:
        return Path(sys.executable)
    return _build(requirements)


def _build(requirements: Sequence[str]) -> Path:
    content = "\n".join([*requirements, f"cloudpickle=={version('cloudpickle')}", ""])
    lists = settings().environments_dir / "lists"
    lists.mkdir(parents=True, exist_ok=True)
    path = lists / f"job-{hashlib.sha256(content.encode()).hexdigest()[:12]}.txt"
    replace_text(path, content)
    return ensure_environment(EnvironmentSpec(name="job", requirements=path, smoke_import="cloudpickle")).python


def _workspace(environment: EnvironmentConfig) -> Path:
    if environment.workspace is None:
        raise UnsatisfiableResources(
            expected="an environment made of a workspace and packages; the local backend runs no containers",
            found=f"docker_image={environment.docker_image!r}",
            remedy="Give a workspace and pip_packages, or submit to a backend that runs containers.",
        )
    return _folder(environment.workspace)


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise BadInput(expected="a folder that exists", found=str(path), remedy="Correct the path, or create it.")
    return path.absolute()


def _check_device(device: Device, *, device_root: Path) -> None:
    match device:
        case CpuConfig():
            return
        case TpuConfig(variant=variant):
            raise UnsatisfiableResources(
                expected="CPU or NVIDIA GPUs, which the local backend can give",
                found=f"a TPU slice {variant}",
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
