"""Assigns checkpoints to replicas: a decision over what is asked, wanted and held. No input or output.

Work that is pending for a checkpoint is finished before its replica gets another one, so checkpoints do not take turns
request by request; and nobody waits for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pools.protocol import Demand


@dataclass(frozen=True)
class Patience:
    """Patience with checkpoints that are being served: one idle for `linger_seconds` gives its replica up.

    One that others have waited for longer than `longest_wait_seconds` gets a replica that is busy.
    """

    linger_seconds: float
    longest_wait_seconds: float


def assign(
    orders: Mapping[str, str | None],
    *,
    demand: Mapping[str, Demand],
    wants: Sequence[str],
    held_seconds: Mapping[str, float],
    patience: Patience,
) -> dict[str, str | None]:
    """The orders of every replica, from those it has.

    Args:
        orders: model name by replica that can be used; none for a replica that has nothing to do.
        demand: what is being asked of each model that can be served.
        wants: models that users want now though they may not have asked yet, in order.
        held_seconds: how long each replica has held what it was ordered to; of those that have had their turn.
        patience: when to change.
    """
    seats = _Seats(dict(orders), demand, frozenset(wants), patience)
    asked = [model for model, pending in demand.items() if pending.held > 0]
    asked.sort(key=lambda model: -demand[model].unserved_seconds)
    for model in asked:
        if not seats.serves(model):
            starved = demand[model].unserved_seconds > patience.longest_wait_seconds
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
    """Orders as they are being changed; a replica that got a new one keeps it for this round."""

    orders: dict[str, str | None]
    demand: Mapping[str, Demand]
    wants: frozenset[str]
    patience: Patience

    def __post_init__(self) -> None:
        self._changed: set[str] = set()

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
        return demand.held > 0 or demand.in_flight > 0 or demand.idle_seconds < self.patience.linger_seconds
