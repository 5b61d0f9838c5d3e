"""Routes requests to replicas, by models, orders and load. No input or output."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pools.protocol import Announcement, Demand, DesiredState, Failure, Orders, ProxyHealth, ReplicaStatus, ServedModel
from pools.proxy.replicas import Names, RequestOutcome, RoutedReplica, Suspects

_REMEMBERED_DEMAND_SECONDS = 600.0


@dataclass(slots=True)
class _Asked:
    held: int = 0
    # kept when held requests are given up
    unserved_since: float | None = None
    in_flight: int = 0
    last_active: float = 0.0


@dataclass(slots=True)
class RoutingTable:
    """Models and replicas, with their load. Used from a single thread.

    `models` is None until the pool has published a state: earlier requests, as after a restart of the proxy, are held
    and not refused for an unknown model. `version` grows with every change that a waiting status request must return.
    """

    clock: Callable[[], float] = time.monotonic
    models: Mapping[str, ServedModel] | None = None
    engine: str = ""
    unusable: Mapping[str, Failure] = field(default_factory=dict)
    failed: str | None = None
    failures: int = 0
    """Number of the pool's failures."""
    tries_again: bool = False
    next: tuple[str, ...] = ()
    on_news: Callable[[], None] = lambda: None
    """Called whenever `version` has grown."""
    replicas: dict[str, RoutedReplica] = field(default_factory=dict)
    version: int = 0
    orders_version: int = 0
    held: int = 0
    """Requests that wait for a replica."""
    suspects: Suspects = field(default_factory=Suspects)
    _names: Names = field(default_factory=Names)
    _orders: Mapping[str, str | None] = field(default_factory=dict)
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _turn: int = 0

    def bump(self) -> None:
        self.version += 1
        self.on_news()

    def apply(self, desired: DesiredState) -> list[RoutedReplica]:
        """Replaces the pool's state; replicas keep announcements and load. Returns the replicas that it removed."""
        changed = (self.models, self._orders, self.next) != (desired.models, desired.orders, desired.next)
        self.models = dict(desired.models)
        self.engine = desired.engine
        self.unusable = dict(desired.unusable)
        self.failures += self.failed is None and desired.failed is not None
        self.failed, self.tries_again = desired.failed, desired.tries_again
        self.next = desired.next
        self._orders = dict(desired.orders)
        if changed:
            self.orders_version += 1
        unwanted = []
        for replica in list(self.replicas.values()):
            self._give_order(replica)
            if replica.name not in self._orders:
                replica.lost = True
                unwanted.append(replica)
                del self.replicas[replica.name]
        return unwanted

    def announce(self, name: str, announcement: Announcement) -> list[RoutedReplica]:
        """Stores an announcement and renews the lease; `Names` decides which instance of a name counts.

        Returns replicas that lose their requests in flight: itself if it is dead, or the previous holder of the name.
        """
        before = self.replicas.get(name)
        lost: list[RoutedReplica] = []
        holder = before.announcement if before is not None else None
        claim = self._names.claim(name, announcement, holder=holder, is_there=before is not None and before.is_there)
        if claim in ("refused", "waits"):
            return lost
        if before is None or claim == "takes":
            if before is not None:
                before.lost = True
                lost.append(before)
            elif self.models is not None and name not in self._orders:
                return lost  # late announcement of a removed replica: its orders are to stop
            replica = self.replicas[name] = RoutedReplica(name, announcement, self.clock())
            self._give_order(replica)
            self.bump()
            return lost
        before.hung_up = False
        if announcement.sequence < before.announcement.sequence:
            before.announced = self.clock()
            return lost
        if _news(before.announcement) != _news(announcement) or before.lost:
            self.bump()
        if (
            before.url != announcement.url
            or (before.announcement.state != "ready" and announcement.state == "ready")
            or before.lost
        ):
            # Another engine, or a recovered engine: earlier failures do not count for it.
            before.suspect = False
            before.consecutive_failures = 0
        before.announcement, before.announced, before.lost = announcement, self.clock(), False
        return [before] if announcement.state == "dead" else []

    def expire(self, lease_seconds: float, *, stalled_seconds: float = 0.0) -> list[RoutedReplica]:
        """Marks replicas as lost that were silent for longer than their lease, and returns them.

        `stalled_seconds`, in which this process read nothing, do not count as silence.
        """
        for replica in self.replicas.values():
            replica.announced += stalled_seconds
        deadline = self.clock() - lease_seconds
        lost = [replica for replica in self.replicas.values() if not replica.lost and replica.announced < deadline]
        for replica in lost:
            replica.lost = True
            self.bump()
        return lost

    def hung_up(self, name: str, instance: str) -> None:
        replica = self.replicas.get(name)
        if replica is not None and replica.announcement.instance == instance:
            replica.hung_up = True
            self.on_news()

    def has_to_wait(self, name: str, instance: str) -> bool:
        """Returns True if an instance waits for its name until the current holder is gone."""
        return self._names.waits(name, instance) and name in self.replicas and self.replicas[name].is_there

    def orders_of(self, name: str, instance: str = "") -> Orders:
        """Returns the pool's orders for a replica; an instance must stop if another instance has its name."""
        if (refusal := self._names.refusal(instance)) is not None:
            return Orders(version=self.orders_version, known=True, stop=True, refusal=refusal)
        if self.models is None or self._names.waits(name, instance):
            return Orders(version=self.orders_version, known=False)
        replica = self.replicas.get(name)
        model = self._orders.get(name)
        return Orders(
            version=self.orders_version,
            known=True,
            stop=name not in self._orders,
            model=model,
            served=self.models.get(model) if model is not None else None,
            next={name: self.models[name] for name in self.next if name in self.models and name != model},
            in_flight=replica.in_flight if replica else 0,
        )

    def choose(self, digest: str, *, tried: Mapping[str, RequestOutcome]) -> RoutedReplica | None:
        """Returns the least loaded replica with these weights, untried replicas first; equal replicas take turns.

        Excludes replicas at which the request timed out.
        """
        best: RoutedReplica | None = None
        best_rank: tuple[bool, float, int] | None = None
        for replica in self.replicas.values():
            if replica.announcement.digest != digest or not replica.takes_requests or replica.reserved is not None:
                continue
            if tried and tried.get(replica.name) is RequestOutcome.TIMED_OUT:
                continue
            rank = (replica.name in tried, replica.in_flight / replica.announcement.capacity, replica.last_turn)
            if best_rank is None or rank < best_rank:
                best, best_rank = replica, rank
        return best

    def hold(self, model: str) -> None:
        asked = self._asked_of(model)
        if not asked.held:
            self.bump()
        if asked.unserved_since is None:
            asked.unserved_since = self.clock()
        asked.held += 1
        self.held += 1

    def let_go(self, model: str) -> None:
        asked = self._asked_of(model)
        asked.held -= 1
        self.held -= 1
        asked.last_active = self.clock()

    def begin(self, replica: RoutedReplica, model: str) -> None:
        self._turn += 1
        replica.last_turn = self._turn
        replica.in_flight += 1
        asked = self._asked_of(model)
        asked.in_flight += 1
        asked.unserved_since = self.clock() if asked.held else None

    def end(self, replica: RoutedReplica, model: str, outcome: RequestOutcome | None) -> None:
        replica.in_flight -= 1
        asked = self._asked_of(model)
        asked.in_flight -= 1
        asked.last_active = self.clock()
        if (asked.in_flight == 0 and self.held) or (
            replica.in_flight == 0 and replica.announcement.state == "draining"
        ):
            self.bump()
        if outcome in (RequestOutcome.LOST, RequestOutcome.UNREACHED, RequestOutcome.TIMED_OUT):
            replica.consecutive_failures += 1
            replica.suspect = True
        elif outcome not in (None, RequestOutcome.TAKEN_AWAY):
            replica.consecutive_failures = 0

    def demand(self) -> dict[str, Demand]:
        now, demand = self.clock(), {}
        for model, asked in list(self._asked.items()):
            idle_seconds = 0.0 if asked.held or asked.in_flight else now - asked.last_active
            if idle_seconds > _REMEMBERED_DEMAND_SECONDS:
                del self._asked[model]
                continue
            demand[model] = Demand(
                held=asked.held,
                in_flight=asked.in_flight,
                suspects=self.suspects.of(model),
                unserved_seconds=now - asked.unserved_since if asked.unserved_since is not None else 0.0,
                idle_seconds=idle_seconds,
            )
        return demand

    def status(self) -> tuple[ReplicaStatus, ...]:
        now = self.clock()
        return tuple(
            ReplicaStatus(
                name=replica.name,
                ordered=replica.ordered,
                announcement=replica.announcement.model_copy(update={"ingress_key": None, "engine_key": None}),
                lost=replica.lost,
                silent_seconds=max(0.0, now - replica.announced),
                suspect=replica.suspect,
                in_flight=replica.in_flight,
                consecutive_failures=replica.consecutive_failures,
            )
            for replica in self.replicas.values()
        )

    @property
    def health(self) -> ProxyHealth:
        if self.failed is not None:
            return "failed"
        return "ready" if any(replica.takes_requests for replica in self.replicas.values()) else "holding"

    def replica_seconds(self) -> dict[str, float]:
        now = self.clock()
        total = dict(self._seconds)
        for replica in self.replicas.values():
            if replica.ordered is not None:
                total[replica.ordered] = total.get(replica.ordered, 0.0) + now - replica.ordered_at
        return {model: round(seconds, 3) for model, seconds in total.items()}

    def _give_order(self, replica: RoutedReplica) -> None:
        if self.models is None:
            return
        ordered = self._orders.get(replica.name)
        if ordered != replica.ordered:
            now = self.clock()
            if replica.ordered is not None:
                self._seconds[replica.ordered] = self._seconds.get(replica.ordered, 0.0) + now - replica.ordered_at
            replica.ordered, replica.ordered_at = ordered, now
        served = self.models.get(ordered) if ordered is not None else None
        replica.ordered_digest = served.digest if served is not None else None

    def _asked_of(self, model: str) -> _Asked:
        asked = self._asked.get(model)
        if asked is None:
            asked = self._asked[model] = _Asked(last_active=self.clock())
        return asked


def _news(announcement: Announcement) -> tuple[object, ...]:
    return (
        announcement.state,
        announcement.digest,
        announcement.url,
        len(announcement.loads),
        announcement.loads[-1:],
        announcement.restarts,
        announcement.failure,
    )
