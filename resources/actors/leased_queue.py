"""A queue whose items are lent, not given: what a consumer does not finish in time is offered again.

Each item is delivered at least once: `pop` lends it for a while, `done` removes it, and a lease that runs out, or is
released, puts it behind all others, so that an item nobody can finish never stands in the way. After `max_deliveries`
it is set aside, to be read by whoever looks after the queue. Runs anywhere as an object, and as an actor
(`create_actor(client, LeasedQueue, name="questions")`) between processes; what it holds lives in its memory alone.
"""

from __future__ import annotations

import heapq
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resources.errors import AssayError, BadInput


class LeaseLost(AssayError):
    """A lease has run out, was given back, or never was: the item is not the holder's any more."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """An item that its holder has for a while."""

    item: Any
    lease_id: str
    deliveries: int
    """Number of times that the item was lent by now, this time included."""


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """An item that was lent `deliveries` times and finished by nobody."""

    item: Any
    deliveries: int
    reason: str
    """End of the last delivery, in words."""


@dataclass(frozen=True, kw_only=True)
class QueueCounts:
    """Numbers of items by their state."""

    waiting: int
    leased: int
    dead: int
    done: int


@dataclass
class _Entry:
    item: Any
    deliveries: int = 0


class LeasedQueue:
    """First in, first out, as far as consumers finish what they take.

    Args:
        max_deliveries: how often an item is lent at most; without end when None.
        clock: seconds that never go back.
    """

    def __init__(self, *, max_deliveries: int | None = 10, clock: Callable[[], float] = time.monotonic) -> None:
        if max_deliveries is not None and max_deliveries < 1:
            raise BadInput(expected="max_deliveries of at least 1", found=str(max_deliveries), remedy="Correct it.")
        self._max_deliveries = max_deliveries
        self._clock = clock
        self._lock = threading.Lock()  # an actor may serve several calls at once
        self._waiting: deque[_Entry] = deque()
        self._leased: dict[str, tuple[_Entry, float]] = {}
        self._expiries: list[tuple[float, str]] = []  # a heap; those of leases that ended or were renewed stay in it
        self._dead: list[DeadLetter] = []
        self._done = 0

    def push(self, item: Any) -> None:
        """Puts an item behind all others."""
        with self._lock:
            self._waiting.append(_Entry(item))

    def pop(self, lease_seconds: float = 60.0) -> Lease | None:
        """Lends the first item for `lease_seconds`; None when none waits."""
        _check_seconds(lease_seconds)
        with self._lock:
            self._take_back_expired()
            if not self._waiting:
                return None
            entry = self._waiting.popleft()
            entry.deliveries += 1
            lease_id = uuid.uuid4().hex
            self._lend(lease_id, entry, lease_seconds)
            return Lease(item=entry.item, lease_id=lease_id, deliveries=entry.deliveries)

    def renew(self, lease: Lease | str, lease_seconds: float = 60.0) -> None:
        """Lets a holder keep its item until `lease_seconds` from now.

        Raises:
            LeaseLost: the lease, or its id, is not valid any more.
        """
        _check_seconds(lease_seconds)
        with self._lock:
            entry = self._returned(lease)
            self._lend(_id_of(lease), entry, lease_seconds)

    def done(self, lease: Lease | str) -> None:
        """Removes a finished item.

        Raises:
            LeaseLost: the lease, or its id, is not valid any more; somebody else may be at work on the item.
        """
        with self._lock:
            self._returned(lease)
            self._done += 1

    def release(self, lease: Lease | str) -> None:
        """Gives an unfinished item back, behind all others.

        Raises:
            LeaseLost: the lease, or its id, is not valid any more.
        """
        with self._lock:
            self._take_back(self._returned(lease), reason="released")

    def peek(self) -> Any | None:
        """The item that `pop` would lend, which stays where it is; None when none waits."""
        with self._lock:
            self._take_back_expired()
            return self._waiting[0].item if self._waiting else None

    def size(self) -> int:
        """Returns the number of items that are neither done nor dead, lent ones included."""
        counts = self.counts()
        return counts.waiting + counts.leased

    def pending(self) -> int:
        """Returns the number of items that wait to be lent."""
        return self.counts().waiting

    def counts(self) -> QueueCounts:
        """Returns the numbers of items by their state."""
        with self._lock:
            self._take_back_expired()
            return QueueCounts(
                waiting=len(self._waiting), leased=len(self._leased), dead=len(self._dead), done=self._done
            )

    def dead_letters(self) -> list[DeadLetter]:
        """Items that were lent too often, the oldest first."""
        with self._lock:
            self._take_back_expired()
            return list(self._dead)

    def _lend(self, lease_id: str, entry: _Entry, lease_seconds: float) -> None:
        expires_at = self._clock() + lease_seconds
        self._leased[lease_id] = (entry, expires_at)
        heapq.heappush(self._expiries, (expires_at, lease_id))

    def _returned(self, lease: Lease | str) -> _Entry:
        self._take_back_expired()
        try:
            entry, _ = self._leased.pop(_id_of(lease))
        except KeyError:
            raise LeaseLost(
                expected=f"a valid lease, not {_id_of(lease)}",
                found="it has run out, was given back, or is of another queue; the item was offered again",
                remedy="Drop what was done with the item, and take longer leases or renew them in time.",
            ) from None
        return entry

    def _take_back_expired(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, lease_id = heapq.heappop(self._expiries)
            if lease_id in self._leased and self._leased[lease_id][1] == expires_at:
                entry, _ = self._leased.pop(lease_id)
                self._take_back(entry, reason="its lease ran out")

    def _take_back(self, entry: _Entry, *, reason: str) -> None:
        if self._max_deliveries is not None and entry.deliveries >= self._max_deliveries:
            self._dead.append(DeadLetter(item=entry.item, deliveries=entry.deliveries, reason=reason))
        else:
            self._waiting.append(entry)


def _id_of(lease: Lease | str) -> str:
    return lease if isinstance(lease, str) else lease.lease_id


def _check_seconds(lease_seconds: float) -> None:
    if not lease_seconds > 0:
        raise BadInput(expected="a lease of more than 0 seconds", found=str(lease_seconds), remedy="Correct it.")
