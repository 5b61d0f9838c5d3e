"""Values that pool, replicas and users exchange with the proxy: limits, orders, leases, status."""

from __future__ import annotations

from typing import Literal
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


class ProxyLimits(Config):
    """Limits of one proxy; each field is a flag of its command line (`max_held` is `--max-held`)."""

    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """Largest request body; a larger one is answered 413."""
    max_buffered_bytes: int = Field(default=512 * 2**20, ge=1)
    """Request bodies that are read, wait or are being answered, together; a request beyond is answered 429. Answers
    may take half of it."""
    head_timeout_seconds: float = Field(default=30, gt=0)
    """Longest time a client may take over the headers, and then over each piece of the body."""
    max_held: int = Field(default=20_000, ge=0)
    """Requests that may wait for a replica at once; one more is answered 429."""
    hold_timeout_seconds: float = Field(default=1800, gt=0)
    """Longest time a request waits for a replica before it is answered 503."""
    engine_timeout_seconds: float = Field(default=600, gt=0)
    """Longest time a replica may take over one answer, or over the next piece of a streamed one."""
    connect_timeout_seconds: float = Field(default=10, gt=0)
    """Longest time a replica's host may take to accept a connection."""
    probe_interval_seconds: float = Field(default=1, gt=0)
    """Pause between two looks at a replica that a connection to failed."""
    probe_timeout_seconds: float = Field(default=30, gt=0)
    """Longest time such a look may take; generous, as a busy engine answers late."""
    lease_seconds: float = Field(default=30, gt=0)
    """Time that an announcement of a replica holds; without another one its requests go elsewhere."""


class ServedModel(Config):
    """The checkpoint behind a model name. The digests are hex."""

    digest: str
    """Over the whole checkpoint: weights, tokenizer and template, config."""
    weights: str = ""
    """Over the weights alone."""
    tokenizer: str = ""
    """Over tokenizer and chat template."""
    config: str = ""
    """Over the model's configuration."""
    uri: str = ""
    """Its location."""


class Failure(Config):
    """The reason that something cannot be had: the parts of an error of ours, to be raised again elsewhere."""

    kind: str
    """Class of the error."""
    expected: str
    """State of things that was expected."""
    found: str
    """State that was found instead."""
    remedy: str
    """Remedy, for people."""


class LoadReport(Config):
    """One load of one checkpoint into one replica, successful or not."""

    number: int
    """Counts the loads of this replica, from 1."""
    model: str
    """Name of the checkpoint."""
    digest: str
    """Digest of the checkpoint."""
    how: LoadedHow
    """Into a new engine, into the running one, or into a new one because the running one would not do."""
    seconds: float
    """From the order to the canary's answer."""
    phases: dict[str, float] = {}
    """Seconds by phase: stage, drain, reload, canary, start."""
    ended: float = 0.0
    """Time of its end, in seconds since 1970 by its machine's clock; 0 where that is not said."""
    reason: str | None = None
    """The reason that it could not be reloaded in place."""
    device: str | None = None
    """Name of the device that the engine has, such as NVIDIA H100 80GB HBM3; empty where its machine does not say."""
    failure: Failure | None = None
    """The reason that it cannot be served at all."""


