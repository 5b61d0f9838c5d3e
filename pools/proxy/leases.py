"""Users of a pool: who holds it, for how long, and which checkpoints they brought or want."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pools.protocol import Lease, LeaseStatus


@dataclass(slots=True)
class _Held:
    lease: Lease
    ends: float


class Leases:
    """The leases that have not run out.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, _Held] = {}

    def take(self, name: str, lease: Lease) -> None:
        """Takes a lease, or renews it with what it says now."""
        self._held[name] = _Held(lease, self._clock() + lease.seconds)

    def end(self, name: str) -> None:
        """Ends a lease; one that is not there has ended already."""
        self._held.pop(name, None)

    def expire(self) -> bool:
        """Forgets those that have run out; whether there were any."""
        now = self._clock()
        over = [name for name, held in self._held.items() if held.ends <= now]
        for name in over:
            del self._held[name]
        return bool(over)

    def status(self) -> dict[str, LeaseStatus]:
        """Those that hold now, in the order they were first taken."""
        now = self._clock()
        return {
            name: LeaseStatus(
                holder=held.lease.holder,
                seconds_left=max(0.0, held.ends - now),
                models=held.lease.models,
                wants=held.lease.wants,
                tries=held.lease.tries,
            )
            for name, held in self._held.items()
        }
