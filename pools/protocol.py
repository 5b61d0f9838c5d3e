"""Values that pool, replicas and users exchange with the proxy: limits, orders, leases, status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pools.endpoint import Scoring
from resources.config import Config

ReplicaState = Literal["starting", "ready", "draining", "dead"]
ProxyHealth = Literal["ready", "holding", "failed"]
LoadedHow = Literal["cold start", "reload", "restart", "already loaded"]

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}"
_KEY_PATTERN = r"^[A-Za-z0-9_-]{16,128}$"
_URL_PATTERN = r"^https?://[^/?#\s]+$"


class EngineKeys(NamedTuple):
    """Keys for an engine: its own, and that of an ingress in front of it."""

    engine: str | None = None
    ingress: str | None = None


NO_KEYS = EngineKeys()


class ProxyLimits(Config):
    """Limits of a proxy."""

    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """Largest request body; a larger body is answered 413."""
    max_buffered_bytes: int = Field(default=512 * 2**20, ge=1)
    """Limit of all request bodies that are read, wait or are being answered; a request beyond it is answered 429.
    Answers may take half of it."""
    head_timeout_seconds: float = Field(default=30, gt=0)
    """Time limit for a client to send the headers, and then each piece of the body."""
    max_held: int = Field(default=20_000, ge=0)
    """Requests that may wait for a replica at once; further requests are answered 429."""
    hold_timeout_seconds: float = Field(default=1800, gt=0)
    """Longest time a request waits for a replica before it is answered 503."""
    engine_timeout_seconds: float = Field(default=600, gt=0)
    """Time limit for a replica's answer, or for the next piece of a streamed answer."""
    connect_timeout_seconds: float = Field(default=10, gt=0)
    """Time limit for a replica's host to accept a connection."""
    probe_interval_seconds: float = Field(default=1, gt=0)
    """Pause between two probes of a replica to which a connection failed."""
    probe_timeout_seconds: float = Field(default=30, gt=0)
    """Time limit of such a probe; generous, as a busy engine answers late."""
    lease_seconds: float = Field(default=30, gt=0)
    """Time that a replica's announcement is valid; without a newer announcement its requests go to other replicas."""


class ServedModel(Config):
    """The checkpoint behind a model name, by its location and hex digests."""

    digest: str
    """Digest of the whole checkpoint: weights, tokenizer and template, config."""
    weights: str = ""
    tokenizer: str = ""
    config: str = ""
    uri: str = ""


class Failure(Config):
    """The class (`kind`) and the parts of an Assay error, to be raised again in another process."""

    kind: str
    expected: str
    found: str
    remedy: str


class LoadReport(Config):
    """A load of a checkpoint into a replica, successful or not.

    `reason` says why it could not be reloaded in place, `failure` why it cannot be served at all.
    """

    number: int
    """Number of the load at this replica, from 1."""
    model: str
    digest: str
    how: LoadedHow
    """Way of loading: into a new engine, into the running engine, or into a new engine as reloading failed."""
    seconds: float
    """Seconds from the order to the canary's answer."""
    phases: dict[str, float] = {}
    """Seconds by phase: stage, drain, reload, canary, start."""
    ended: float = 0.0
    """End time in seconds since 1970 by its machine's clock; 0 if unknown."""
    reason: str | None = None
    device: str | None = None
    failure: Failure | None = None


class Announcement(Config):
    """Status report of a replica; it is valid for `lease_seconds`."""

    instance: str
    """Identifies a process of the replica: a name belongs to a single instance at a time."""
    start: int = 0
    """Counts the pool's starts of agents. Of two instances with the same name, the later start has it; with equal
    starts the first instance has it, as long as it announces itself."""
    sequence: int = 0
    """Grows with every announcement of an instance: an older announcement that arrives late changes nothing."""
    url: str | None = Field(default=None, pattern=_URL_PATTERN)
    """Address of its engine, without a path, such as http://127.0.0.1:8001."""
    ingress_key: str | None = Field(default=None, pattern=_KEY_PATTERN, repr=False)
    """First line of each connection to that address, if the engine is behind an ingress."""
    engine_key: str | None = Field(default=None, pattern=_KEY_PATTERN, repr=False)
    """Key that its engine requires, known to agent and proxy alone."""
    door: str | None = Field(default=None, pattern=_URL_PATTERN)
    """Control endpoint for the other hosts of a multi-host replica."""
    capacity: int = Field(default=1, ge=1)
    """Requests it works on at once; load is measured relative to it."""
    state: ReplicaState = "starting"
    """Only a ready replica gets requests; a dead replica also loses its requests in flight."""
    model: str | None = None
    digest: str | None = None
    """Digest of the checkpoint it holds; None while no checkpoint accepts requests."""
    prompt_logprobs: bool = False
    """True if its engine returns log-probabilities of the prompt's tokens."""
    max_model_len: int | None = None
    """Maximum length of prompt plus answer in tokens."""
    scoring: Scoring = Scoring()
    """Scoring properties of its engine; the pool adds the digest of the engine."""
    engine_version: str | None = None
    restarts: int = 0
    """Restarts after an engine died, since this replica exists."""
    last_death: str | None = None
    """First error in the log of the engine that died last."""
    deaths: dict[str, int] = {}
    """Deaths of engines by an error of their own, by the digest of the checkpoint that they held."""
    failure: Failure | None = None
    loads: tuple[LoadReport, ...] = ()
    seen: int = -1
    """Version of the orders it received last."""
    wait_seconds: float = Field(default=0, ge=0, le=60)
    """Time that the answer may be held back while there are no new orders."""
    until_idle: bool = False
    """Return when nothing is in flight on it any more, not when orders change."""

    @field_validator("url")
    @classmethod
    def _has_host_and_port(cls, url: str | None) -> str | None:
        if url is not None and (not urlsplit(url).hostname or urlsplit(url).port == 0):  # .port raises too
            raise ValueError("expected a host, and a port from 1 to 65535 if any")
        return url


