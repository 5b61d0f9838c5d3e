"""Which replica gets a request, and what a failed attempt leads to: decisions only, no input or output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pools.proxy.state import DesiredReplica, DesiredState, ProxyHealth, ReplicaState, ReplicaStatus

MAX_ATTEMPTS = 3
"""Times one request is sent in all: a prompt that crashes engines must not take down every replica."""


class Outcome(Enum):
    """How one attempt at one replica ended."""

    ANSWERED = "answered"
    """A whole answer that is the client's to deal with: any status below 500."""
    SERVER_ERROR = "server error"
    """A whole answer with status 5xx."""
    LOST = "lost"
    """No connection, or one that broke before the answer was whole."""
    TIMED_OUT = "timed out"
    """No answer in the time an engine has for one."""


def outcome_of(status: int) -> Outcome:
    """The outcome of an attempt that ended with a whole answer of this HTTP status."""
    return Outcome.SERVER_ERROR if status >= 500 else Outcome.ANSWERED


def may_retry(outcome: Outcome, *, attempts: int) -> bool:
    """Whether to send a request again after `attempts` attempts, of which the last ended so."""
    return outcome is not Outcome.ANSWERED and attempts < MAX_ATTEMPTS


@dataclass(slots=True, eq=False)
class Replica:
    """One engine server: what the pool said of it, and what happened to it here."""

    name: str
    url: str
    digest: str | None
    capacity: int
    state: ReplicaState
    in_flight: int = 0
    consecutive_failures: int = 0
    suspect: bool = False
    last_turn: int = 0

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go to it."""
        return self.state == "ready" and not self.suspect

    @property
    def status(self) -> ReplicaStatus:
        """Its state as a value."""
        return ReplicaStatus(
            name=self.name,
            state=self.state,
            digest=self.digest,
            suspect=self.suspect,
            in_flight=self.in_flight,
            consecutive_failures=self.consecutive_failures,
        )


@dataclass(slots=True)
class RoutingTable:
    """The models and replicas there are, with their load. Used from one thread.

    `models` is none until the pool has said for the first time what there is: a request that comes earlier, as
    after a restart of the proxy, has to wait, not to be told that its model is unknown.
    """

    models: Mapping[str, str] | None = None
    failed: str | None = None
    replicas: dict[str, Replica] = field(default_factory=dict)
    _turn: int = 0

    def apply(self, desired: DesiredState) -> list[Replica]:
        """Replaces what the pool wants; replicas that keep their name keep their load.

        Returns:
            replicas that are dead or gone: whatever they were working on will not be answered.
        """
        before = self.replicas
        self.models = dict(desired.models)
        self.failed = desired.failed
        self.replicas = {wanted.name: _updated(before.get(wanted.name), wanted) for wanted in desired.replicas}
        lost = [replica for name, replica in before.items() if name not in self.replicas]
        for replica in lost:
            replica.state = "dead"
        return lost + [replica for replica in self.replicas.values() if replica.state == "dead"]

    def choose(self, digest: str, *, tried: Mapping[str, Outcome]) -> Replica | None:
        """The least loaded replica that holds these weights and takes requests; equals take turns.

        Args:
            digest: of the weights that must answer.
            tried: how this request fared at replicas already: one that timed out is not asked again, others only
                where there is no replica that was not tried.
        """
        able = [
            replica
            for replica in self.replicas.values()
            if replica.takes_requests and replica.digest == digest and tried.get(replica.name) is not Outcome.TIMED_OUT
        ]
        if not able:
            return None
        return min(able, key=lambda one: (one.name in tried, one.in_flight / one.capacity, one.last_turn))

    def begin(self, replica: Replica) -> None:
        """Counts a request that is sent to a replica now."""
        self._turn += 1
        replica.last_turn = self._turn
        replica.in_flight += 1

    def end(self, replica: Replica, outcome: Outcome | None) -> None:
        """Counts a request that a replica is done with; no outcome where the client left."""
        replica.in_flight -= 1
        if outcome in (Outcome.LOST, Outcome.TIMED_OUT):
            replica.consecutive_failures += 1
            replica.suspect = True
        elif outcome is not None:
            replica.consecutive_failures = 0

    @property
    def health(self) -> ProxyHealth:
        """Whether requests are answered now, held, or refused."""
        if self.failed is not None:
            return "failed"
        return "ready" if any(replica.takes_requests for replica in self.replicas.values()) else "holding"


def _updated(known: Replica | None, wanted: DesiredReplica) -> Replica:
    if known is None:
        return Replica(wanted.name, wanted.url, wanted.digest, wanted.capacity, wanted.state)
    if known.url != wanted.url or (known.state != "ready" and wanted.state == "ready"):
        # Another engine, or one the pool has just seen answer: what happened to the one before says nothing of it.
        known.suspect = False
        known.consecutive_failures = 0
    known.url, known.digest = wanted.url, wanted.digest
    known.capacity, known.state = wanted.capacity, wanted.state
    return known
