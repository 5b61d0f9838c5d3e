"""The queue of shards, an actor: lends shards to workers, and knows how far each is."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from resources.actors.leased_queue import Lease, LeasedQueue, LeaseLost
from tasks.generation.shards import Shard, ShardProgress

LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class QueueState:
    """Numbers of shards by their state, of answers, and what went wrong with shards that nobody could finish."""

    waiting: int
    leased: int
    done: int
    dead: tuple[str, ...]
    rows: int
    tokens: int
    errors: int
    last_error: str | None = None
    """Reason of one of the errors."""

    @property
    def left(self) -> int:
        """Shards that somebody has to do."""
        return self.waiting + self.leased


class ShardQueue(LeasedQueue):
    """A leased queue of shards whose leases belong to workers by name, and carry progress.

    Args:
        shards: those that are to do, in order.
        max_deliveries: how often a shard is lent at most.
    """

    def __init__(self, shards: Iterable[Shard], *, max_deliveries: int) -> None:
        super().__init__(max_deliveries=max_deliveries)
        for shard in shards:
            self.push(shard)
        self._held: dict[str, dict[str, ShardProgress]] = {}
        self._finished = ShardProgress()
        self._reasons: dict[int, str] = {}
        self._hopeless: list[int] = []

    def begin(self, worker: str) -> None:
        """Takes back all that a worker of this name has: it has just begun, and knows of nothing."""
        for lease_id in self._held.pop(worker, {}):
            with suppress(LeaseLost):
                self.release(lease_id)

    def lend(self, worker: str) -> Lease | None:
        """Lends a shard to a worker; None when none waits."""
        lease = self.pop(LEASE_SECONDS)
        if lease is not None:
            self._held.setdefault(worker, {})[lease.lease_id] = ShardProgress()
        return lease

    def advance(self, worker: str, progress: dict[str, ShardProgress]) -> list[str]:
        """Renews leases of a worker, which says how far each shard is; returns those that it has lost."""
        lost: list[str] = []
        held = self._held.setdefault(worker, {})
        for lease_id, so_far in progress.items():
            try:
                self.renew(lease_id, LEASE_SECONDS)
                held[lease_id] = so_far
            except LeaseLost:
                lost.append(lease_id)
        self._held[worker] = {lease_id: so_far for lease_id, so_far in held.items() if lease_id not in lost}
        return lost

    def finish(self, worker: str, lease: Lease, written: ShardProgress) -> None:
        """Removes a shard that is written; also for whoever lost it meanwhile, since what is written is written."""
        self._held.get(worker, {}).pop(lease.lease_id, None)
        with suppress(LeaseLost):
            self.done(lease)
            self._finished.rows += written.rows
            self._finished.tokens += written.tokens
            self._finished.errors += written.errors
            self._finished.last_error = written.last_error or self._finished.last_error

    def give_back(self, worker: str, lease: Lease, reason: str, *, hopeless: bool = False) -> None:
        """Puts a shard back that could not be finished, with the reason; a hopeless one is not tried again."""
        self._held.get(worker, {}).pop(lease.lease_id, None)
        self._reasons[lease.item.number] = reason
        with suppress(LeaseLost):
            if hopeless:
                self.done(lease)
                self._hopeless.append(lease.item.number)
            else:
                self.release(lease)

    def state(self) -> QueueState:
        """Returns the progress of all shards together."""
        counts = self.counts()
        dead = {
            letter.item.number: self._reasons.get(letter.item.number, letter.reason) for letter in self.dead_letters()
        }
        hopeless = {number: self._reasons[number] for number in self._hopeless}
        open_ = [so_far for held in self._held.values() for so_far in held.values()]
        return QueueState(
            waiting=counts.waiting,
            leased=counts.leased,
            done=counts.done,
            dead=tuple(f"shard {number}: {reason}" for number, reason in (dead | hopeless).items()),
            rows=self._finished.rows + sum(so_far.rows for so_far in open_),
            tokens=self._finished.tokens + sum(so_far.tokens for so_far in open_),
            errors=self._finished.errors + sum(so_far.errors for so_far in open_),
            last_error=next((part.last_error for part in (*open_, self._finished) if part.last_error), None),
        )