class Orders(Config):
    """The pool's orders for a replica, returned for an announcement."""

    version: int
    """Changes with the orders."""
    known: bool
    """False until the pool has published a state: the replica goes on as it is."""
    stop: bool = False
    """The replica must stop: the pool does not need it any more, or another instance has its name."""
    refusal: str | None = None
    """Reason that its announcement does not count, if another instance has its name."""
    model: str | None = None
    """Name of the checkpoint it must hold; None if there is nothing to do."""
    served: ServedModel | None = None
    next: dict[str, ServedModel] = {}
    """Checkpoints that may be ordered soon, to be staged ahead."""
    in_flight: int = 0


class DesiredState(Config):
    """The pool's desired state; each state replaces the previous state."""

    models: dict[str, ServedModel] = {}
    """Every model name that may be requested, now or soon."""
    engine: str = ""
    """Identity of the engine (build and arguments): answers of different engines are kept apart."""
    orders: dict[str, str | None] = {}
    """Replicas of the pool, and the model name that each must hold; other replicas are ordered to stop."""
    next: tuple[str, ...] = ()
    unusable: dict[str, Failure] = {}
    """Model names that cannot be served: requests for them are answered 503 with the reason."""
    failed: str | None = None
    """Reason that the pool has failed: every request is answered 503 with it."""
    tries_again: bool = False
    """Hold requests that arrive after the failure and belong to no cell, since the pool tries again for them."""


class Lease(Config):
    """A user's demand on the pool; after `seconds` without renewal it is dropped."""

    holder: str
    seconds: float = Field(gt=0, le=86_400)
    """Seconds until it ends unless it is renewed."""
    models: dict[str, ServedModel] = {}
    wants: tuple[str, ...] = ()
    tries: dict[str, int] = {}
    """Number of requests of each model name; a higher number lets a failed checkpoint be tried again."""


class LeaseStatus(Lease):
    """A lease as the proxy has it."""

    seconds_left: float
    """Seconds until it ends without renewal."""


class CellOptions(Config):
    """Options of an attempt at a cell, when it is opened or closed."""

    mirror: str | None = None
    """Folder in any store that its answers are read from when it is opened, and copied to."""
    traceparent: str | None = Field(default=None, pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
    """Span of its requests, as in W3C's Trace Context."""
    drop: bool = False
    """Delete the answers in the mirror when it is closed, since the cell has its record."""


class ReplicaStatus(Config):
    """A replica as the proxy sees it."""

    name: str
    ordered: str | None
    announcement: Announcement
    lost: bool
    """True if its lease has run out: it gets no requests until it announces itself again."""
    silent_seconds: float
    suspect: bool
    """True if a connection to it failed, and no probe has succeeded since."""
    in_flight: int
    consecutive_failures: int
    """Connections that failed or timed out since its last answer."""

    @property
    def usable(self) -> bool:
        return self.announcement.state == "ready" and not self.lost and not self.suspect

    def holds(self, digest: str) -> bool:
        """Returns True if it is ready with the checkpoint of this digest; recent connections to it may have failed."""
        return self.announcement.state == "ready" and not self.lost and self.announcement.digest == digest


@dataclass(slots=True)
class RequestCounters:
    """Requests since the proxy started, by outcome; only the proxy changes them, a tenth as fast in a Config."""

    answered: int = 0
    """Complete answers with status 2xx, those from the journal included."""
    client_errors: int = 0
    """Refusals of the engine (4xx) that were passed on."""
    server_errors: int = 0
    """Answers with status 5xx, broken streams, and requests that the proxy itself refused."""
    cancelled: int = 0
    """Clients that disconnected before their answer."""
    retried: int = 0
    """Attempts after the first."""
    upstream: int = 0
    """Attempts that were sent to an engine."""
    held: int = 0
    """Requests that had to wait for a replica."""
    journal_hits: int = 0
    """Requests that were answered from the journal."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Demand(Config):
    """Requests for a model now."""

    held: int = 0
    in_flight: int = 0
    suspects: int = 0
    """Requests that were in flight at two deaths of engines: open, to be sent alone, or proved to be the cause."""
    unserved_seconds: float = 0.0
    """Seconds in which requests came and none was served; goes on for clients that give up and retry."""
    idle_seconds: float = 0.0
    """Seconds since the last request for it arrived or was answered; 0 while a request is open."""


@dataclass(slots=True)
class JournalStatus:
    """Counts of the journal since the proxy started; only the journal changes them."""

    hits: int = 0
    misses: int = 0
    """Requests that it could have answered, but had no answer for."""
    kept: int = 0
    refused: int = 0
    """Answers that were not written, since they were incomplete or invalid."""
    errors: int = 0
    dropped: int = 0
    """Answers dropped for lack of space, or because they were unreadable."""
    bytes: int = 0


class ProxyStatus(Config):
    """Answer of `GET /admin/status`."""

    instance: str
    version: int
    """Changes when replicas, demand or leases change."""
    status: ProxyHealth
    replicas: tuple[ReplicaStatus, ...]
    """Every replica that has announced itself or was ordered."""
    held: int
    models: dict[str, RequestCounters]
    demand: dict[str, Demand]
    unusable: dict[str, Failure]
    failed: str | None
    replica_seconds: dict[str, float]
    """Total seconds that replicas were ordered to hold each model."""
    leases: dict[str, LeaseStatus]
    journal: JournalStatus | None
