"""Messages between the parts of the Ray backend: client to controller, controller to node, and back. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from resources.backends.ray.code import SentFolder
from resources.config import ResourceConfig
from resources.errors import AssayError
from resources.jobs.jobs import Command, EnvironmentConfig

DETACHED = "controller-detached"
"""Prefix of the names of controllers whose jobs outlive their parent."""
NAMESPACE = "assay"
"""Of all actors of ours in a Ray cluster."""
KEPT_LOG_BYTES = 8 << 20
"""Part of a job's output that its controller keeps in memory, for all its processes; each has a part at least."""


@dataclass(frozen=True, kw_only=True)
class ProcessOrder:
    """One process of a job, as a node is to run it: a replica, or one host's part of one."""

    job_id: str
    attempt: int
    replica: int
    replicas: int
    host: int
    hosts: int
    entrypoint: Command | bytes
    """A command, or a pickled call; empty for a large one, which is fetched apart."""
    environment: EnvironmentConfig
    device_variables: Mapping[str, str]
    """Variables for the device; the environment's own win."""
    given: Mapping[str, str]
    """Variables of the backend; they win over the environment's own."""
    is_tpu: bool
    workspace: SentFolder
    working_directory: str
    """On the submitting machine."""
    imports: tuple[str, ...]
    """Folders of the submitting machine that a call's modules are looked for in."""
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """One job, as its controller is to run it."""

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
    """Under which processes of the job find the cluster."""


@dataclass(frozen=True)
class Output:
    """A piece of what a process has written."""

    content: bytes = b""
    start: int = 0
    """Bytes that it had written before: a piece that is sent twice is known by it."""
    skipped_lines: int = 0
    """Lines before this piece that are not sent, since the process writes faster than can be reported."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """End of a process of a job."""

    outcome: Literal["succeeded", "failed", "preempted", "stopped", "refused"]
    reason: str | None = None
    output: Output = Output()
    """The part of its output that was not reported yet."""
    announcement: str | None = None
    result: bytes | None = None
    """The file that the process has left for `JobHandle.result`."""
    refusal: AssayError | None = None
    """The reason that it could not be started, and never will be."""
