"""What the parts of the Ray backend tell each other: client to keeper, keeper to node, and back. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from resources.backends.ray.code import SentFolder
from resources.config import ResourceConfig
from resources.errors import AssayError
from resources.jobs.jobs import Command, EnvironmentConfig

DETACHED = "keeper-detached"
"""How names of keepers begin whose jobs outlive their parent."""
NAMESPACE = "assay"
"""Of all actors of ours in a Ray cluster."""
LOG_BYTES = 1 << 20
"""How much of each process's output is kept."""


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
    """A command, or a pickled call."""
    environment: EnvironmentConfig
    device_variables: Mapping[str, str]
    """What the device wants to know; the environment's own variables win."""
    given: Mapping[str, str]
    """What the backend says, whatever the environment's own variables are."""
    is_tpu: bool
    workspace: SentFolder
    working_directory: str
    """On the submitting machine."""
    imports: tuple[str, ...]
    """Folders of the submitting machine that a call's modules are looked for in."""
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """One job, as its keeper is to run it."""

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


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How a process of a job ended."""

    outcome: Literal["succeeded", "failed", "preempted", "stopped", "refused"]
    reason: str | None = None
    output: bytes = b""
    """What of its output was not reported yet."""
    announcement: str | None = None
    refusal: AssayError | None = None
    """Why it could not be started, and never will."""
