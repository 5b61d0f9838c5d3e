"""Runs jobs on an Iris cluster: each replica is an Iris task that executes `programs/iris_replica.py`."""

from __future__ import annotations

import getpass
import json
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

from resources.backends.iris.connection import IrisController
from resources.backends.iris.job import CALLABLE, COMMAND, IrisJob, unknown_job
from resources.backends.iris.resources import Group, check_groups, hosts_of
from resources.backends.iris.states import job_status, name_of, reason
from resources.backends.leases import LEASE_SECONDS, POLL_SECONDS, LeaseRenewer
from resources.backends.processes import device_variables, existing_folder, import_folders
from resources.config import ResourceConfig, TpuConfig
from resources.errors import BadInput
from resources.jobs.jobs import Call, Client, Command, JobDetails, JobRequest, JobStatus
from resources.jobs.packaging import own_code, package_workspace
from resources.jobs.results import pickled
from resources.jobs.waiting import while_running
from resources.settings import iris_job, iris_task
from resources.tpu import TPU_TYPE_VARIABLE

_PROGRAMS = Path(__file__).parents[1] / "programs"
_SHIPPED = ("iris_replica.py", "iris_records.py", "supervise.py", "attempts.py", "endings.py", "run_call.py")
_FOLDER = ".assay"
_COMMAND = f"exec $IRIS_PYTHON -S -u $IRIS_WORKDIR/{_FOLDER}/iris_replica.py $IRIS_WORKDIR/{_FOLDER}"
_MAX_BUNDLE_BYTES = 25 * 2**20  # limit of Iris' controller
_GROUPS_KNOWN_SECONDS = 10.0
_ENDED_AT_ONCE = 16
_PACKED_FOR_SECONDS = 5.0  # packing takes 0.3 s for a thousand files; jobs submitted together share the package