class Announcement(Config):
    """A replica's word on itself; it holds for `lease_seconds`."""

    instance: str
    """Tells one process of the replica from the next: a name belongs to one of them at a time."""
    start: int = 0
    """Counts the pool's starts of agents: of two that have a name, the later one has it; of two of one start the first,
    for as long as it is heard of."""
    sequence: int = 0
    """Grows with every announcement of an instance: an older one that arrives late changes nothing."""
    url: str | None = Field(default=None, pattern=_URL_PATTERN)
    """Address of its engine, without a path, such as http://127.0.0.1:8001."""
    ingress_key: str | None = Field(default=None, pattern=_KEY_PATTERN, repr=False)
    """First line of each connection to that address, where the engine is behind an ingress."""
    engine_key: str | None = Field(default=None, pattern=_KEY_PATTERN, repr=False)
    """Key that its engine asks for, known to agent and proxy alone."""
    door: str | None = Field(default=None, pattern=_URL_PATTERN)
    """Address at which its other hosts are told what to do, where it has several."""
    capacity: int = Field(default=1, ge=1)
    """Requests it works on at once; load is measured against it."""
    state: ReplicaState = "starting"
    """Only a ready replica gets requests; a dead one also gives up those it has."""
    model: str | None = None
    """Name of the checkpoint it holds."""
    digest: str | None = None
    """Digest of the checkpoint it holds; none while it holds none that may be asked."""
    prompt_logprobs: bool = False
    """True if its engine returns log-probabilities of the prompt's tokens."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens."""
    scoring: Scoring = Scoring()
    """Its engine's way to score texts from the cache, which the pool completes by a digest of the engine."""
    engine_version: str | None = None
    """Version of the engine, as it says."""
    restarts: int = 0
    """Engines started again because one died, since this replica exists."""
    last_death: str | None = None
    """The first error in the log of the engine that died last."""
    deaths: dict[str, int] = {}
    """Engines that died of an error of their own, by the digest of the checkpoint that they held."""
    failure: Failure | None = None
    """The reason that it is dead."""
    loads: tuple[LoadReport, ...] = ()
    """The last few loads."""
    seen: int = -1
    """Version of the orders it knows."""
    wait_seconds: float = Field(default=0, ge=0, le=60)
    """Longest time the answer may be held back while there is nothing new for it."""
    until_idle: bool = False
    """Wants to hear when nothing is in flight on it any more, rather than of new orders."""

    @field_validator("url")
    @classmethod
    def _has_host_and_port(cls, url: str | None) -> str | None:
        if url is not None and (not urlsplit(url).hostname or urlsplit(url).port == 0):  # .port raises too
            raise ValueError("expected a host, and a port from 1 to 65535 if any")
        return url


class Orders(Config):
    """Answer to an announcement: what the pool wants of the replica."""

    version: int
    """Changes with the orders."""
    known: bool
    """False until the pool has published anything: the replica goes on as it is."""
    stop: bool = False
    """The pool does not want it any more, or another instance has its name."""
    refusal: str | None = None
    """The reason that its announcement does not count, where another instance has its name."""
    model: str | None = None
    """Name of the checkpoint it is to hold; none while there is nothing to do."""
    served: ServedModel | None = None
    """That checkpoint."""
    next: dict[str, ServedModel] = {}
    """Checkpoints it may be asked for soon, to be staged ahead."""
    in_flight: int = 0
    """Requests it is working on."""


class DesiredState(Config):
    """The pool's wishes; each one replaces the one before."""

    models: dict[str, ServedModel] = {}
    """Every model name that may be asked, now or soon."""
    engine: str = ""
    """Identity of the engine (build and arguments): answers of one are not answers of another."""
    orders: dict[str, str | None] = {}
    """Replicas that belong to the pool, and the model name each is to hold; others are told to stop."""
    next: tuple[str, ...] = ()
    """Model names that will be asked soon, in order."""
    unusable: dict[str, Failure] = {}
    """Model names whose checkpoint cannot be served: requests for them are answered 503 with the reason."""
    failed: str | None = None
    """The reason that the pool has given up: every request is answered 503 with it."""
    tries_again: bool = False
    """A request that comes after that, and belongs to no cell, is held, since the pool tries again for it."""


class Lease(Config):
    """A user's wishes; it holds for `seconds`, then what it names is forgotten."""

    holder: str
    """Name of the user, for people."""
    seconds: float = Field(gt=0, le=86_400)
    """Time that it holds unless it is renewed."""
    models: dict[str, ServedModel] = {}
    """Checkpoints that the user may ask for."""
    wants: tuple[str, ...] = ()
    """Model names it wants now, in order."""
    tries: dict[str, int] = {}
    """Times it has wanted each anew: one more lets a checkpoint that could not be served be tried again."""


