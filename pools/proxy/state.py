"""What the pool and its proxy say to each other: limits, desired state, status."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from resources.config import Config

ReplicaState = Literal["starting", "ready", "draining", "dead"]
ProxyHealth = Literal["ready", "holding", "failed"]


class ProxyLimits(Config):
    """Limits of one proxy; each field is a flag of its command line (`max_held` is `--max-held`)."""

    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """Largest request body; a larger one is answered 413."""
    max_held: int = Field(default=20_000, ge=0)
    """Requests that may wait for a replica at once; one more is answered 429."""
    hold_timeout_seconds: float = Field(default=1800, gt=0)
    """How long a request waits for a replica before it is answered 503."""
    engine_timeout_seconds: float = Field(default=600, gt=0)
    """How long a replica may take over one answer, or over the next piece of a streamed one."""
    connect_timeout_seconds: float = Field(default=10, gt=0)
    """How long a replica's host may take to accept a connection."""
    probe_interval_seconds: float = Field(default=1, gt=0)
    """Pause between two looks at a replica that a connection to failed."""
    probe_timeout_seconds: float = Field(default=30, gt=0)
    """How long such a look may take; generous, as a busy engine answers late."""


class DesiredReplica(Config):
    """One engine server as the pool sees it."""

    name: str = Field(min_length=1)
    """Name that stays the same when the engine is started again."""
    url: str = Field(pattern=r"^https?://[^/?#\s]+$")
    """Address without a path, such as http://127.0.0.1:8001."""
    digest: str | None = None
    """Digest of the weights it holds; none while it holds none that may be asked."""
    capacity: int = Field(default=1, ge=1)
    """Requests it works on at once; load is measured against it."""
    state: ReplicaState = "starting"
    """Only a ready replica gets requests; a dead one also gives up those it has."""


class DesiredState(Config):
    """All that the proxy needs to know; each one replaces the one before."""

    models: dict[str, str] = {}
    """Digest of the weights behind each model name that may be asked, now or soon."""
    replicas: tuple[DesiredReplica, ...] = ()
    """The engine servers there are."""
    failed: str | None = None
    """Why the pool has given up: every request is answered 503 with it."""

    @field_validator("replicas")
    @classmethod
    def _names_differ(cls, replicas: tuple[DesiredReplica, ...]) -> tuple[DesiredReplica, ...]:
        names = [replica.name for replica in replicas]
        if len(set(names)) < len(names):
            raise ValueError(f"expected replicas of different names, found {', '.join(sorted(names))}")
        return replicas


class ReplicaStatus(Config):
    """One replica as the proxy sees it."""

    name: str
    """Its name."""
    state: ReplicaState
    """What the pool said of it."""
    digest: str | None
    """Digest of its weights, as the pool said."""
    suspect: bool
    """A connection to it failed, and it has not answered a probe since."""
    in_flight: int
    """Requests it is working on."""
    consecutive_failures: int
    """Connections that failed or timed out since its last answer."""


class ModelCounters(Config):
    """What became of the requests for one model since the proxy started."""

    answered: int = 0
    """Answers with status 2xx that were passed on whole."""
    client_errors: int = 0
    """Refusals of the engine (4xx) that were passed on."""
    server_errors: int = 0
    """Answers with status 5xx, streams that broke, and requests the proxy itself turned away."""
    cancelled: int = 0
    """Clients that left before their answer."""
    retried: int = 0
    """Attempts after the first one."""


class ProxyStatus(Config):
    """Answer of `GET /admin/status`."""

    status: ProxyHealth
    """As on `/health`."""
    replicas: tuple[ReplicaStatus, ...]
    """Every replica of the desired state."""
    held: int
    """Requests that wait for a replica."""
    models: dict[str, ModelCounters]
    """Counters of every model that was asked."""
