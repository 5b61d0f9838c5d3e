"""A queue that leases its items: an item that is not finished within its lease is offered again.

Each item is delivered at least once. An expired or released lease puts it behind all other items, so that an item that
always fails does not block the queue; after `max_deliveries` it becomes a dead letter. The queue works within a
process, and as an actor (`create_actor(client, LeasedQueue, name="questions")`) between processes, only in memory.
"""

from __future__ import annotations

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


class LeasedQueue:
    """First in, first out, as far as consumers finish their items; `max_deliveries` is unlimited when None.

    Methods with a `lease_id` raise LeaseLost if the lease is no longer valid: another consumer may have the item.
    """

    def __init__(self, *, max_deliveries: int | None = 10, clock: Callable[[], float] = time.monotonic) -> None:
        if max_deliveries is not None and max_deliveries < 1:
            raise BadInput(expected="max_deliveries of at least 1", found=str(max_deliveries), remedy="Correct it.")
        self._max_deliveries = max_deliveries
        self._clock = clock
        self._lock = threading.Lock()  # an actor may serve several calls at once
        self._waiting: deque[tuple[Any, int]] = deque()
        self._leased: dict[str, tuple[Lease, float]] = {}
        self._dead: list[DeadLetter] = []
        self._done = 0

    def push(self, item: Any) -> None:
        with self._lock:
            self._waiting.append((item, 0))

    def pop(self, lease_seconds: float = 60.0) -> Lease | None:
        """Leases the first waiting item for `lease_seconds`; returns None if no item waits."""
        _check_seconds(lease_seconds)
        with self._lock:
            self._take_back_expired()
            if not self._waiting:
                return None
            item, deliveries = self._waiting.popleft()
            lease = Lease(item=item, lease_id=uuid.uuid4().hex, deliveries=deliveries + 1)
            self._leased[lease.lease_id] = lease, self._clock() + lease_seconds
            return lease

    def renew(self, lease_id: str, lease_seconds: float = 60.0) -> None:
        """Extends a lease until `lease_seconds` from now."""
        _check_seconds(lease_seconds)
        with self._lock:
            self._leased[lease_id] = self._returned(lease_id), self._clock() + lease_seconds

    def done(self, lease_id: str) -> None:
        """Removes a finished item."""
        with self._lock:
            self._returned(lease_id)
            self._done += 1

    def release(self, lease_id: str) -> None:
        """Returns an unfinished item to the end of the queue."""
        with self._lock:
            self._take_back(self._returned(lease_id), reason="released")

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

    def _returned(self, lease_id: str) -> Lease:
        self._take_back_expired()
        try:
            lease, _ = self._leased.pop(lease_id)
        except KeyError:
            raise LeaseLost(
                expected=f"a valid lease, not {lease_id}",
                found="it has run out, was given back, or is of another queue; the item was offered again",
                remedy="Drop what was done with the item, and take longer leases or renew them in time.",
            ) from None
        return lease

    def _take_back_expired(self) -> None:
        now = self._clock()
        for lease, expires_at in list(self._leased.values()):
            if expires_at <= now:
                del self._leased[lease.lease_id]
                self._take_back(lease, reason="its lease ran out")

    def _take_back(self, lease: Lease, *, reason: str) -> None:
        if self._max_deliveries is not None and lease.deliveries >= self._max_deliveries:
            self._dead.append(DeadLetter(item=lease.item, deliveries=lease.deliveries, reason=reason))
        else:
            self._waiting.append((lease.item, lease.deliveries))


def _check_seconds(lease_seconds: float) -> None:
    if not lease_seconds > 0:
        raise BadInput(expected="a lease of more than 0 seconds", found=str(lease_seconds), remedy="Correct it.")
