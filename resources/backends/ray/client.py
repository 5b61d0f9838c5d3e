"""Jobs on a Ray cluster: reserved all or nothing, supervised by a controller on its head, and ended with their driver.

A client only calls an actor, the controller, so it also works through Ray's client protocol. Each process of a job is
a Ray task that runs the process under its own `supervise.py`.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from resources.backends.processes import existing_folder, import_folders, workspace_of
from resources.backends.ray.connection import ControllerGone, RayConnection
from resources.backends.ray.orders import JobOrder, SentFolder
from resources.config import ResourceConfig
from resources.errors import BadInput
from resources.jobs.jobs import Call, Client, Command, JobDetails, JobRequest, JobStatus
from resources.jobs.logs import LogPart
from resources.jobs.packaging import package_workspace
from resources.jobs.results import pickled
from resources.jobs.waiting import BackendJob, no_such_job, while_running

_END_SECONDS = 60.0


class RayJob(BackendJob):
    """Handle on a job, submitted by this process or attached to."""

    def __init__(self, connection: RayConnection, controller: Any, details: JobDetails, *, own: bool) -> None:
        self._connection = connection
        self._controller = controller
        self._known = details
        self._own = own

    @property
    def job_id(self) -> str:
        return self._known.job_id

    def details(self) -> JobDetails:
        """Returns the job's details; a job with an ended controller counts as failed or stopped."""
        if self._known.status.finished:
            return self._known
        try:
            self._known = self._ask("details")
        except ControllerGone:
            status = JobStatus.FAILED if self._own else JobStatus.STOPPED
            reason = "its controller was killed" if self._own else "the process that submitted it has ended"
            self._known = replace(self._known, status=status, reason=reason)
        return self._known

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        """Returns the last lines; empty if the job's controller has ended."""
        return self._ask_living("logs", "", max_lines=max_lines, replica=replica)

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        """Returns the next part of the log; empty if the job's controller has ended."""
        return self._ask_living("read_log", LogPart(b"", after), after=after, replica=replica)

    def announced(self, replica: int = 0) -> str | None:
        return self._ask_living("announced", None, replica=replica)

    def terminate(self) -> None:
        seconds: float | None = self._ask_living("stop", None)
        if seconds is not None:
            self.wait(seconds, raise_on_failure=False)

    @property
    def where(self) -> str:
        return f"read the logs of {self.job_id}"

    def result_bytes(self, replica: int) -> bytes | None:
        """Returns what the controller keeps until it ends."""
        return self._ask_living("result", None, replica=replica)

    def _ask(self, method: str, **arguments: Any) -> Any:
        return self._connection.ask(self._controller, method, job_id=self.job_id, **arguments)

    def _ask_living(self, method: str, otherwise: Any, **arguments: Any) -> Any:
        try:
            return self._ask(method, **arguments)
        except ControllerGone:
            return otherwise