class IrisClient(Client):
    """Runs jobs on an Iris cluster.

    Processes get `grace_seconds` between SIGTERM and SIGKILL; see `leases.py` for the other arguments.
    """

    def __init__(
        self,
        controller: IrisController,
        *,
        grace_seconds: float = 10.0,
        poll_seconds: float = POLL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._controller = controller
        self._grace_seconds = grace_seconds
        self._poll_seconds = poll_seconds
        self._lease_seconds = lease_seconds
        self._leases = LeaseRenewer(lease_seconds=lease_seconds)
        self._lock = threading.Lock()
        self._jobs: dict[str, IrisJob] = {}
        self._mortal: dict[str, IrisJob] = {}
        self._packed: dict[Path, tuple[float, bytes]] = {}
        self._groups: tuple[float, list[Group]] = (-inf, [])
        self._known_user: str | None = None  # set by a launch: a controller may use another name for this user

    @property
    def url(self) -> str:
        return f"iris://{self._controller.address.rpartition('://')[2]}"

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> IrisJob:
        """Submits a job to the controller; it starts when all of its replicas fit."""
        with self._lock:
            if running := while_running(self._jobs.get(request.name), adopt_existing=adopt_existing):
                return running
            self.check_resources(request.resources)
            hosts = hosts_of(request.resources, replicas=request.replica_count)
            job_id = self._launch(request, hosts=hosts)
            self._known_user = job_id.split("/")[1]
            job = self._handle(job_id, hosts=hosts)
            self._jobs[request.name] = job
            if not request.outlives_parent:
                self._mortal[request.name] = job
                self._leases.add(job_id, job.renew)
        return job

    def attach(self, job_id: str) -> IrisJob:
        """Returns a handle on any job of the cluster, including jobs submitted with Iris' own tools."""
        seen = self._controller.job(job_id) if job_id.count("/") > 1 and job_id.startswith("/") else None
        if seen is None:
            raise unknown_job(self._controller, job_id)
        return self._handle(job_id, hosts=seen.hosts)

    def jobs(self) -> list[JobDetails]:
        """Returns the jobs of our user with Iris' counts, which omit restarts on the same machine."""
        return [
            JobDetails(
                job_id=seen.job_id,
                name=name_of(seen.job_id),
                status=(status := job_status(seen.state)),
                reason=reason(seen, []),
                attempts=seen.failures + seen.preemptions + (status in {JobStatus.RUNNING, JobStatus.SUCCEEDED}),
                failures=seen.failures,
                preemptions=seen.preemptions,
                submitted_at=seen.submitted_at,
            )
            for seen in self._controller.jobs(f"/{self._user()}/")
        ]

    def check_resources(self, resources: ResourceConfig) -> None:
        asked_at, groups = self._groups
        if time.monotonic() - asked_at > _GROUPS_KNOWN_SECONDS:
            groups = self._controller.groups()
            self._groups = (time.monotonic(), groups)
        check_groups(resources, groups)

    def shutdown(self) -> None:
        jobs = [job for job in self._mortal.values() if not job.status().finished]
        with ThreadPoolExecutor(_ENDED_AT_ONCE) as pool:
            list(pool.map(IrisJob.terminate, jobs))
        self._leases.close()

    def _handle(self, job_id: str, *, hosts: int) -> IrisJob:
        return IrisJob(self._controller, job_id, hosts=hosts, grace_seconds=self._grace_seconds)

    def _launch(self, request: JobRequest, *, hosts: int) -> str:
        environment = request.environment
        workspace = existing_folder(environment.workspace) if environment.workspace is not None else None
        suffix = secrets.token_hex(4)
        # Iris ends a job together with the job above it in the id.
        parent = None if request.outlives_parent else self._parent()
        job_id = f"{parent or f'/{self._user()}'}/{request.name}-{suffix}"
        files = {f"{_FOLDER}/{name}": (_PROGRAMS / name).read_bytes() for name in _SHIPPED}
        if isinstance(request.entrypoint, Call):
            files[f"{_FOLDER}/call.pickle"] = pickled(request.entrypoint, job_id=job_id)
            files[f"{_FOLDER}/assay.zip"] = own_code().content  # Iris stores equal files once
        files[f"{_FOLDER}/job.json"] = json.dumps(self._job(request, workspace=workspace, hosts=hosts)).encode()
        project = workspace is not None and (workspace / "pyproject.toml").is_file()
        return self._controller.launch(
            request,
            job_id=job_id,
            command=("bash", "-c", _COMMAND, CALLABLE if isinstance(request.entrypoint, Call) else COMMAND),
            files=files,
            hosts=hosts,
            bundle=self._bundle(workspace) if workspace is not None else b"",
            variables={**device_variables(request.resources.device), **environment.env_vars},
            installs=project and environment.python is None,
        )

    def _job(self, request: JobRequest, *, workspace: Path | None, hosts: int) -> dict[str, object]:
        environment = request.environment
        command = request.entrypoint if isinstance(request.entrypoint, Command) else None
        return {
            "argv": [command.command, *command.args] if command else None,
            "hosts": hosts,
            "python": str(environment.python.absolute()) if environment.python else None,
            "pip_packages": list(environment.pip_packages),
            "extras": list(environment.extras),
            "working_directory": _in_workspace(request.working_directory, workspace),
            "import_folders": _import_folders(workspace),
            "max_retries_preemption": request.max_retries_preemption,
            "variables_by_tpu_type": _variables_by_tpu_type(request.resources),
            "outlives_parent": request.outlives_parent,
            "grace_seconds": self._grace_seconds,
            "poll_seconds": self._poll_seconds,
            "lease_seconds": self._lease_seconds,
        }

    def _bundle(self, workspace: Path) -> bytes:
        packed_at, bundle = self._packed.get(workspace, (-inf, b""))
        if time.monotonic() - packed_at > _PACKED_FOR_SECONDS:
            bundle = package_workspace(workspace).content
            self._packed = {workspace: (time.monotonic(), bundle)}
        if len(bundle) > _MAX_BUNDLE_BYTES:
            raise BadInput(
                expected=f"a workspace of at most {_MAX_BUNDLE_BYTES / 2**20:g} MiB when packed, which Iris takes",
                found=f"{len(bundle) / 2**20:.1f} MiB from {workspace}",
                remedy="Name in .gitignore what the job does not need, or keep it in an object store.",
            )
        return bundle

    def _parent(self) -> str | None:
        task = iris_task() if iris_job() == self.url else None
        return task.rpartition("/")[0] if task else None

    def _user(self) -> str:
        task = iris_task()
        return self._known_user or (task.split("/")[1] if task else getpass.getuser())


def client_from_address(host: str, path: str) -> IrisClient:
    """Returns the client of the cluster with the controller `host` (`host:port`); ignores `path`."""
    if not host:
        raise BadInput(expected="iris://host:port", found=f"iris:{path}", remedy="Correct ASSAY_JOBS.")
    return IrisClient(IrisController(host))


def _variables_by_tpu_type(resources: ResourceConfig) -> dict[str, dict[str, str]]:
    types = resources.device.choices if isinstance(resources.device, TpuConfig) else ()
    return {tpu.variant: {**device_variables(tpu), TPU_TYPE_VARIABLE: tpu.variant} for tpu in types}


def _in_workspace(folder: Path | None, workspace: Path | None) -> str:
    if folder is None:
        return "."
    if workspace is not None and folder.absolute().is_relative_to(workspace):
        return str(folder.absolute().relative_to(workspace))
    return str(folder.absolute())


def _import_folders(workspace: Path | None) -> list[str]:
    if workspace is None:
        return []
    inside = [path for path in (workspace, *map(Path, import_folders())) if path.is_relative_to(workspace)]
    return list(dict.fromkeys(str(path.relative_to(workspace)) for path in inside))
