"""Cells claimed by this run: of several runs that request a cell, a single run evaluates it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from types import TracebackType

from tasks.prefect_server.lazy import flow_run_id
from tasks.prefect_server.progress import report_event
from tasks.records.record import end_scope_and_answers, now, read_record
from tasks.running.cells import Cell
from tasks.running.claims.files import SeenClaim, Subject, claims_folder, end_claim, read_claims
from tasks.running.claims.leases import LEASE_SECONDS, Claims
from tasks.spec.names import how_many

_CLAIMS_POLL_SECONDS = 2.0


class ClaimedCells:
    """Claims of cells of a run, held while the `with` block lasts.

    Args:
        wait: True to wait for cells that other runs hold, in case these leave a cell without an outcome.
        folder: folder of the claims; derived from the cells when None, so required where cells are added later.
    """

    def __init__(self, cells: Sequence[Cell], *, wait: bool, folder: str | None = None) -> None:
        self._left: dict[str, Cell] = {}
        self._since: dict[str, datetime] = {}
        self.add(cells)
        self._wait = wait
        self._claims: Claims | None = None
        self._reported: set[str] = set()
        if folder is None and cells:
            folder = claims_folder(cells[0].config.evaluation_path, cells[0].reference.run)
        if folder is not None:
            self._claims = Claims(folder, flow_run=flow_run_id())

    def __enter__(self) -> ClaimedCells:
        if self._claims is not None:
            self._claims.__enter__()
            if not self._claims.exclusive:
                report_event("this store lets two writers create the same file: claims of cells are a best effort here")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._claims is not None:
            self._claims.__exit__(kind, error, trace)

    def add(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            self._left[key_of(cell)] = cell
            self._since[key_of(cell)] = now()

    def next(self) -> list[Cell]:
        """Returns newly claimed cells without an outcome; empty once all cells have an outcome or other holders.

        Each cell is returned once. A cell that another run held is returned only if that run left it without an
        outcome.
        """
        while self._left:
            claimed = self.take()
            if claimed or not self._wait:
                return claimed
            if self._left:
                time.sleep(_CLAIMS_POLL_SECONDS)
        return []

    def take(self) -> list[Cell]:
        """Claims all available cells without waiting. The rest stays requested."""
        claims = self._claims
        if claims is None or not self._left:
            return []
        acquired = claims.acquire([subject_of(cell) for cell in self._left.values()])
        ours = [cell for key, cell in self._left.items() if key in acquired.ours]
        try:
            open_cells = [cell for cell in ours if not self._has_outcome(cell)]
        except BaseException:
            self.release(*ours)
            raise
        for cell in ours:
            del self._left[key_of(cell)]
            if cell not in open_cells:
                claims.release(key_of(cell))
        if not open_cells:
            self._tell(acquired.others)
        return open_cells

    def raise_if_lost(self, cell: Cell) -> None:
        """Raises ClaimLost if the loss is known locally; sends no request."""
        if self._claims is not None:
            self._claims.raise_if_lost(key_of(cell))

    def prove(self, cell: Cell) -> None:
        """Raises ClaimLost unless this run holds the cell now; called before anything is published."""
        if self._claims is not None:
            self._claims.prove(key_of(cell))

    def release(self, *cells: Cell) -> None:
        for cell in cells:
            if self._claims is not None:
                self._claims.release(key_of(cell))

    def _has_outcome(self, cell: Cell) -> bool:
        since = self._since[key_of(cell)]
        for way in cell.ways:
            record = read_record(way.uri)
            if record is None or (way.record is not None and record.attempt == way.record.attempt):
                continue  # it existed at planning time; timestamps are not compared, since clocks differ
            if record.succeeded or (record.created > since and not record.interrupted):
                return True
        return False

    def _tell(self, others: Sequence[SeenClaim]) -> None:
        for seen in others:
            holder = seen.claim.holder if seen.readable else seen.uri
            if holder not in self._reported:
                self._reported.add(holder)
                number = sum(other.claim.holder == holder for other in others) if seen.readable else 1
                report_event(f"waiting for {how_many(number, 'cell')} that {described(seen)} evaluates")


def put_away(cells: Sequence[Cell]) -> None:
    """Cleans up leftovers of runs that crashed right after a success: claims, copies of the answers, and scopes.

    Otherwise a repeated evaluation would reuse their sampled answers.

    Raises:
        StorageError: claims cannot be read or written.
    """
    done = {key_of(cell): cell for cell in cells if cell.done}
    if not done:
        return
    first = next(iter(done.values()))
    folder = claims_folder(first.config.evaluation_path, first.reference.run)
    for seen in read_claims(folder, done):
        if seen.died(time.time()) and end_claim(seen):
            for way in done[seen.claim.subject.key].ways:
                end_scope_and_answers(way.uri)


def key_of(cell: Cell) -> str:
    """Returns the name of a cell among the claims of its run."""
    folder = cell.uri.rstrip("/").rsplit("/", 1)[1]
    return f"{cell.reference.folder}.{folder}"


def subject_of(cell: Cell) -> Subject:
    """Returns the cell as the subject of a claim."""
    return Subject(
        key=key_of(cell),
        checkpoint=cell.reference.name,
        evaluation_hash=cell.evaluation_hash,
        listing=cell.reference.listing,
    )


def described(seen: SeenClaim) -> str:
    """Returns the holder of a claim as display text."""
    if not seen.readable:
        return f"a run with a claim that cannot be read ({seen.uri}): it ends {LEASE_SECONDS:g} s after it was written"
    if seen.holder is None:
        return "a run that is gone"
    machine = seen.holder.process.machine.partition(" ")[0]
    return f"{seen.holder.user} on {machine} (process {seen.holder.process.pid})"
