"""A queue that leases its items: an item that is not finished within its lease is offered again.

Each item is delivered at least once. An expired or released lease puts it behind all other items, so that an item that
always fails does not block the queue; after `max_deliveries` it becomes a dead letter. The queue works within a
process, and as an actor (`create_actor(client, LeasedQueue, name="questions")`) between processes, only in memory.
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
    """A lease has expired, was released, or never existed: the item no longer belongs to its holder."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """An item leased to its holder for a while."""

    item: Any
    lease_id: str
    deliveries: int
    """Number of deliveries of the item, including this delivery."""


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """An item that was delivered `deliveries` times and never finished."""

    item: Any
    deliveries: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class QueueCounts:
    """Number of items by state."""

    waiting: int
    leased: int
    dead: int
    done: int


@dataclass
class _Entry:
    item: Any
    deliveries: int = 0


class LeasedQueue:
    """First in, first out, as far as consumers finish their items; `max_deliveries` is unlimited when None."""

    def __init__(self, *, max_deliveries: int | None = 10, clock: Callable[[], float] = time.monotonic) -> None:
        if max_deliveries is not None and max_deliveries < 1:
            raise BadInput(expected="max_deliveries of at least 1", found=str(max_deliveries), remedy="Correct it.")
        self._max_deliveries = max_deliveries
        self._clock = clock
        self._lock = threading.Lock()  # an actor may serve several calls at once
        self._waiting: deque[_Entry] = deque()
        self._leased: dict[str, tuple[_Entry, float]] = {}
        self._expiries: list[tuple[float, str]] = []  # a heap; entries of ended or renewed leases stay in it
        self._dead: list[DeadLetter] = []
        self._done = 0

    def push(self, item: Any) -> None:
        with self._lock:
            self._waiting.append(_Entry(item))

    def pop(self, lease_seconds: float = 60.0) -> Lease | None:
        """Leases the first waiting item for `lease_seconds`; returns None if no item waits."""
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
        """Extends a lease until `lease_seconds` from now.

        Raises:
            LeaseLost: the lease, or its id, is no longer valid.
        """
        _check_seconds(lease_seconds)
        with self._lock:
            entry = self._returned(lease)
            self._lend(_id_of(lease), entry, lease_seconds)

    def done(self, lease: Lease | str) -> None:
        """Removes a finished item.

        Raises:
            LeaseLost: the lease, or its id, is no longer valid; another consumer may have the item.
        """
        with self._lock:
            self._returned(lease)
            self._done += 1

    def release(self, lease: Lease | str) -> None:
        """Returns an unfinished item to the end of the queue.

        Raises:
            LeaseLost: the lease, or its id, is no longer valid.
        """
        with self._lock:
            self._take_back(self._returned(lease), reason="released")

    def peek(self) -> Any | None:
        """Returns the item that `pop` would lease, without leasing it; None if no item waits."""
        with self._lock:
            self._take_back_expired()
            return self._waiting[0].item if self._waiting else None

    def size(self) -> int:
        """Returns the number of items that are neither done nor dead, including leased items."""
        counts = self.counts()
        return counts.waiting + counts.leased

    def pending(self) -> int:
        return self.counts().waiting

    def counts(self) -> QueueCounts:
        with self._lock:
            self._take_back_expired()
            return QueueCounts(
                waiting=len(self._waiting), leased=len(self._leased), dead=len(self._dead), done=self._done
            )

    def dead_letters(self) -> list[DeadLetter]:
        """Returns the items that were delivered too often, the oldest first."""
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