class RayClient(Client):
    """Runs jobs on a Ray cluster. Names are unique among a driver's jobs and all jobs that outlive their drivers.

    `address` is `auto`, host and port of the cluster's head, or `ray://host:port` of a Ray Client server; a connection
    that this process already has to a Ray is used. Processes get `grace_seconds` between SIGTERM and SIGKILL.
    """

    def __init__(self, address: str = "auto", *, grace_seconds: float = 10.0) -> None:
        self._address = address
        self._grace_seconds = grace_seconds
        self._id = secrets.token_hex(8)

    @property
    def url(self) -> str:
        """Returns `ray://auto`: processes of jobs have the cluster's address in `RAY_ADDRESS`."""
        return "ray://auto"

    @property
    def description(self) -> str:
        """Returns the name of the cluster with its address, which the URL lacks."""
        return f"the Ray cluster at {self._connection().address}"

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> RayJob:
        """Submits a job; a file or package that is missing on a node, or cannot be built, fails the job."""
        connection = self._connection()
        if running := while_running(self._running(connection, request.name), adopt_existing=adopt_existing):
            return running
        workspace = workspace_of(request.environment, backend="nodes of Ray run")
        working_directory = existing_folder(request.working_directory or workspace)
        job_id, call = f"{request.name}-{secrets.token_hex(4)}", request.entrypoint
        entrypoint = pickled(call, job_id=job_id) if isinstance(call, Call) else call
        controller = connection.detached_controller() if request.outlives_parent else self._own_controller(connection)
        nodes = connection.ask(controller, "check", resources=request.resources, replicas=request.replica_count)
        digest = None if connection.is_on(nodes) else _sent(connection, controller, workspace)
        order = JobOrder(
            job_id=job_id,
            request=replace(request, entrypoint=Command("true")),
            client=self._id,
            entrypoint=entrypoint,
            workspace=SentFolder.of(workspace, digest=digest),
            working_directory=str(working_directory),
            imports=tuple(import_folders()),
            grace_seconds=self._grace_seconds,
            submitted_at=time.time(),
            address=connection.address,
        )
        job_id = str(connection.ask(controller, "submit", order=order, adopt_existing=adopt_existing))
        return self._handle(connection, controller, job_id, own=True)

    def attach(self, job_id: str) -> RayJob:
        """Returns a handle on a job of a running driver, or a job that outlives it; raises `BadInput` if unknown."""
        connection = self._connection()
        for controller in connection.controllers():
            with suppress(BadInput, ControllerGone):
                return self._handle(connection, controller, job_id, own=False)
        remedy = "Look at the jobs of this client; those of a driver are forgotten when it ends."
        raise no_such_job(f"on the Ray cluster at {connection.address}", job_id, remedy)

    def jobs(self) -> list[JobDetails]:
        """Returns the jobs of all drivers of the cluster."""
        connection = self._connection()
        jobs: list[JobDetails] = []
        for controller in connection.controllers():
            with suppress(ControllerGone):
                jobs += connection.ask(controller, "jobs")
        return sorted(jobs, key=lambda details: details.submitted_at or 0.0, reverse=True)

    def check_resources(self, resources: ResourceConfig) -> None:
        """Raises `UnsatisfiableResources` if no current node is sufficient and the cluster has no autoscaler."""
        connection = self._connection()
        controller = self._own_controller(connection)
        connection.ask(controller, "check", resources=resources, replicas=resources.replicas)

    def shutdown(self) -> None:
        if not ray.is_initialized():
            return  # they have ended with the connection
        connection = self._connection()
        controller = connection.own_controller()
        with suppress(ControllerGone):
            jobs: list[str] = connection.ask(controller, "stop_client", client=self._id)
            deadline = time.monotonic() + self._grace_seconds + _END_SECONDS
            for job_id in jobs:
                job = self._handle(connection, controller, job_id, own=True)
                job.wait(max(0.1, deadline - time.monotonic()), raise_on_failure=False)

    def _connection(self) -> RayConnection:
        return _connection(self._address)

    def _own_controller(self, connection: RayConnection) -> Any:
        controller = connection.own_controller()
        try:
            connection.ask(controller, "running", name="")
        except ControllerGone:
            connection.forget_own_controller()
            return connection.own_controller()
        return controller

    def _running(self, connection: RayConnection, name: str) -> RayJob | None:
        for controller in (self._own_controller(connection), *connection.controllers(detached_only=True)):
            with suppress(ControllerGone):
                if (job_id := connection.ask(controller, "running", name=name)) is not None:
                    return self._handle(connection, controller, job_id, own=True)
        return None

    def _handle(self, connection: RayConnection, controller: Any, job_id: str, *, own: bool) -> RayJob:
        return RayJob(connection, controller, connection.ask(controller, "details", job_id=job_id), own=own)


_open_connection: list[RayConnection] = []


def _connection(address: str) -> RayConnection:
    if _open_connection and _open_connection[0].is_replaced():
        ray.shutdown()
    if not (_open_connection and _open_connection[0].is_open()):
        _open_connection[:] = [RayConnection(ray, address)]
    return _open_connection[0]


def _sent(connection: RayConnection, controller: Any, workspace: Path) -> str:
    package = package_workspace(workspace)
    if not connection.ask(controller, "add_package", digest=package.digest, content=None):
        connection.ask(controller, "add_package", digest=package.digest, content=package.content)
    return package.digest


def client_from_address(host: str, path: str) -> RayClient:
    """Returns the client for the Ray of this process or machine (`auto` or no host), or for a Ray Client server."""
    address = "auto" if host in ("", "auto") else f"ray://{host}"
    _connection(address)  # now instead of at the first use
    return RayClient(address)
