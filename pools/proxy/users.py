"""Users of the pool: their leases, and the attempts at cells that they open and close in the journal."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from pools.journal.cells import CellScope
from pools.journal.store import Journal
from pools.protocol import CellOptions, JournalStatus, Lease, LeaseStatus, ServedModel
from pools.proxy.connections.messages import Refusal

_REMEMBERED = 10_000
"""Most remembered cells that were opened or closed at this proxy: late requests cannot open another attempt at them."""


class Cells:
    """Cells that are being evaluated through this proxy; without a journal nothing is kept."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._told: OrderedDict[str, bool] = OrderedDict()
        self._traces: OrderedDict[CellScope, bytes] = OrderedDict()

    async def ensure_open(self, scope: CellScope) -> None:
        """Continues an attempt of an earlier proxy process at its first request here, unless another attempt is open.

        The evaluator opens the attempt again later, with its mirror; until then its answers are kept in the journal.
        """
        if self._journal is None or self._journal.cells.is_open(scope.cell) or scope.cell in self._told:
            return
        await self._journal.cells.go_on(scope)

    async def open(self, scope: CellScope, options: CellOptions) -> None:
        self._remember(scope.cell, mirrored=options.mirror is not None)
        if options.traceparent is not None:
            self._traces[scope] = options.traceparent.encode()
            if len(self._traces) > _REMEMBERED:
                self._traces.popitem(last=False)
        if self._journal is not None:
            await self._journal.cells.open_cell(scope, mirror=options.mirror)

    async def close_cell(self, scope: CellScope, options: CellOptions) -> None:
        self._remember(scope.cell, mirrored=self.is_mirrored(scope.cell))
        self._traces.pop(scope, None)
        if self._journal is not None:
            await self._journal.cells.close_cell(scope, drop_mirror=options.drop)

    def is_mirrored(self, cell: str) -> bool:
        """Returns True if answers of a cell are copied to a folder, as far as this proxy has been notified."""
        return self._told.get(cell, False)

    def traceparent(self, scope: CellScope | None) -> bytes | None:
        return self._traces.get(scope) if scope is not None and self._traces else None

    def _remember(self, cell: str, *, mirrored: bool) -> None:
        self._told[cell] = mirrored
        self._told.move_to_end(cell)
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)

    @property
    def journal_status(self) -> JournalStatus | None:
        return self._journal.counters if self._journal is not None else None

    async def close(self) -> None:
        if self._journal is not None:
            await self._journal.close()


class Leases:
    """The leases that have not run out, by a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, tuple[Lease, float]] = {}

    def take(self, name: str, lease: Lease) -> None:
        self._held[name] = lease, self._clock() + lease.seconds

    def end(self, name: str) -> None:
        self._held.pop(name, None)

    def expire(self) -> bool:
        before, now = len(self._held), self._clock()
        self._held = {name: held for name, held in self._held.items() if held[1] > now}
        return len(self._held) < before

    def status(self) -> dict[str, LeaseStatus]:
        now = self._clock()
        return {
            name: LeaseStatus(**dict(lease), seconds_left=max(0.0, ends - now))
            for name, (lease, ends) in self._held.items()
        }


def of_known_models(lease: Lease, known: Mapping[str, ServedModel]) -> Lease:
    """Returns a client's lease with the pool's own location of each model."""
    for model, served in lease.models.items():
        if model not in known or known[model].digest != served.digest:
            problem = "has other weights in this pool" if model in known else "is no model of this pool"
            reason = f"{model} {problem}, and only its admin key (ASSAY_POOL_ADMIN_KEY) may add a model."
            raise Refusal(403, reason, param=model)
    return lease.model_copy(update={"models": {model: known[model] for model in lease.models}})
