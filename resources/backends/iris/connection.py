"""Calls to the controller of an Iris cluster; the only module that imports Iris' package."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from finelog.rpc import logging_pb2
from finelog.rpc.logging_connect import LogServiceClientSync
from iris.cluster.constraints import (
    Constraint,
    device_variant_constraint,
    preemptible_constraint,
    region_constraint,
    zone_constraint,
)
from iris.cluster.runtime.entrypoint import build_runtime_entrypoint
from iris.cluster.runtime.env import with_slice_topology_env
from iris.cluster.token_store import cluster_name_from_url, load_token
from iris.cluster.tpu_topology import get_tpu_topology
from iris.cluster.types import Entrypoint, gpu_device, tpu_device
from iris.rpc import config_pb2, controller_pb2, job_pb2
from iris.rpc.auth import StaticTokenProvider, client_interceptors
from iris.rpc.compression import IRIS_RPC_COMPRESSIONS
from iris.rpc.controller_connect import ControllerServiceClientSync
from iris.version import client_revision_date

from resources.backends.iris.resources import Group
from resources.backends.iris.states import Attempt, Seen, Task
from resources.backends.programs.iris_records import RESULTS
from resources.config import GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import BackendUnavailable, BadInput, UnsatisfiableResources
from resources.jobs.jobs import JobRequest

_CALL_SECONDS = 30.0
_LAUNCH_SECONDS = 180.0  # a large workspace on a slow line
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 2.0
_PASSING = {Code.UNAVAILABLE, Code.INTERNAL, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED}
_SLICE = "tpu-name"  # attribute that the workers of a slice share
_PAGE = 500  # largest page that the controller returns
Answer = TypeVar("Answer")
_C = controller_pb2.Controller


class IrisController:
    """Client of a cluster's controller at `address`, which is `host:port` or a URL.

    Passing errors are retried for `patience_seconds`; a restart of the controller takes a few seconds.
    """

    def __init__(self, address: str, *, patience_seconds: float = 20.0, page: int = _PAGE) -> None:
        self.address = address
        self._page = page
        self._patience_seconds = patience_seconds
        url = address if "://" in address else f"http://{address}"
        credential = load_token(cluster_name_from_url(url))
        interceptors = client_interceptors(StaticTokenProvider(credential.token) if credential else None)
        self._calls = ControllerServiceClientSync(
            url,
            timeout_ms=int(_CALL_SECONDS * 1000),
            interceptors=interceptors,
            accept_compression=IRIS_RPC_COMPRESSIONS,
            send_compression=None,
        )
        self._logs = LogServiceClientSync(url, timeout_ms=int(_CALL_SECONDS * 1000), interceptors=interceptors)

    def launch(
        self,
        request: JobRequest,
        *,
        job_id: str,
        command: Sequence[str],
        files: Mapping[str, bytes],
        hosts: int,
        bundle: bytes,
        variables: Mapping[str, str],
        installs: bool,
    ) -> str:
        """Submits a job and returns its id, in which the controller may put its own name for the user.

        Args:
            files: files to write below the job's working directory on the worker.
            hosts: tasks per replica.
            installs: True if a container installs the workspace's project and the packages before it starts.
        """
        asked, device, tasks = request.resources, request.resources.device, request.replica_count * hosts
        environment = request.environment
        resources = job_pb2.ResourceSpecProto(
            cpu_millicores=asked.cpu * 1000, memory_bytes=size_in_bytes(asked.ram), disk_bytes=size_in_bytes(asked.disk)
        )
        if isinstance(device, TpuConfig):
            resources.device.CopyFrom(tpu_device(device.variant))
        elif isinstance(device, GpuConfig):
            resources.device.CopyFrom(gpu_device(device.variant, device.count))
        variables_and_packages = job_pb2.EnvironmentConfig(
            pip_packages=environment.pip_packages, extras=environment.extras, env_vars=dict(variables)
        )
        variables_and_packages = with_slice_topology_env(variables_and_packages, resources, tasks)
        entrypoint = Entrypoint(command=list(command), workdir_files=dict(files))
        launch = _C.LaunchJobRequest(
            name=job_id,
            entrypoint=entrypoint.to_proto(),
            resources=resources,
            environment=variables_and_packages,
            bundle_blob=bundle,
            constraints=[constraint.to_proto() for constraint in constraints_of(asked)],
            replicas=tasks,
            max_retries_failure=request.max_retries_failure,
            max_retries_preemption=request.max_retries_preemption,
            preemption_policy=job_pb2.JOB_PREEMPTION_POLICY_TERMINATE_CHILDREN,
            existing_job_policy=job_pb2.EXISTING_JOB_POLICY_KEEP,  # the id is random: it can only be this request
            task_image=environment.docker_image or asked.image or "",
            client_revision_date=client_revision_date(),
        )
        if installs:
            launch.entrypoint.setup_commands[:] = [
                *build_runtime_entrypoint(entrypoint, variables_and_packages).setup_commands,
                "export ASSAY_IRIS_SETUP=1",
            ]
        if hosts > 1:
            launch.coscheduling.group_by = _SLICE
        try:
            return self._asked(lambda: self._calls.launch_job(launch, timeout_ms=int(_LAUNCH_SECONDS * 1000)).job_id)
        except ConnectError as error:
            if "too old" in error.message:
                raise BackendUnavailable(
                    expected="an Iris client that the controller still accepts",
                    found=error.message,
                    remedy="Install the marin-iris that the cluster runs.",
                ) from error
            if error.code in {Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT} and "parent job" not in error.message:
                raise UnsatisfiableResources(
                    expected="a job that some group of the cluster's machines can run",
                    found=error.message,
                    remedy="Change the resources, or the cluster's scale groups.",
                ) from error
            raise self._refused(error) from error

    def job_states(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Returns Iris' state of each known job; unknown ids are missing."""
        response = self.ask(lambda: self._calls.get_job_state(_C.GetJobStateRequest(job_ids=list(job_ids))))
        return {job_id: job_pb2.JobState.Name(state) for job_id, state in response.states.items()}

    def job(self, job_id: str) -> Seen | None:
        """Returns a job, or None if the controller has no job of this id."""
        try:
            response = self._asked(lambda: self._calls.get_job_status(_C.GetJobStatusRequest(job_id=job_id)))
        except ConnectError as error:
            if error.code in {Code.NOT_FOUND, Code.INVALID_ARGUMENT}:
                return None
            raise self._refused(error) from error
        return replace(_seen(response.job), command=tuple(response.request.entrypoint.run_command.argv))

    def jobs(self, prefix: str) -> list[Seen]:
        """Returns the jobs with this id prefix, newest first."""
        jobs_by_id: dict[str, Seen] = {}  # by id: a job submitted meanwhile shifts the others to the next page
        offset = 0
        while True:
            query = _C.JobQuery(
                job_id_prefix=prefix,
                limit=self._page,
                offset=offset,
                sort_field=_C.JOB_SORT_FIELD_DATE,
                sort_direction=_C.SORT_DIRECTION_DESC,
            )
            page = self.ask(partial(self._calls.list_jobs, _C.ListJobsRequest(query=query)))
            jobs_by_id.update((job.job_id, _seen(job)) for job in page.jobs)
            offset += len(page.jobs)
            if not (page.has_more and page.jobs):
                return list(jobs_by_id.values())

    def tasks(self, job_id: str, *, every_attempt: bool = False) -> list[Task]:
        """Returns the tasks of a job in order, each with its last attempt or, for more calls, with all attempts."""
        response = self.ask(lambda: self._calls.list_tasks(_C.ListTasksRequest(job_id=job_id)))
        listed = sorted(map(_task, response.tasks), key=lambda task: int(task.task_id.rpartition("/")[2]))
        return [self._whole(task) if every_attempt and task.attempt > 0 else task for task in listed]

    def terminate(self, job_id: str) -> None:
        """Ends a job and its children; returns before they have ended."""
        self.ask(lambda: self._calls.terminate_job(_C.TerminateJobRequest(job_id=job_id)))

    def records(self, name: str) -> dict[str, dict[str, str]]:
        """Returns the metadata registered under a name, keyed by the last part of the record id."""
        response = self.ask(lambda: self._calls.list_endpoints(_C.ListEndpointsRequest(prefix=name, exact=True)))
        return {endpoint.endpoint_id.rpartition("#")[2]: dict(endpoint.metadata) for endpoint in response.endpoints}

    def register(self, name: str, *, record_id: str, task_id: str, attempt: int, metadata: Mapping[str, str]) -> bool:
        """Registers metadata under a name, replacing a record of the same id; False if the attempt is not current."""
        request = _C.RegisterEndpointRequest(
            name=name, endpoint_id=record_id, address="-", task_id=task_id, attempt_id=attempt, metadata=dict(metadata)
        )
        try:
            self._asked(lambda: self._calls.register_endpoint(request))
        except ConnectError as error:
            if error.code in {Code.FAILED_PRECONDITION, Code.NOT_FOUND}:
                return False
            raise self._refused(error) from error
        return True

    def log_lines(self, task_id: str, max_lines: int) -> list[tuple[int, str]]:
        """Returns the last lines of a task, each with the number of the attempt that wrote it."""
        logs = self._logs_of(f"{task_id}:", max_lines=max_lines, tail=True)
        return [(entry.attempt_id, entry.data) for entry in logs.entries]

    def log_lines_after(self, task_id: str, cursor: int, max_lines: int) -> tuple[list[tuple[int, str]], int]:
        """Returns the first lines of a task after a cursor (0: start of the log), and the next cursor."""
        logs = self._logs_of(f"{task_id}:", max_lines=max_lines, cursor=cursor)
        return [(entry.attempt_id, entry.data) for entry in logs.entries], logs.cursor if logs.entries else cursor

    def result(self, task_id: str, *, attempt: int) -> str | None:
        """Returns the result that a task wrote in an attempt, base64-encoded, or None."""
        scope = logging_pb2.MATCH_SCOPE_EXACT
        entries = self._logs_of(f"{RESULTS}{task_id}:{attempt}", scope=scope, max_lines=1, tail=True).entries
        return entries[-1].data if entries else None

    def _logs_of(
        self, source: str, *, scope: logging_pb2.MatchScope = logging_pb2.MATCH_SCOPE_PREFIX, **options: Any
    ) -> logging_pb2.FetchLogsResponse:
        request = logging_pb2.FetchLogsRequest(source=source, match_scope=scope, **options)
        return self.ask(lambda: self._logs.fetch_logs(request))

    def groups(self) -> list[Group]:
        """Returns the kinds of machines that the cluster can start; empty if it starts none."""
        response = self.ask(lambda: self._calls.get_autoscaler_status(_C.GetAutoscalerStatusRequest()))
        return [_group(group.config) for group in response.status.groups]

    def _whole(self, task: Task) -> Task:
        request = _C.GetTaskStatusRequest(task_id=task.task_id)
        return _task(self.ask(lambda: self._calls.get_task_status(request)).task)

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """Calls the controller and raises `BackendUnavailable` or `BadInput` if it refuses or does not answer."""
        try:
            return self._asked(call)
        except ConnectError as error:
            raise self._refused(error) from error

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        deadline = time.monotonic() + self._patience_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return call()
            except ConnectError as error:
                if error.code not in _PASSING or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE_SECONDS)

    def _refused(self, error: ConnectError) -> BackendUnavailable | BadInput:
        if error.code in _PASSING | {Code.UNAUTHENTICATED, Code.PERMISSION_DENIED}:
            return BackendUnavailable(
                expected=f"the Iris controller {self.address} to answer within {self._patience_seconds:g} s",
                found=f"{error.code.value}: {error.message}",
                remedy="See that it runs and can be reached from here; `iris login` lets us in. Jobs go on meanwhile.",
            )
        return BadInput(
            expected=f"a request that the Iris controller {self.address} accepts",
            found=f"{error.code.value}: {error.message}",
            remedy="Correct the request.",
        )


