"""Who evaluates which of some wanted cells, where several runs want them: a share at a time, each cell by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from types import TracebackType

from prefect.runtime import flow_run

from tasks.cells import Cell
from tasks.claim_files import SeenClaim, Subject, claims_folder
from tasks.claims import LEASE_SECONDS, Claims
from tasks.progress import report_event
from tasks.records import now, read_record

_POLL_SECONDS = 2.0


class Shares:
    """Claims of some cells of one run, held for as long as the `with` block lasts.

    Args:
        cells: what is wanted, all of one run and one evaluation path.
        wait: whether cells that others have are waited for, in case these leave one without an outcome.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        wait: bool,
        lease_seconds: float = LEASE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._left = {key_of(cell): cell for cell in cells}
        self._wait, self._sleep = wait, sleep
        self._began: datetime = now()
        self._claims: Claims | None = None
        self._told: set[str] = set()
        if cells:
            folder = claims_folder(cells[0].config.evaluation_path, cells[0].reference.run)
            self._claims = Claims(folder, flow_run=flow_run.id, lease_seconds=lease_seconds)

    def __enter__(self) -> Shares:
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

    def next(self) -> list[Cell]:
        """Cells that are ours now and have no outcome; none once all have one, or others have them.

        Each cell is offered once. Of those that others had meanwhile, only what they left without an outcome is.

        Raises:
            StorageError: claims cannot be read or written.
        """
        claims = self._claims
        while claims is not None and self._left:
            acquired = claims.acquire([subject_of(cell) for cell in self._left.values()])
            ours = [self._left.pop(key) for key in list(self._left) if key in acquired.ours]
            wanted = [cell for cell in ours if not self._has_outcome(cell)]
            for cell in ours:
                if cell not in wanted:
                    claims.release(key_of(cell))
            if wanted or not self._wait:
                return wanted
            self._tell(acquired.others)
            if self._left:
                self._sleep(_POLL_SECONDS)
        return []

    def raise_if_lost(self, cell: Cell) -> None:
        """Raises ClaimLost where that is known already; asks nobody."""
        if self._claims is not None:
            self._claims.raise_if_lost(key_of(cell))

    def prove(self, cell: Cell) -> None:
        """Raises ClaimLost unless the cell is ours at this moment; asked before anything is published."""
        if self._claims is not None:
            self._claims.prove(key_of(cell))

    def release(self, cell: Cell) -> None:
        """Gives a cell up that has its outcome."""
        if self._claims is not None:
            self._claims.release(key_of(cell))

    def _has_outcome(self, cell: Cell) -> bool:
        """Whether another run has finished it since this one began, or succeeded at any time."""
        for one in filter(None, (cell, cell.alternative)):
            record = read_record(one.uri)
            if record is not None and (record.succeeded or record.created > self._began):
                return True
        return False

    def _tell(self, others: Sequence[SeenClaim]) -> None:
        for seen in others:
            if seen.claim.holder not in self._told:
                self._told.add(seen.claim.holder)
                number = sum(one.claim.holder == seen.claim.holder for one in others)
                report_event(f"waiting for {number} cells that {described(seen)} evaluates")


def key_of(cell: Cell) -> str:
    """The name of a cell among the claims of its run."""
    folder = cell.uri.rstrip("/").rsplit("/", 1)[1]
    return f"step-{cell.reference.step}.{folder}"


def subject_of(cell: Cell) -> Subject:
    """What is written into a claim of a cell."""
    return Subject(
        key=key_of(cell),
        checkpoint=cell.reference.name,
        evaluation_hash=cell.evaluation_hash,
        listing=cell.reference.listing,
    )


def described(seen: SeenClaim) -> str:
    """Who has a cell, for people."""
    if seen.holder is None:
        return "somebody who is gone"
    machine = seen.holder.process.machine.partition(" ")[0]
    return f"{seen.holder.user} on {machine} (process {seen.holder.process.pid})"
