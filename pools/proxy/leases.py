"""Leases of a pool's users: holder, time left, and the checkpoints that they added or need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pools.protocol import Lease, LeaseStatus, ServedModel
from pools.proxy.connections.replies import Refusal


@dataclass(slots=True)
class _Held:
    lease: Lease
    ends: float


class Leases:
    """The leases that have not run out, by a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, _Held] = {}

    def take(self, name: str, lease: Lease) -> None:
        self._held[name] = _Held(lease, self._clock() + lease.seconds)

    def end(self, name: str) -> None:
        self._held.pop(name, None)

    def expire(self) -> bool:
        """Drops leases that have run out; returns True if there were any."""
        now = self._clock()
        over = [name for name, held in self._held.items() if held.ends <= now]
        for name in over:
            del self._held[name]
        return bool(over)

    def status(self) -> dict[str, LeaseStatus]:
        """Returns the valid leases, in the order they were first taken."""
        now = self._clock()
        return {
            name: LeaseStatus(**dict(held.lease), seconds_left=max(0.0, held.ends - now))
            for name, held in self._held.items()
        }


def of_known_models(lease: Lease, known: Mapping[str, ServedModel]) -> Lease:
    """Returns a client's lease with the pool's own location of each model."""
    for model, served in lease.models.items():
        if model not in known or known[model].digest != served.digest:
            problem = "has other weights in this pool" if model in known else "is no model of this pool"
            reason = f"{model} {problem}, and only its admin key (ASSAY_POOL_ADMIN_KEY) may add a model."
            raise Refusal(403, reason, param=model)
    return lease.model_copy(update={"models": {model: known[model] for model in lease.models}})