def constraints_of(resources: ResourceConfig) -> list[Constraint]:
    """Returns the constraints on workers that Iris does not derive from the resources itself."""
    tpu = resources.device if isinstance(resources.device, TpuConfig) else None
    return [
        *([device_variant_constraint(tpu.types)] if tpu is not None and tpu.alternatives else []),
        *([] if resources.preemptible else [preemptible_constraint(False)]),
        *([region_constraint(list(resources.regions))] if resources.regions else []),
        *([zone_constraint(resources.zone)] if resources.zone else []),
    ]


def _seen(job: job_pb2.JobStatus) -> Seen:
    return Seen(
        job_id=job.job_id,
        state=job_pb2.JobState.Name(job.state),
        error=job.error,
        pending_reason=job.pending_reason,
        submitted_at=job.submitted_at.epoch_ms / 1000,
        failures=job.failure_count,
        preemptions=job.preemption_count,
        hosts=get_tpu_topology(job.resources.device.tpu.variant).vm_count if job.resources.device.tpu.variant else 1,
    )


def _task(task: job_pb2.TaskStatus) -> Task:
    return Task(
        task_id=task.task_id,
        state=job_pb2.TaskState.Name(task.state),
        attempt=task.current_attempt_id,
        attempts=tuple(
            Attempt(job_pb2.TaskState.Name(attempt.state), error=attempt.error, ended=attempt.finished_at.epoch_ms > 0)
            for attempt in task.attempts
        ),
        error=task.error,
    )


def _group(config: config_pb2.ScaleGroupConfig) -> Group:
    resources = config.resources
    attributes = config.worker.attributes
    return Group(
        name=config.name,
        device=config_pb2.AcceleratorType.Name(resources.device_type).removeprefix("ACCELERATOR_TYPE_").lower(),
        variant=resources.device_variant,
        device_count=resources.device_count,
        cpu_millicores=resources.cpu_millicores,
        memory_bytes=resources.memory_bytes,
        disk_bytes=resources.disk_bytes,
        preemptible=resources.capacity_type == config_pb2.CAPACITY_TYPE_PREEMPTIBLE,
        region=attributes.get("region", ""),
        zone=attributes.get("zone", ""),
    )
