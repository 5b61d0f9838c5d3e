"""Shards, and their queue, an actor: lends shards to workers, and collects their progress."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from resources.actors.leased_queue import Lease, LeasedQueue, LeaseLost

LEASE_SECONDS = 60.0
Kind = Literal["jsonl", "parquet", "arrow"]


@dataclass(frozen=True)
class PromptSource:
    """A file with prompts."""

    uri: str
    kind: Kind

    @property
    def compressed(self) -> bool:
        """True if it can be read only from the start."""
        return self.uri.endswith(".gz")


@dataclass(frozen=True)
class Shard:
    """Prompts with answers in the same file: consecutive rows of a source."""

    number: int
    source: PromptSource
    first_prompt: int
    """Number of its first prompt among all."""
    prompts: int
    first_row: int
    start: int | None = None
    end: int | None = None
    """Byte range in the source, if known."""


@dataclass
class ShardProgress:
    """Answers of a shard, or of several, so far."""

    rows: int = 0
    tokens: int = 0
    errors: int = 0
    last_error: str | None = None

    def add(self, other: ShardProgress) -> None:
        self.rows += other.rows
        self.tokens += other.tokens
        self.errors += other.errors
        self.last_error = other.last_error or self.last_error


@dataclass(frozen=True)
class QueueState:
    """Counts of shards by state, the answers, and the failures of shards that no worker could finish."""

    waiting: int
    leased: int
    done: int
    dead: tuple[str, ...]
    progress: ShardProgress

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
            self.done(lease.lease_id)
            self._finished.add(written)

    def give_back(self, worker: str, lease: Lease, reason: str, *, hopeless: bool = False) -> None:
        """Returns an unfinished shard to the queue, with the reason; a hopeless shard is not tried again."""
        self._held.get(worker, {}).pop(lease.lease_id, None)
        self._reasons[lease.item.number] = reason
        with suppress(LeaseLost):
            if hopeless:
                self.done(lease.lease_id)
                self._hopeless.append(lease.item.number)
            else:
                self.release(lease.lease_id)

    def state(self) -> QueueState:
        counts = self.counts()
        dead = {
            letter.item.number: self._reasons.get(letter.item.number, letter.reason) for letter in self.dead_letters()
        }
        dead |= {number: self._reasons[number] for number in self._hopeless}
        progress = ShardProgress()
        for so_far in (self._finished, *(so_far for held in self._held.values() for so_far in held.values())):
            progress.add(so_far)
        return QueueState(
            waiting=counts.waiting,
            leased=counts.leased,
            done=counts.done,
            dead=tuple(f"shard {number}: {reason}" for number, reason in dead.items()),
            progress=progress,
        )
