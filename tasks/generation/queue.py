"""The queue of shards, an actor: lends shards to workers, and collects their progress."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from resources.actors.leased_queue import Lease, LeasedQueue, LeaseLost
from tasks.generation.shards import Shard, ShardProgress

LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class QueueState:
    """Counts of shards by state and of answers, and the failures of shards that no worker could finish."""

    waiting: int
    leased: int
    done: int
    dead: tuple[str, ...]
    rows: int
    tokens: int
    errors: int
    last_error: str | None = None

    @property
    def left(self) -> int:
        return self.waiting + self.leased


class ShardQueue(LeasedQueue):
    """A queue that leases shards to named workers, each at most `max_deliveries` times, and keeps their progress."""

    def __init__(self, shards: Iterable[Shard], *, max_deliveries: int) -> None:
        super().__init__(max_deliveries=max_deliveries)
        for shard in shards:
            self.push(shard)
        self._held: dict[str, dict[str, ShardProgress]] = {}
        self._finished = ShardProgress()
        self._reasons: dict[int, str] = {}
        self._hopeless: list[int] = []

    def begin(self, worker: str) -> None:
        """Takes back all leases of a worker name, which has just started and holds none."""
        for lease_id in self._held.pop(worker, {}):
            with suppress(LeaseLost):
                self.release(lease_id)

    def lend(self, worker: str) -> Lease | None:
        lease = self.pop(LEASE_SECONDS)
        if lease is not None:
            self._held.setdefault(worker, {})[lease.lease_id] = ShardProgress()
        return lease

    def advance(self, worker: str, progress: dict[str, ShardProgress]) -> list[str]:
        """Stores a worker's progress and renews its leases; returns its lost leases."""
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
        """Removes a written shard; also for a worker that lost the lease meanwhile, since the file is written."""
        self._held.get(worker, {}).pop(lease.lease_id, None)
        with suppress(LeaseLost):
            self.done(lease)
            self._finished.rows += written.rows
            self._finished.tokens += written.tokens
            self._finished.errors += written.errors
            self._finished.last_error = written.last_error or self._finished.last_error

    def give_back(self, worker: str, lease: Lease, reason: str, *, hopeless: bool = False) -> None:
        """Returns an unfinished shard to the queue, with the reason; a hopeless shard is not tried again."""
        self._held.get(worker, {}).pop(lease.lease_id, None)
        self._reasons[lease.item.number] = reason
        with suppress(LeaseLost):
            if hopeless:
                self.done(lease)
                self._hopeless.append(lease.item.number)
            else:
                self.release(lease)

    def state(self) -> QueueState:
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
