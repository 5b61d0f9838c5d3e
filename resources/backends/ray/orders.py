"""Messages of the Ray backend between client, controller and node, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from resources.backends.ray.code import SentFolder
from resources.config import ResourceConfig
from resources.errors import AssayError
from resources.jobs.jobs import Command, EnvironmentConfig

DETACHED = "controller-detached"
"""Name prefix of controllers for jobs that outlive their parent."""
NAMESPACE = "assay"
"""Namespace of all actors of Assay in a Ray cluster."""
KEPT_LOG_BYTES = 8 << 20
"""Bytes of a job's output that its controller keeps in memory, over all processes; each keeps at least a part."""


@dataclass(frozen=True, kw_only=True)
class ProcessOrder:
    """A process of a job for a node to run: a replica, or the part of a multi-host replica on a host."""

    job_id: str
    attempt: int
    replica: int
    replicas: int
    host: int
    hosts: int
    entrypoint: Command | bytes
    """A command, or a pickled call; empty for a large call, which is fetched from the object store."""
    environment: EnvironmentConfig
    device_variables: Mapping[str, str]
    """Variables for the device; variables of the environment override them."""
    given: Mapping[str, str]
    """Variables of the backend; they override those of the environment."""
    is_tpu: bool
    workspace: SentFolder
    working_directory: str
    """Path on the submitting machine."""
    imports: tuple[str, ...]
    """Folders on the submitting machine with the call's modules."""
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """A job for its controller to run."""

    job_id: str
    name: str
    client: str
    entrypoint: Command | bytes
    environment: EnvironmentConfig
    resources: ResourceConfig
    replicas: int
    max_retries_failure: int
    max_retries_preemption: int
    outlives_parent: bool
    workspace: SentFolder
    working_directory: str
    imports: tuple[str, ...]
    grace_seconds: float
    submitted_at: float
    address: str
    """Address of the cluster for processes of the job."""


@dataclass(frozen=True)
class Output:
    """A piece of a process's output."""

    content: bytes = b""
    start: int = 0
    """Number of bytes before this piece, by which a repeated piece is recognized."""
    skipped_lines: int = 0
    """Lines before this piece that were not sent, since the process writes faster than it can report."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """End of a process of a job."""

    outcome: Literal["succeeded", "failed", "preempted", "stopped", "refused"]
    reason: str | None = None
    output: Output = Output()
    """Output that was not reported yet."""
    announcement: str | None = None
    result: bytes | None = None
    """File that the process wrote for `JobHandle.result`."""
    refusal: AssayError | None = None
    """The reason that it could not be started and never will be."""
