"""Jobs, whoever runs them: what to run, in which environment, on what, and a handle on the running thing.

Backends implement `Client` and `JobHandle`; they live in `resources/backends/` and honour every field of
`JobRequest`. `current_client()` says which backend is meant.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from resources.config import ResourceConfig
from resources.errors import AssayError, BadInput, JobTimeout
from resources.jobs.logs import LogPart
from resources.settings import forwarded_secrets, may_inherit

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FIRST_POLL_SECONDS = 0.05
_LAST_POLL_SECONDS = 2.0


class JobAlreadyExists(AssayError):
    """A job of that name is running on this client."""

    job: JobHandle | None = None
    """The one that runs; not known where the error comes from another process."""

    @classmethod
    def of(cls, running: JobDetails, *, job: JobHandle | None = None) -> JobAlreadyExists:
        """The error for a name that a running job has."""
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
        """Returns True if the job has ended, in whatever way, and nothing of it is left."""
        return self in {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}


@dataclass(frozen=True)
class Command:
    """A program and its arguments."""

    command: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A Python callable and its arguments; all three must be picklable. `JobHandle.result` gives what it returns."""

    function: Callable[..., object]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Entrypoint:
    """The program of a replica: makes a `Command` or a `Call`."""

    @staticmethod
    def from_binary(command: str, args: Sequence[str] = ()) -> Command:
        """A program, found on the PATH of the job's environment unless `command` is a path."""
        return Command(command, tuple(args))

    @staticmethod
    def from_callable(
        function: Callable[..., object], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Call:
        """A callable, executed in a process of its own in the job's environment."""
        return Call(function, tuple(args), dict(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Source of a job's code and packages: a folder of this machine, or a container image."""

    workspace: Path | None = None
    docker_image: str | None = None
    pip_packages: tuple[str, ...] = ()
    """Requirements of an environment built for this job."""
    extras: tuple[str, ...] = ()
    """Extras of the project in `workspace`, installed into the same environment."""
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that win over the inherited ones; may hold credentials, so they are never shown."""
    inherited: tuple[str, ...] | None = None
    """Names of variables that it inherits of the process that starts it, see `inheritance.py`; all when None."""
    python: Path | None = None
    """Interpreter of an environment that has been built already."""

    def __post_init__(self) -> None:
        """Refuses what contradicts itself."""
        if (self.workspace is None) == (self.docker_image is None):
            raise BadInput(
                expected="either a workspace or a docker_image",
                found="both" if self.workspace else "neither",
                remedy="Give one; create_environment() takes the working directory when neither is given.",
            )
        if self.python is not None and (self.pip_packages or self.extras):
            raise BadInput(
                expected="either the interpreter of a finished environment, or packages to build one from",
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
    """An environment with the usual defaults: the working directory, credentials passed on, no tokenizer threads.

    Args:
        workspace: folder with the job's code; the working directory when neither this nor an image is given.
        docker_image: image, on backends that run containers.
        pip_packages: requirements of an environment to be built for the job.
        extras: extras of the project in `workspace`.
        env_vars: win over the defaults; a default set to None here is left out.
        python: interpreter of an environment that has been built already.
        inherited: names of the variables and credentials that it may have of ours; all when None.
    """
    if workspace is None and docker_image is None:
        workspace = Path.cwd()
    credentials = {
        name: value
        for name, value in forwarded_secrets().items()
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
    """One job: the same entrypoint in `replicas` processes that succeed or fail together."""

    name: str
    entrypoint: Command | Call
    _: KW_ONLY
    resources: ResourceConfig
    environment: EnvironmentConfig | None = None
    """`create_environment()` when None."""
    replicas: int | None = None
    """`resources.replicas` when None."""
    max_retries_failure: int = 0
    """Number of failed attempts that are tried again."""
    max_retries_preemption: int = 100
    """Number of attempts ended from outside that are tried again; a budget of its own."""
    outlives_parent: bool = False
    """Lets the job go on when the process that submitted it ends."""
    working_directory: Path | None = None
    """Folder that replicas start in; the workspace when None."""

    def __post_init__(self) -> None:
        """Refuses names that could not become a path, and counts that mean nothing."""
        if not _NAME.fullmatch(self.name):
            raise BadInput(
                expected="a job name of up to 100 letters, digits, dots, dashes and underscores",
                found=repr(self.name),
                remedy="Replace spaces and slashes with dashes.",
            )
        if self.resources.hosts > 1:
            raise BadInput(
                expected="one machine for each replica of a job",
                found=f"hosts: {self.resources.hosts}, which a pool's replicas have",
                remedy="Ask for replicas instead: those of one job start and end together.",
            )
        if self.replica_count < 1 or self.max_retries_failure < 0 or self.max_retries_preemption < 0:
            raise BadInput(
                expected="at least one replica, and retries of at least 0",
                found=f"replicas={self.replica_count}, max_retries_failure={self.max_retries_failure}, "
                f"max_retries_preemption={self.max_retries_preemption}",
                remedy="Correct the number.",
            )

    @property
    def replica_count(self) -> int:
        """Returns the number of processes that run side by side."""
        return self.resources.replicas if self.replicas is None else self.replicas


@dataclass(frozen=True, kw_only=True)
class JobDetails:
    """Everything that a backend knows of one job."""

    job_id: str
    name: str
    status: JobStatus
    reason: str | None = None
    """The reason that it ended as it did or, while it is pending, what it waits for."""
    attempts: int = 0
    """Number of times that all replicas were started, the present one included."""
    failures: int = 0
    """Number of attempts that ended by the job's own doing."""
    preemptions: int = 0
    """Number of attempts that were ended from outside."""
    submitted_at: float | None = None
    """Seconds since the epoch."""
    replicas: int | None = None
    """Processes that run side by side; None where a list of jobs does not say."""
    returns: bool | None = None
    """True if it calls a callable, so that it has a result; None where that is not known."""


class JobHandle(Protocol):
    """A submitted job."""

    @property
    def job_id(self) -> str:
        """Unique on its backend, for ever."""
        ...

    def details(self) -> JobDetails:
        """Returns the job's state now, and why."""
        ...

    def status(self) -> JobStatus:
        """Returns the job's state now."""
        ...

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Blocks until the job has finished, for at most `timeout` seconds.

        Raises:
            JobTimeout: the job was still running by then; it goes on.
            JobFailed: the job failed or was stopped, unless `raise_on_failure` is False. What its callable raised is
                the cause, where that can be read here.
        """
        ...

    def result(self, timeout: float | None = None, *, replica: int = 0) -> Any:
        """Returns what the job's callable returned in the last attempt; waits for that as `wait` does.

        Each replica has a result of its own; of one with several hosts, it is the first host's. It has 512 KiB at most
        once pickled, on every backend: return the path of what is larger. Any process of the same user can ask for it,
        by `attach` too, until the backend forgets the job; on another machine it needs the user's `ASSAY_ACTOR_KEY`.
        A job succeeds also if its result is not to be had.
        """
        ...

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        """The last lines, a megabyte at most, written so far by one replica, or by each of them under a heading."""
        ...

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        """The part of a replica's log that comes after a position, about a megabyte of it at most.

        Parts that are asked for each with the `end` of the one before have every line once, over all attempts. Of a
        finished job all is there: an empty part is its end. Lines of several hosts begin with the number of theirs.
        """
        ...

    def announced(self, replica: int = 0) -> str | None:
        """Returns the last announcement of this replica's process in its present attempt; None if there is none."""
        ...

    def terminate(self) -> None:
        """Ends the job with everything it started, and returns when nothing of it is left."""
        ...


class Client(Protocol):
    """Runs jobs. Jobs that are submitted inside its jobs go to the same backend."""

    @property
    def url(self) -> str:
        """The setting under which a process of a job finds this backend, such as `local` or `ray://auto`."""
        ...

    @property
    def description(self) -> str:
        """Returns the place that its jobs go to, for people."""
        ...

    @property
    def is_local(self) -> bool:
        """Returns True if its jobs run on this machine alone, where they reach each other over loopback."""
        ...

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> JobHandle:
        """Starts a job."""
        ...

    def attach(self, job_id: str) -> JobHandle:
        """A handle on a job that any process has submitted to this backend.

        Raises:
            BadInput: there is no such job, or nothing is known of it any more.
        """
        ...

    def jobs(self) -> list[JobDetails]:
        """The jobs of this backend that are running or are still remembered, the newest first."""
        ...

    def check_resources(self, resources: ResourceConfig) -> None:
        """Says before anything is built or copied what `submit` would say later.

        Raises:
            UnsatisfiableResources: this backend can never give what is asked for.
        """
        ...

    def shutdown(self) -> None:
        """Terminates all jobs of this client that do not outlive their parent."""
        ...


def wait_all(
    handles: Iterable[JobHandle], timeout: float | None = None, *, raise_on_failure: bool = True
) -> list[JobStatus]:
    """Waits until all jobs have finished, for at most `timeout` seconds; their statuses in the order given.

    Terminates nothing.
    """
    jobs = list(handles)
    deadline = None if timeout is None else time.monotonic() + timeout
    poll_seconds = _FIRST_POLL_SECONDS
    statuses: dict[int, JobStatus] = {}
    while True:
        for position, job in enumerate(jobs):
            if position in statuses:
                continue
            if job.status().finished:
                statuses[position] = job.wait(0, raise_on_failure=raise_on_failure)
                poll_seconds = _FIRST_POLL_SECONDS
        if len(statuses) == len(jobs):
            return [statuses[position] for position in range(len(jobs))]
        if deadline is not None and time.monotonic() >= deadline:
            running = ", ".join(job.job_id for position, job in enumerate(jobs) if position not in statuses)
            raise JobTimeout(
                expected=f"all {len(jobs)} jobs to have finished after {timeout:g} s",
                found=f"{len(jobs) - len(statuses)} still running: {running}",
                remedy="Wait longer, or terminate them.",
            )
        remaining = poll_seconds if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(poll_seconds, remaining)))
        poll_seconds = min(poll_seconds * 2, _LAST_POLL_SECONDS)
