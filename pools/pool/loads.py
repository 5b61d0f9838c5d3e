"""Loads of checkpoints as the replicas report them: which cannot be served, and by whom; told once each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from pools.protocol import Failure, LeaseStatus, LoadReport, ProxyStatus, ReplicaStatus
from resources.errors import EngineDied, EngineStartFailed

_SHORTEST_LINGER_SECONDS = 0.1
_LONGEST_LINGER_SECONDS = 5.0


def loads_of(model: str, digest: str, *, status: ProxyStatus) -> Iterator[tuple[ReplicaStatus, LoadReport]]:
    """The loads of a checkpoint that went well, with their replicas, in the order they happened there."""
    for replica in status.replicas:
        for load in replica.announcement.loads:
            if load.digest == digest and load.model == model and load.failure is None:
                yield replica, load


class LoadLog:
    """The loads of a pool's replicas so far.

    `linger_seconds` is how long a checkpoint must be idle before its replica is free: as long as a swap takes.

    Args:
        most_failures: failed loads in a row after which a replica is given up.
        give_up: called with the name of such a replica, and the reason.
        on_event: called with a line for people.
    """

    def __init__(
        self, *, most_failures: int, give_up: Callable[[str, str], None], on_event: Callable[[str], None]
    ) -> None:
        self.linger_seconds = _SHORTEST_LINGER_SECONDS
        self._most_failures = most_failures
        self._give_up = give_up
        self._on_event = on_event
        self._seen: set[tuple[str, str, int]] = set()
        self._engine_starts: dict[str, int] = {}
        self._reasons_told: set[str] = set()
        self._has_answered = False
        self._start_failure: Failure | None = None
        self._unusable: dict[str, Failure] = {}
        self._failures_in_a_row: Counter[str] = Counter()
        self._to_pause: set[str] = set()
        self._tries: dict[tuple[str, str], int] = {}

    def take_in(self, replicas: Iterable[ReplicaStatus]) -> None:
        """Takes in what replicas report for the first time."""
        replicas = list(replicas)
        for replica in replicas:
            if replica.announcement.restarts > self._engine_starts.get(replica.announcement.instance, 0):
                error = f" ({replica.announcement.last_death})" if replica.announcement.last_death else ""
                self._on_event(f"the engine of {replica.name} died, or hung, and is started again{error}")
                self._engine_starts[replica.announcement.instance] = replica.announcement.restarts
            for load in replica.announcement.loads:
                report = (replica.name, replica.announcement.instance, load.number)
                if report in self._seen:
                    continue
                self._seen.add(report)
                if load.failure is None:
                    self._succeeded(replica.name, load)
                else:
                    others = (other for other in replicas if other.name != replica.name)
                    held_elsewhere = any(other.holds(load.digest) for other in others)
                    self._failed(replica.name, load, load.failure, held_elsewhere=held_elsewhere)

    def _succeeded(self, replica: str, load: LoadReport) -> None:
        self._has_answered = True
        self._failures_in_a_row[replica] = 0
        if load.how in ("reload", "restart"):  # the next swap will cost as much, probably
            self.linger_seconds = min(max(_SHORTEST_LINGER_SECONDS, load.seconds), _LONGEST_LINGER_SECONDS)
        why = f", since {load.reason}" if load.reason and load.reason not in self._reasons_told else ""
        self._reasons_told.add(load.reason or "")
        self._on_event(f"{load.model} is ready on {replica} ({load.how}, {load.seconds:.2f} s{why})")

    def _failed(self, replica: str, load: LoadReport, failure: Failure, *, held_elsewhere: bool) -> None:
        self._on_event(f"{load.model} cannot be served by {replica}: {failure.found.splitlines()[0]}")
        if failure.kind == EngineDied.__name__:
            return  # of what it held before; the replica is given up
        if held_elsewhere:  # so it is the replica's fault, not the checkpoint's
            self._failures_in_a_row[replica] += 1
            self._to_pause.add(replica)
            if self._failures_in_a_row[replica] > self._most_failures:
                self._give_up(replica, failure.found)
            return
        self._unusable[load.model] = failure
        if not self._has_answered and failure.kind == EngineStartFailed.__name__:
            self._start_failure = failure  # it never worked: the next checkpoint would meet the same

    @property
    def start_failure(self) -> str | None:
        """The reason that no checkpoint can be served, since no engine has ever started; None if one has."""
        return self._start_failure.found if self._start_failure is not None and not self._has_answered else None

    def try_again(self) -> None:
        """Forgets that engines did not start, and which replicas failed."""
        self._unusable = {model: why for model, why in self._unusable.items() if why != self._start_failure}
        self._start_failure = None
        self._failures_in_a_row.clear()

    def forgive(self, leases: Mapping[str, LeaseStatus]) -> None:
        """Forgets that a checkpoint could not be served once a user wants it anew."""
        tries = {(lease, name): count for lease, held in leases.items() for name, count in held.tries.items()}
        for (lease, name), count in tries.items():
            if name in self._unusable and count > self._tries.get((lease, name), 0):
                del self._unusable[name]
        for (lease, name), count in tries.items():
            if name not in self._unusable:
                self._tries[lease, name] = count

    def unusable(self, models: Iterable[str]) -> dict[str, Failure]:
        """Models that cannot be served; all of them if the engine did not even start for the first one."""
        if self._start_failure is not None and not self._has_answered:
            return dict.fromkeys(models, self._start_failure)
        return dict(self._unusable)

    def take_paused(self) -> set[str]:
        """Replicas that failed a load since this was asked last: without an order for a moment, they may try again."""
        paused, self._to_pause = self._to_pause, set()
        return paused
