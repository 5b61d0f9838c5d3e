"""Assigns checkpoints to replicas from pending requests, users' leases and current orders; does no I/O.

A replica keeps its checkpoint until that checkpoint's pending requests are done, so that checkpoints do not alternate
request by request. A maximum wait bounds starvation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pools.protocol import Demand


def assign(
    orders: Mapping[str, str | None],
    *,
    demand: Mapping[str, Demand],
    wants: Sequence[str],
    held_seconds: Mapping[str, float],
    linger_seconds: float,
    longest_wait_seconds: float,
) -> dict[str, str | None]:
    """Returns the new orders of every replica.

    Args:
        orders: current model name by usable replica; None for a replica without work.
        demand: pending requests by model that can be served.
        wants: models that users want now, in order, even without requests so far.
        held_seconds: seconds that replicas have held the ordered model; only replicas that held it for at least the
            time of its load.
        linger_seconds: idle time after which a checkpoint releases its replica.
        longest_wait_seconds: waiting time of requests after which their checkpoint takes over a busy replica.
    """
    seats = _Seats(dict(orders), demand, frozenset(wants), linger_seconds)
    asked = [model for model, pending in demand.items() if pending.held > 0]
    asked.sort(key=lambda model: -demand[model].unserved_seconds)
    for model in asked:
        if not seats.serves(model):
            starved = demand[model].unserved_seconds > longest_wait_seconds
            taken = seats.oldest(held_seconds, below=demand[model].unserved_seconds) if starved else None
            seats.give(model, seats.free() or seats.doubled() or taken)
    for model in dict.fromkeys(wants):
        if not seats.serves(model):
            seats.give(model, seats.unwanted() or seats.doubled())
    while (replica := seats.unwanted()) and (model := seats.neediest(wants)):
        seats.give(model, replica)
    return seats.orders


@dataclass
class _Seats:
    orders: dict[str, str | None]
    demand: Mapping[str, Demand]
    wants: frozenset[str]
    linger_seconds: float
    _changed: set[str] = field(default_factory=set)

    def serves(self, model: str) -> bool:
        return model in self.orders.values()

    def give(self, model: str, replica: str | None) -> None:
        if replica is not None:
            self.orders[replica] = model
            self._changed.add(replica)

    def unwanted(self) -> str | None:
        return self._first(lambda model: model is None or (model not in self.wants and not self._busy(model)))

    def free(self) -> str | None:
        return self.unwanted() or self._first(lambda model: model is None or not self._busy(model))

    def doubled(self) -> str | None:
        counts = Counter(model for model in self.orders.values() if model is not None)
        most = max(counts.values(), default=0)
        return self._first(lambda model: counts[model or ""] == most) if most > 1 else None

    def oldest(self, held_seconds: Mapping[str, float], *, below: float) -> str | None:
        able = [
            replica
            for replica, model in self.orders.items()
            if replica not in self._changed
            and replica in held_seconds
            and self.demand.get(model or "", Demand()).unserved_seconds < below
        ]
        return max(able, key=lambda replica: held_seconds[replica], default=None)

    def neediest(self, wants: Sequence[str]) -> str | None:
        models = dict.fromkeys([*(model for model in self.demand if self._busy(model)), *wants])
        counts = Counter(self.orders.values())
        return min(models, key=lambda model: (counts[model], -self._pending(model)), default=None)

    def _first(self, fits: Callable[[str | None], bool]) -> str | None:
        return next(
            (replica for replica, model in self.orders.items() if replica not in self._changed and fits(model)), None
        )

    def _pending(self, model: str) -> int:
        demand = self.demand.get(model, Demand())
        return demand.held + demand.in_flight

    def _busy(self, model: str) -> bool:
        demand = self.demand.get(model)
        if demand is None:
            return False
        return demand.held > 0 or demand.in_flight > 0 or demand.idle_seconds < self.linger_seconds
