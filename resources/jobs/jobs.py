"""Jobs on any backend: the program, its environment and resources, and a handle on the submitted job.

Backends in `resources/backends/` implement `Client` and `JobHandle`, and honour every field of `JobRequest`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from resources.config import ResourceConfig
from resources.errors import AssayError, BadInput, JobTimeout
from resources.jobs.logs import LogPart
from resources.settings import may_inherit, variables_named

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0


class JobAlreadyExists(AssayError):
    """A job of that name is running on this client."""

    job: JobHandle | None = None  # None if the error comes from another process

    @classmethod
    def of(cls, running: JobDetails, *, job: JobHandle | None = None) -> JobAlreadyExists:
        """Returns the error for a name that a running job uses."""
        error = cls(
            expected=f"no running job named {running.name}",
            found=f"{running.job_id} is {running.status}",
            remedy="Choose another name, wait for it, or submit with adopt_existing=True.",
        )
        error.job = job
        return error


class JobStatus(StrEnum):
    """State of a job, over all its replicas and attempts."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def finished(self) -> bool:
        """Returns True if the job has ended, successfully or not, and all its processes are gone."""
        return self in {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}


@dataclass(frozen=True)
class Command:
    """A program and its arguments."""

    command: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A Python callable and its arguments, all picklable; `JobHandle.result` returns its return value."""

    function: Callable[..., object]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Entrypoint:
    """The program of a replica: creates a `Command` or a `Call`."""

    @staticmethod
    def from_binary(command: str, args: Sequence[str] = ()) -> Command:
        """Returns a program, searched on the PATH of the job's environment unless `command` is a path."""
        return Command(command, tuple(args))

    @staticmethod
    def from_callable(
        function: Callable[..., object], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Call:
        """Returns a callable, executed in a process of its own in the job's environment."""
        return Call(function, tuple(args), dict(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Source of a job's code and packages: a folder of this machine, or a container image."""

    workspace: Path | None = None
    docker_image: str | None = None  # on backends that run containers
    pip_packages: tuple[str, ...] = ()  # requirements of an environment that is built for the job
    extras: tuple[str, ...] = ()  # of the project in `workspace`, installed into the same environment
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that win over inherited variables; they may hold credentials, so they are never shown."""
    inherited: tuple[str, ...] | None = None
    """Names of the variables that it inherits from its starting process, see `inheritance.py`; all when None."""
    python: Path | None = None  # interpreter of an already built environment

    def __post_init__(self) -> None:
        if (self.workspace is None) == (self.docker_image is None):
            raise BadInput(
                expected="either a workspace or a docker_image",
                found="both" if self.workspace else "neither",
                remedy="Give one of them; create_environment() takes the working directory when neither is given.",
            )
        if self.python is not None and (self.pip_packages or self.extras):
            raise BadInput(
                expected="either the interpreter of a finished environment, or packages to build an environment from",
                found=f"python={self.python} together with {[*self.pip_packages, *self.extras]}",
                remedy="Leave one of them out.",
            )


def create_environment(
    *,
    workspace: Path | str | None = None,
    docker_image: str | None = None,
    pip_packages: Sequence[str] = (),
    extras: Sequence[str] = (),
    env_vars: Mapping[str, str | None] | None = None,
    python: Path | None = None,
    inherited: tuple[str, ...] | None = None,
) -> EnvironmentConfig:
    """Creates an environment with the usual defaults: working directory, forwarded credentials, no tokenizer threads.

    In `env_vars`, None removes a default; see `EnvironmentConfig` for the other arguments.
    """
    if workspace is None and docker_image is None:
        workspace = Path.cwd()
    credentials = {
        name: value
        for name, value in variables_named("HF_TOKEN", "WANDB_API_KEY").items()
        if inherited is None or may_inherit(name, value, inherited)
    }
    variables = {"TOKENIZERS_PARALLELISM": "false", **credentials, **(env_vars or {})}
    return EnvironmentConfig(
        workspace=Path(workspace) if workspace is not None else None,
        docker_image=docker_image,
        pip_packages=tuple(pip_packages),
        extras=tuple(extras),
        env_vars={name: value for name, value in variables.items() if value is not None},
        python=python,
        inherited=inherited,
    )


@dataclass(frozen=True)
class JobRequest:
    """A job: the same entrypoint in `replicas` processes that succeed or fail together."""

    name: str
    entrypoint: Command | Call
    _: KW_ONLY
    resources: ResourceConfig
    environment: EnvironmentConfig = field(default_factory=create_environment)
    replicas: int | None = None
    """`resources.replicas` when None."""
    max_retries_failure: int = 0
    max_retries_preemption: int = 100
    """Number of retries after attempts that were ended from outside; counted separately."""
    outlives_parent: bool = False
    """Keeps the job running after the process that submitted it ends."""
    working_directory: Path | None = None
    """Folder that replicas start in; the workspace when None."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadInput(
                expected="a job name of up to 100 letters, digits, dots, dashes and underscores",
                found=repr(self.name),
                remedy="Replace spaces and slashes with dashes.",
            )
        if self.resources.hosts > 1:
            raise BadInput(
                expected="a single machine for each replica of a job",
                found=f"hosts: {self.resources.hosts}, which a pool's replicas have",
                remedy="Ask for replicas instead: the replicas of a job start and end together.",
            )
        if self.replica_count < 1 or self.max_retries_failure < 0 or self.max_retries_preemption < 0:
            raise BadInput(
                expected="at least 1 replica, and retries of at least 0",
                found=f"replicas={self.replica_count}, max_retries_failure={self.max_retries_failure}, "
                f"max_retries_preemption={self.max_retries_preemption}",
                remedy="Correct the number.",
            )

    @property
    def replica_count(self) -> int:
        return self.resources.replicas if self.replicas is None else self.replicas


@dataclass(frozen=True, kw_only=True)
class JobDetails:
    """Everything that a backend reports about a job."""

    job_id: str
    name: str
    status: JobStatus
    reason: str | None = None
    """Reason for its end or, while it is pending, for its waiting."""
    attempts: int = 0
    """Number of times that all replicas were started, including the present attempt."""
    failures: int = 0
    """Number of failed attempts, without preemptions."""
    preemptions: int = 0
    submitted_at: float | None = None
    replicas: int | None = None
    returns: bool | None = None
    """True if it calls a callable, so that it has a result; None if unknown."""


class JobHandle(Protocol):
    """A submitted job."""

    @property
    def job_id(self) -> str:
        """Unique on its backend, for ever."""
        ...

    def details(self) -> JobDetails:
        """Returns the job's current state, with the reason."""
        ...

    def status(self) -> JobStatus:
        """Returns the job's current state."""
        ...

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Blocks until the job has finished, for at most `timeout` seconds.

        Raises:
            JobTimeout: the job was still running by then; it goes on.
            JobFailed: the job failed or was stopped, unless `raise_on_failure` is False; caused by its callable's
                exception, if that can be read locally.
        """
        ...

    def result(self, timeout: float | None = None, *, replica: int = 0) -> Any:
        """Returns the return value of the job's callable in the last attempt; waits for it as `wait` does.

        Each replica has its own result; with several hosts, it is the result of the first host. Its pickle has at most
        512 KiB, on every backend: return a path for larger results. Any process of the same user can fetch it, also
        through `attach`, until the backend forgets the job; on another machine it needs the user's `ASSAY_ACTOR_KEY`. A
        job can succeed although its result is unavailable.
        """
        ...

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        """Returns the last lines, at most 1 MB, of a replica so far, or of each replica under a heading."""
        ...

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        """Returns the part of a replica's log after a position, at most about 1 MB; empty at a finished log's end.

        Consecutive parts, each requested with the previous `end`, contain every line once, over all attempts. With
        several hosts, lines begin with the host number.
        """
        ...

    def announced(self, replica: int = 0) -> str | None:
        """Returns the last announcement of this replica's process in its present attempt; None if there is none."""
        ...

    def terminate(self) -> None:
        """Ends the job with all its processes, and returns after they have ended."""
        ...


class Client(Protocol):
    """Runs jobs. Jobs that are submitted inside its jobs go to the same backend."""

    @property
    def url(self) -> str:
        """The setting with which a job's process finds this backend, such as `local` or `ray://auto`."""
        ...

    @property
    def description(self) -> str:
        """Returns a readable description of its backend."""
        return self.url

    @property
    def is_local(self) -> bool:
        """Returns True if all its jobs run on this machine, and reach each other over loopback."""
        return False

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> JobHandle:
        """Starts a job."""
        ...

    def attach(self, job_id: str) -> JobHandle:
        """Returns a handle on a job that any process has submitted; raises `BadInput` if it is unknown or forgotten."""
        ...

    def jobs(self) -> list[JobDetails]:
        """Returns the backend's jobs that are running or still remembered, the newest first."""
        ...

    def check_resources(self, resources: ResourceConfig) -> None:
        """Raises as `submit` does, before code is packed, if this backend can never provide the resources."""
        ...

    def shutdown(self) -> None:
        """Terminates all jobs of this client that do not outlive their parent."""
        ...


def growing_pauses(longest_seconds: float = LONGEST_PAUSE_SECONDS) -> Iterator[float]:
    """Yields the seconds between two polls, from 0.05 s growing by half each time up to `longest_seconds`."""
    seconds = _FIRST_PAUSE_SECONDS
    while True:
        yield min(seconds, longest_seconds)
        seconds = min(seconds * 1.5, longest_seconds)


def polls(timeout: float | None = None, *, longest_seconds: float = LONGEST_PAUSE_SECONDS) -> Iterator[None]:
    """Yields at once and after each of the `growing_pauses`, the last time when `timeout` seconds are over."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    for pause_seconds in growing_pauses(longest_seconds):
        yield
        if (remaining := deadline - time.monotonic()) <= 0:
            return
        time.sleep(min(pause_seconds, remaining))


def wait_all(
    handles: Iterable[JobHandle], timeout: float | None = None, *, raise_on_failure: bool = True
) -> list[JobStatus]:
    """Waits up to `timeout` seconds until all jobs have finished, terminates none; returns their statuses in order."""
    jobs = list(handles)
    statuses: dict[int, JobStatus] = {}
    for _ in polls(timeout):
        for position, job in enumerate(jobs):
            if position not in statuses and job.status().finished:
                statuses[position] = job.wait(0, raise_on_failure=raise_on_failure)
        if len(statuses) == len(jobs):
            return [statuses[position] for position in range(len(jobs))]
    running = [job.job_id for position, job in enumerate(jobs) if position not in statuses]
    raise JobTimeout(
        expected=f"all {len(jobs)} jobs to have finished after {timeout:g} s",
        found=f"{len(running)} still running: {', '.join(running)}",
        remedy="Wait longer, or terminate them.",
    )