class LeaseStatus(Config):
    """A lease as the proxy knows it."""

    holder: str
    """Name of the user."""
    seconds_left: float
    """Time until it ends by itself."""
    models: dict[str, ServedModel]
    """Checkpoints it brought."""
    wants: tuple[str, ...]
    """Model names it wants now, in order."""
    tries: dict[str, int]
    """Times it has wanted each anew."""


class ReplicaStatus(Config):
    """One replica as the proxy sees it."""

    name: str
    """Its name."""
    ordered: str | None
    """Model name it is to hold."""
    announcement: Announcement
    """Its last announcement."""
    lost: bool
    """Its lease has run out: it gets no requests until it announces itself again."""
    silent_seconds: float
    """Time since its last announcement."""
    suspect: bool
    """A connection to it failed, and it has not answered a probe since."""
    in_flight: int
    """Requests it is working on."""
    consecutive_failures: int
    """Connections that failed or timed out since its last answer."""

    @property
    def usable(self) -> bool:
        """True if it is there and answers, for the weights it holds."""
        return self.announcement.state == "ready" and not self.lost and not self.suspect

    def holds(self, digest: str) -> bool:
        """True if it is ready with the checkpoint of this digest; connections to it may have failed lately."""
        return self.announcement.state == "ready" and not self.lost and self.announcement.digest == digest


class RequestCounters(Config):
    """Requests since the proxy started, by outcome."""

    answered: int = 0
    """Answers with status 2xx that were passed on whole, those from the journal included."""
    client_errors: int = 0
    """Refusals of the engine (4xx) that were passed on."""
    server_errors: int = 0
    """Answers with status 5xx, streams that broke, and requests the proxy itself turned away."""
    cancelled: int = 0
    """Clients that left before their answer."""
    retried: int = 0
    """Attempts after the first one."""
    upstream: int = 0
    """Attempts that were sent to an engine."""
    held: int = 0
    """Requests that had to wait for a replica."""
    journal_hits: int = 0
    """Requests that were answered from the journal."""
    prompt_tokens: int = 0
    """Tokens in, as the engine counted them; answers from the journal do not count again."""
    completion_tokens: int = 0
    """Tokens out, likewise."""


class Demand(Config):
    """Requests for one model now."""

    held: int = 0
    """Requests that wait for a replica that holds it."""
    in_flight: int = 0
    """Requests that replicas are working on."""
    suspects: int = 0
    """Requests that were in flight at two deaths of engines: open, to be sent alone, or proved to be their cause."""
    unserved_seconds: float = 0.0
    """Time that requests have come without one being served; a client that gives up and asks again waits on."""
    idle_seconds: float = 0.0
    """Time since the last request for it came or was answered; 0 while there is one."""


class JournalStatus(Config):
    """Counts of the journal since the proxy started."""

    hits: int = 0
    """Requests answered from it."""
    misses: int = 0
    """Requests it could have answered, and had no answer for."""
    kept: int = 0
    """Answers written."""
    refused: int = 0
    """Answers that were not whole or not valid, hence not written."""
    errors: int = 0
    """Times the disk or the database failed it."""
    dropped: int = 0
    """Answers thrown away for lack of space, or because they could not be read."""
    bytes: int = 0
    """Size of what it holds."""


class ProxyStatus(Config):
    """Answer of `GET /admin/status`."""

    instance: str
    """Tells one start of the proxy from the next."""
    version: int
    """Changes when something worth acting on does."""
    status: ProxyHealth
    """As on `/health`."""
    replicas: tuple[ReplicaStatus, ...]
    """Every replica that has announced itself, or was ordered."""
    held: int
    """Requests that wait for a replica."""
    models: dict[str, RequestCounters]
    """Counters of every model that was asked."""
    demand: dict[str, Demand]
    """Models that are being asked, or were lately."""
    unusable: dict[str, Failure]
    """Models that cannot be served."""
    failed: str | None
    """The reason that the pool has given up."""
    replica_seconds: dict[str, float]
    """Time that replicas were ordered to hold each model, added up."""
    leases: dict[str, LeaseStatus]
    """Users of the pool."""
    journal: JournalStatus | None
    """The journal; none where there is none."""
