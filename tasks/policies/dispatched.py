"""Flow runs dispatched to work pools to evaluate named cells, as read from the Prefect server.

A cell with a scheduled or active flow run is not sent again. A cell with an ended flow run and no record is sent again,
after the pauses and within the number of tries that the policy's `retries` sets for infrastructure failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from uuid import UUID

from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from pydantic import Field, ValidationError

from resources.config import Config
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing, by_budget
from tasks.prefect_server.client import every_page, prefect_client
from tasks.spec.names import in_few_words

FLOW = "evaluate-cells"
"""Name of the flow that evaluates named cells of a policy; each region has a deployment of it, `FLOW/<region>`."""
MOVED = "Moved"
"""State of a flow run taken back from a work pool that would not start it; counts as no failure."""
_AT_WORK = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
_REMEMBERED = timedelta(days=1)  # longer than the pauses of the default retry budget


class CellName(Config):
    """A cell, identified from a listing; a rewritten checkpoint counts as another cell."""

    run: str
    """Name of the run."""
    checkpoint: str
    """Name of the checkpoint."""
    listing: str
    """State of the checkpoint, from its file listing."""
    evaluation_hash: str
    """Hash of the evaluation."""


class CellNames(Config):
    """Cells of a policy."""

    names: tuple[CellName, ...] = Field(min_length=1)
    """Names of the cells."""

    def __str__(self) -> str:
        # short, for names of flow runs
        return in_few_words(dict.fromkeys(name.checkpoint for name in self.names))


def name_of_cell(cell: OpenCell) -> CellName:
    """Returns the name of a cell."""
    checkpoint = cell.checkpoint
    return CellName(
        run=cell.run, checkpoint=checkpoint.name, listing=checkpoint.listing, evaluation_hash=cell.evaluation.hash
    )


@dataclass(frozen=True)
class Dispatch:
    """A flow run at a work pool; times in seconds since the epoch."""

    id: UUID
    name: str
    work_pool: str
    state: str
    created: float
    cells: frozenset[CellName]
    begun: bool = False
    """True once a worker has taken it."""
    ended: float | None = None

    @property
    def described(self) -> str:
        return f"on work pool {self.work_pool}: flow run {self.name!r} is {self.state}"


@dataclass(frozen=True)
class Dispatches:
    """The flow runs of a policy at work pools: active, and ended within the last day."""

    at_work: Sequence[Dispatch] = ()
    ended: Sequence[Dispatch] = ()

    @cached_property
    def _holders(self) -> dict[CellName, Dispatch]:
        return {name: dispatch for dispatch in self.at_work for name in dispatch.cells}

    def holder(self, name: CellName) -> Dispatch | None:
        return self._holders.get(name)

    def tries(self, name: CellName) -> int:
        """Returns the number of ended flow runs of a cell."""
        return sum(name in dispatch.cells for dispatch in self.ended)

    def failures(self, name: CellName, *, since: float) -> list[Dispatch]:
        """Returns ended flow runs of a cell sent after `since`; if the cell is still missing, these are failures."""
        return [
            dispatch
            for dispatch in self.ended
            if name in dispatch.cells and dispatch.state != MOVED and dispatch.created > since
        ]


def with_dispatches(
    reconciliation: Reconciliation, listings: Sequence[RunListing], sent: Dispatches, policy: Policy, *, now: float
) -> Reconciliation:
    """Moves work with an active flow run, or with a next try that is not due, from `work` to `others`.

    Args:
        policy: its `retries` apply to crashed flow runs, too.
        now: seconds since the epoch.
    """
    if not sent.at_work and not sent.ended:
        return reconciliation
    by_run = {listing.name: listing for listing in listings}
    written = {
        (listing.name, record.checkpoint, record.evaluation_hash): record.created
        for listing in listings
        for record in sorted(listing.records.others, key=lambda record: record.created)
    }
    work, others = [], list(reconciliation.others)
    for cell in reconciliation.work:
        override = by_run[cell.run].overrides.newest(*cell.key, policy=policy.name)
        since = max(override.at if override is not None else 0.0, written.get((cell.run, *cell.key), 0.0))
        decided = _decided(cell, sent, policy, since=since, now=now)
        (work if decided.state == "work" else others).append(decided)
    return replace(reconciliation, work=work, others=others)


def _decided(cell: OpenCell, sent: Dispatches, policy: Policy, *, since: float, now: float) -> OpenCell:
    name = name_of_cell(cell)
    if (holder := sent.holder(name)) is not None:
        return replace(cell, state="scheduled", reason=holder.described)
    failures = sent.failures(name, since=since)
    if not failures:
        return cell
    last = max(failures, key=lambda dispatch: dispatch.ended or 0.0)
    if last.state == "Cancelled":  # by a user, maybe before it started
        return replace(cell, state="stopped", reason=f"cancelled with the flow run {last.name!r}")
    reason = f"the flow run {last.name!r} on work pool {last.work_pool} is {last.state} and left no record"
    ended = last.ended or 0.0
    return by_budget(cell, policy.retries, failures=len(failures), ended=ended, reason=reason, now=now)


def read_dispatches(policy: Policy) -> Dispatches:
    """Reads a policy's flow runs at work pools from the server.

    Raises:
        PrefectUnavailable: the server does not answer.
    """
    lately = {"end_time": {"after_": datetime.now(UTC) - _REMEMBERED}}
    with prefect_client() as client:
        at_work, ended = (
            every_page(
                client.read_flow_runs,
                flow_filter=FlowFilter.model_validate({"name": {"any_": [FLOW]}}),
                flow_run_filter=FlowRunFilter.model_validate(
                    {"tags": {"all_": [f"policy={policy.name}"]}, "state": {"type": {"any_": states}}, **more}
                ),
            )
            for states, more in ((_AT_WORK, {}), (_ENDED, lately))
        )
    return Dispatches(_read(at_work, policy), _read(ended, policy))


def _read(runs: Sequence[FlowRun], policy: Policy) -> list[Dispatch]:
    dispatches = []
    for run in runs:
        try:
            cells = CellNames.model_validate(run.parameters.get("cells"))
        except ValidationError:  # written by another version; claims prevent duplicate evaluations
            continue
        of: Any = run.parameters.get("policy") or {}
        if of.get("evaluation_path") != policy.evaluation_path or run.state is None or run.created is None:
            continue
        dispatches.append(
            Dispatch(
                run.id,
                run.name,
                run.work_pool_name or "none",
                run.state.name or run.state.type.value,
                run.created.timestamp(),
                frozenset(cells.names),
                begun=run.state.type is not StateType.SCHEDULED,
                ended=run.end_time.timestamp() if run.end_time else None,
            )
        )
    return dispatches
