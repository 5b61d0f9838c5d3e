"""A replica as the proxy knows it, the instance that has its name, and the requests that may kill its engines.

No input or output.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pools.protocol import Announcement, EngineKeys

MAX_ATTEMPTS = 3
"""Failing attempts at a request: a prompt that crashes engines must not take down every replica."""
SUSPECT_DEATHS = 2
"""Deaths of engines at which a request was in flight; after them it is sent alone."""
_MOST_KILLERS = 10_000

Claim = Literal["holds", "takes", "waits", "refused"]
"""Effect of an announcement on a name: its instance has it already, has it from now on, waits until the instance that
has it is gone, or must stop."""


class RequestOutcome(Enum):
    """The end of an attempt at a replica."""

    ANSWERED = "answered"
    """A complete answer for the client: any status below 500."""
    SERVER_ERROR = "server error"
    """A complete answer with status 5xx, or an invalid answer."""
    LOST = "lost"
    """A connection that broke before the answer was complete."""
    UNREACHED = "unreached"
    """No connection: the replica has not received the request."""
    TAKEN_AWAY = "taken away"
    """The replica's lease ran out, or its agent reported the death of the engine, before the answer was complete."""
    TIMED_OUT = "timed out"
    """No answer within the engine's time limit."""


@dataclass(slots=True, eq=False)
class RoutedReplica:
    """An engine server: its announcement, the pool's order for it, and its load and failures at this proxy."""

    name: str
    announcement: Announcement
    announced: float
    """Time of the announcement, on the table's clock."""
    ordered: str | None = None
    """Model name that it must hold."""
    ordered_digest: str | None = None
    ordered_at: float = 0.0
    lost: bool = False
    hung_up: bool = False
    """True if it disconnected during its last announcement."""
    in_flight: int = 0
    consecutive_failures: int = 0
    suspect: bool = False
    last_turn: int = 0
    reserved: object | None = None  # for a suspect request, which is sent once nothing else is in flight

    @property
    def url(self) -> str:
        return self.announcement.url or ""

    @property
    def keys(self) -> EngineKeys:
        return EngineKeys(self.announcement.engine_key, self.announcement.ingress_key)

    @property
    def takes_requests(self) -> bool:
        """True if new requests may go to it: it is ready with the weights that the pool ordered."""
        announcement = self.announcement
        return (
            announcement.state == "ready"
            and not self.suspect
            and not self.lost
            and announcement.url is not None
            and (self.ordered_digest is None or self.ordered_digest == announcement.digest)
        )

    @property
    def is_there(self) -> bool:
        return not (self.gone or self.hung_up)

    @property
    def engine(self) -> tuple[str | None, int]:
        """Identity of the running engine: another address or restart count is another engine."""
        return self.announcement.url, self.announcement.restarts

    @property
    def gone(self) -> bool:
        """True if its requests in flight will not be answered."""
        return self.lost or self.announcement.state == "dead"


class Names:
    """Decides between instances with the same name; refused instances stay refused (a pool starts few).

    Of two instances from different starts of the pool, the later has the name. Of two instances of the same start, the
    first has it, and the other is refused as soon as the first announces itself again. If the first is gone, as when a
    backend restarts or moves an agent, the other gets the name.
    """

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}
        self._waiting: dict[str, str] = {}

    def claim(self, name: str, announcement: Announcement, *, holder: Announcement | None, is_there: bool) -> Claim:
        """Decides about an announcement of any instance of the name.

        `holder` is the last announcement of the instance that has the name; `is_there` is True if it may still live.
        """
        instance = announcement.instance
        if holder is not None and announcement.start < holder.start:
            self._refused[instance] = f"a later start of {name} has its name"
        if instance in self._refused:
            return "refused"
        if holder is not None and holder.instance == instance:
            if (other := self._waiting.pop(name, None)) is not None:
                self._refused[other] = f"another instance has the name {name} and is there"
            return "holds"
        if holder is not None and holder.start == announcement.start and is_there:
            self._waiting[name] = instance
            return "waits"
        self._waiting.pop(name, None)
        if holder is not None:
            self._refused[holder.instance] = f"another instance has taken over the name {name}"
        return "takes"

    def refusal(self, instance: str) -> str | None:
        return self._refused.get(instance)

    def waits(self, name: str, instance: str) -> bool:
        return self._waiting.get(name) == instance


class Suspects:
    """Losses of open requests, and the requests that killed engines."""

    def __init__(self) -> None:
        self._losses: dict[object, tuple[str, list[tuple[RoutedReplica, int]]]] = {}
        self._killers: dict[bytes, str] = {}
        self._condemned: Counter[str] = Counter()

    def lost(self, request: object, model: str, replica: RoutedReplica, *, deaths_before: int) -> int:
        """Records a broken connection after `deaths_before` deaths of the replica's engines; returns the losses."""
        losses = self._losses.setdefault(request, (model, []))[1]
        losses.append((replica, deaths_before))
        return len(losses)

    def deaths(self, request: object) -> int:
        return sum(deaths_of(replica) > before for replica, before in self._losses.get(request, ("", []))[1])

    def is_settled(self, request: object) -> bool:
        """Returns True once each loss is known to be an engine's death or not."""
        losses = self._losses.get(request, ("", []))[1]
        return all(deaths_of(replica) > before or replica.takes_requests for replica, before in losses)

    def of(self, model: str) -> int:
        """Returns the number of requests for a model that were in flight at two deaths: open, or condemned already."""
        requests = [request for request, (asked, _) in self._losses.items() if asked == model]
        return self._condemned[model] + sum(self.deaths(request) >= SUSPECT_DEATHS for request in requests)

    def close(self, request: object) -> None:
        self._losses.pop(request, None)

    def condemn(self, digest: str | None, target: bytes, body: bytes, *, model: str, error: str) -> str:
        """Remembers a request that killed an engine when sent alone; returns the message for its client."""
        message = f"The engine dies of this request: it was in flight at three deaths, the last time alone ({error})."
        self._condemned[model] += 1
        if len(self._killers) < _MOST_KILLERS:
            self._killers[_key(digest, target, body)] = message
        return message

    def verdict(self, digest: str | None, target: bytes, body: bytes) -> str | None:
        return self._killers.get(_key(digest, target, body)) if self._killers else None


def deaths_of(replica: RoutedReplica) -> int:
    """Returns the number of its engines that died of an error of their own."""
    return sum(replica.announcement.deaths.values())


def _key(digest: str | None, target: bytes, body: bytes) -> bytes:
    return hashlib.sha256(b"\0".join(((digest or "").encode(), target, body))).digest()
