"""Cells claimed by this run, of those that several runs want: each is evaluated by one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import TracebackType

from tasks.claims.files import SeenClaim, Subject, claims_folder, end_claim, read_claims
from tasks.claims.leases import LEASE_SECONDS, Claims
from tasks.prefect_server.lazy import flow_run_id
from tasks.prefect_server.progress import report_event
from tasks.records.record import end_scope_and_answers, now, read_record
from tasks.running.cells import Cell
from tasks.spec.names import how_many

_CLAIMS_POLL_SECONDS = 2.0


class ClaimedCells:
    """Claims of some cells of one run, held for as long as the `with` block lasts.

    Args:
        cells: what is wanted, all of one run and one evaluation path.
        wait: whether cells that others have are waited for, in case these leave one without an outcome.
        folder: where the claims lie; follows from the cells, so it is needed where these come later.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        wait: bool,
        folder: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._left: dict[str, Cell] = {}
        self._since: dict[str, datetime] = {}
        self.add(cells)
        self._wait, self._sleep = wait, sleep
        self._claims: Claims | None = None
        self._reported: set[str] = set()
        if folder is None and cells:
            folder = claims_folder(cells[0].config.evaluation_path, cells[0].reference.run)
        if folder is not None:
            self._claims = Claims(folder, flow_run=flow_run_id(), lease_seconds=lease_seconds)

    def __enter__(self) -> ClaimedCells:
        if self._claims is not None:
            self._claims.__enter__()
            if not self._claims.exclusive:
                report_event("this store lets two writers create one file: claims of cells are a best effort here")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._claims is not None:
            self._claims.__exit__(kind, error, trace)

    def add(self, cells: Iterable[Cell]) -> None:
        """Wants more cells."""
        for cell in cells:
            self._left[key_of(cell)] = cell
            self._since[key_of(cell)] = now()

    def next(self) -> list[Cell]:
        """Cells that are ours now and have no outcome; none once all have one, or others have them.

        Each cell is offered once. Of those that others had meanwhile, only what they left without an outcome is.

        Raises:
            StorageError: claims cannot be read or written.
        """
        while self._left:
            wanted = self.take()
            if wanted or not self._wait:
                return wanted
            if self._left:
                self._sleep(_CLAIMS_POLL_SECONDS)
        return []

    def take(self) -> list[Cell]:
        """Claims what can be had now, without waiting. The rest stays wanted."""
        claims = self._claims
        if claims is None or not self._left:
            return []
        acquired = claims.acquire([subject_of(cell) for cell in self._left.values()])
        ours = [cell for key, cell in self._left.items() if key in acquired.ours]
        try:
            wanted = [cell for cell in ours if not self._has_outcome(cell)]
        except BaseException:
            self.release(*ours)
            raise
        for cell in ours:
            del self._left[key_of(cell)]
            if cell not in wanted:
                claims.release(key_of(cell))
        if not wanted:
            self._tell(acquired.others)
        return wanted

    def raise_if_lost(self, cell: Cell) -> None:
        """Raises ClaimLost where that is known already; asks nobody."""
        if self._claims is not None:
            self._claims.raise_if_lost(key_of(cell))

    def prove(self, cell: Cell) -> None:
        """Raises ClaimLost unless the cell is ours at this moment; asked before anything is published."""
        if self._claims is not None:
            self._claims.prove(key_of(cell))

    def release(self, *cells: Cell) -> None:
        """Gives cells up that have their outcome, or are not to be begun."""
        for cell in cells:
            if self._claims is not None:
                self._claims.release(key_of(cell))

    def _has_outcome(self, cell: Cell) -> bool:
        since = self._since[key_of(cell)]
        for way in cell.ways:
            record = read_record(way.uri)
            if record is None or (way.record is not None and record.attempt == way.record.attempt):
                continue  # it stood before, whatever its clock said
            if record.succeeded or (record.created > since and not record.interrupted):
                return True
        return False

    def _tell(self, others: Sequence[SeenClaim]) -> None:
        for seen in others:
            who = seen.claim.holder if seen.readable else seen.uri
            if who not in self._reported:
                self._reported.add(who)
                number = sum(other.claim.holder == who for other in others) if seen.readable else 1
                report_event(f"waiting for {how_many(number, 'cell')} that {described(seen)} evaluates")


def put_away(cells: Sequence[Cell]) -> None:
    """Ends what runs that died right after a success left: their claim, the copy of the answers, the evaluation's name.

    An evaluation that is done afresh would otherwise go on with their sampled answers.

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
    """The name of a cell among the claims of its run."""
    folder = cell.uri.rstrip("/").rsplit("/", 1)[1]
    return f"step-{cell.reference.step}.{folder}"


def subject_of(cell: Cell) -> Subject:
    """The cell as its claim names it."""
    return Subject(
        key=key_of(cell),
        checkpoint=cell.reference.name,
        evaluation_hash=cell.evaluation_hash,
        listing=cell.reference.listing,
    )


def described(seen: SeenClaim) -> str:
    """The holder of a claim in words."""
    if not seen.readable:
        return f"somebody whose claim cannot be read ({seen.uri}): it ends {LEASE_SECONDS:g} s after it was written"
    if seen.holder is None:
        return "somebody who is gone"
    machine = seen.holder.process.machine.partition(" ")[0]
    return f"{seen.holder.user} on {machine} (process {seen.holder.process.pid})"
