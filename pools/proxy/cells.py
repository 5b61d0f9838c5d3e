"""Attempts at cells, opened and closed in the journal, so that their answers can be replayed and mirrored."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping

from pools.journal.cells import CellScope
from pools.journal.store import Journal
from pools.protocol import JournalStatus
from pools.proxy.connections.replies import Refusal

_REMEMBERED = 10_000
"""Most remembered cells that were opened or closed at this proxy: late requests cannot open another attempt at them."""
_TRACEPARENT = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Cells:
    """Cells that are being evaluated through this proxy; without a journal nothing is kept."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._opening: dict[CellScope, asyncio.Task[None]] = {}
        self._told: OrderedDict[str, bool] = OrderedDict()
        self._traces: OrderedDict[CellScope, bytes] = OrderedDict()

    async def ensure_open(self, scope: CellScope) -> None:
        """Continues an attempt of an earlier proxy process at its first request here, unless another attempt is open.

        The evaluator opens the attempt again later, with its mirror; until then its answers are kept in the journal.
        """
        if self._journal is None or self._journal.cells.is_open(scope.cell) or scope.cell in self._told:
            return
        opening = self._opening.get(scope)
        if opening is None:
            opening = self._opening[scope] = asyncio.create_task(self._journal.cells.go_on(scope))
            opening.add_done_callback(lambda _: self._opening.pop(scope, None))
        await asyncio.shield(opening)

    async def open(self, cell: str, attempt: str, options: Mapping[str, object]) -> None:
        """Opens an attempt at a cell; `options` may name a folder as `mirror`, and a span as `traceparent`."""
        mirror = options.get("mirror")
        if mirror is not None and not isinstance(mirror, str):
            raise Refusal(400, "mirror must be the address of a folder, or null.", param="mirror")
        trace = options.get("traceparent")
        if trace is not None and not (isinstance(trace, str) and _TRACEPARENT.fullmatch(trace)):
            raise Refusal(400, "traceparent must be as W3C's Trace Context has it, or null.", param="traceparent")
        self._remember(cell, mirrored=mirror is not None)
        if trace is not None:
            self._traces[CellScope(cell, attempt)] = trace.encode()
            if len(self._traces) > _REMEMBERED:
                self._traces.popitem(last=False)
        if self._journal is not None:
            await self._journal.cells.open_cell(CellScope(cell, attempt), mirror=mirror)

    async def close_cell(self, cell: str, attempt: str, options: Mapping[str, object]) -> None:
        """Closes an attempt at a cell; with `drop` in the options its mirror is deleted."""
        self._remember(cell, mirrored=self.is_mirrored(cell))
        self._traces.pop(CellScope(cell, attempt), None)
        if self._journal is not None:
            await self._journal.cells.close_cell(CellScope(cell, attempt), drop_mirror=options.get("drop") is True)

    def is_mirrored(self, cell: str) -> bool:
        """Returns True if answers of a cell are copied to a folder, as far as this proxy has been notified."""
        return self._told.get(cell, False)

    def traceparent(self, scope: CellScope | None) -> bytes | None:
        """Returns the span of an attempt at a cell, in the format of a `traceparent` header."""
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
