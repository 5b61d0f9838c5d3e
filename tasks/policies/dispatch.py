"""Dispatch of work to work pools: the batches, their costs, and their flow runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled
from pydantic import Field, ValidationError

from pools.weights.merges import locations_of
from resources.config import Config
from resources.errors import BadInput
from resources.regions.region_check import region_of_data
from resources.regions.region_table import Regions
from resources.regions.regions import known_regions
from resources.regions.work_pools import Source, WorkPoolChoice, WorkPoolState
from resources.storage import storage
from tasks.policies.batches import Batch, batches_of, placed, without_limits
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing, by_budget
from tasks.prefect_server.client import every_page, prefect_client
from tasks.prefect_server.work_pools import work_pool_states
from tasks.spec.evaluation import digest_of
from tasks.spec.names import in_few_words

TAG = "assay"
"""Tag of all Assay flow runs; an automation handles those without heartbeats."""


class Dispatcher:
    """Sends cells of a policy to the work pools of the regions; `sent` are its flow runs there."""

    def __init__(self, policy: Policy, listings: Sequence[RunListing], sent: Dispatches) -> None:
        self._policy, self._sent = policy, sent
        self._runs = {listing.name: listing.run for listing in listings}
        self._regions = known_regions()
        self._homes: dict[str, str | None] = {}

    @cached_property
    def _states(self) -> dict[str, WorkPoolState]:
        return states_of(self._regions)

    def batches(self, cells: Iterable[OpenCell]) -> list[Batch]:
        """Returns the batches that the cells would be sent in, in order; sends nothing."""
        return placed(
            batches_of(cells),
            regions=self._regions,
            states=self._states,
            source_of=self._source_of,
            max_egress_usd=Decimal(str(self._policy.max_egress_usd)),
        )

    def send(self, batch: Batch) -> FlowRun:
        """Creates a batch's flow run at its work pool, or returns the run that another process just created."""
        assert batch.choice is not None, "a batch that no work pool takes stays here"
        names = CellNames(names=tuple(sorted(map(name_of_cell, batch.cells), key=lambda name: name.model_dump_json())))
        tries = max(self._sent.tries(name) for name in names.names)
        policy = self._policy.model_copy(update={"runs": (self._runs[batch.cells[0].run],)})
        run = send_run(
            FLOW,
            batch.choice,
            parameters={"policy": policy.model_dump(mode="json"), "cells": names.model_dump(mode="json")},
            tags=[f"policy={self._policy.name}"],
            name=f"evaluate {self._policy.name} · {names}",
            key=digest_of([self._policy.name, self._policy.evaluation_path, names.model_dump(), tries]),
        )
        state = self._states[batch.choice.work_pool]  # count the slot as taken for later choices
        self._states[batch.choice.work_pool] = replace(state, active=state.active + 1)
        return run

    def move_stuck(self, reconciliation: Reconciliation) -> list[tuple[Dispatch, Batch]]:
        """Moves the cells of flow runs at paused or workerless pools to other pools, if these would start them now."""
        waiting = {dispatch.id: dispatch for dispatch in self._sent.at_work if not dispatch.begun}
        cells: dict[UUID, list[OpenCell]] = {}
        for cell in reconciliation.others if waiting else ():
            holder = self._sent.holder(name_of_cell(cell)) if cell.state == "scheduled" else None
            if holder is not None and holder.id in waiting:
                cells.setdefault(holder.id, []).append(cell)
        moved = []
        for id_, of_run in cells.items():
            state = without_limits(self._states).get(waiting[id_].work_pool)
            if state is not None and state.obstacle is None:
                continue  # it only waits for a free slot
            batches = self.batches(of_run)
            if all(batch.choice is not None for batch in batches) and _taken_back(waiting[id_]):
                for batch in batches:
                    self.send(batch)
                    moved.append((waiting[id_], batch))
        return moved

    def _source_of(self, cells: Sequence[OpenCell]) -> Source | None:
        run = cells[0].run
        if run not in self._homes:  # the lookup takes a second on some machines
            self._homes[run] = region_of_data(self._runs[run], self._regions)
        return source_of(dict.fromkeys(cell.checkpoint.uri for cell in cells), region=self._homes[run])


def states_of(regions: Regions) -> dict[str, WorkPoolState]:
    """Returns the states of all regions' work pools from the server."""
    return work_pool_states(region.work_pool for region in regions.regions if region.work_pool)


def source_of(uris: Iterable[str], *, region: str | None) -> Source | None:
    """Returns region and size in bytes of checkpoints; None if the region is unknown."""
    if region is None:
        return None
    places = (place for uri in uris for place in locations_of(uri))
    return Source(region, sum(file.size for place in places for file in storage.list_files(place)))


def send_run(
    flow: str, choice: WorkPoolChoice, *, parameters: dict[str, Any], tags: Sequence[str], name: str, key: str
) -> FlowRun:
    """Creates a flow run of a region's deployment, or returns the existing unfinished run with this key."""
    with prefect_client() as client:
        deployment = _deployment(client, flow, choice)
        while True:
            run = client.create_flow_run_from_deployment(
                deployment,
                parameters=parameters,
                tags=[TAG, f"region={choice.region.name}", *tags],
                name=name,
                idempotency_key=key,
                job_variables=choice.job_variables,
            )
            if run.state is None or not run.state.is_final():
                return run
            key = digest_of([key, str(run.id)])  # it is final: all callers derive the same next key


def _deployment(client: SyncPrefectClient, flow: str, choice: WorkPoolChoice) -> UUID:
    name = f"{flow}/{choice.region.name}"
    remedy = "assay work-pools apply, which makes it"
    try:
        deployment = client.read_deployment_by_name(name)
    except ObjectNotFound:
        raise BadInput(expected=f"a deployment {name} on the server", found="none", remedy=remedy) from None
    if deployment.work_pool_name != choice.work_pool:
        raise BadInput(
            expected=f"the deployment {name} at the work pool {choice.work_pool}",
            found=f"it belongs to {deployment.work_pool_name}",
            remedy=remedy,
        )
    return deployment.id


def _taken_back(dispatch: Dispatch) -> bool:
    with prefect_client() as client:
        run = client.read_flow_run(dispatch.id)
        if run.state is None or run.state.type is not StateType.SCHEDULED:
            return False
        state = Cancelled(name=MOVED, message=f"no worker starts it at {dispatch.work_pool}: its cells were moved")
        client.set_flow_run_state(dispatch.id, state)
        return True


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
    """Moves work with an active flow run, or with a next try that is not due, from `work` to `others`. `policy`: its
    `retries` apply to crashed flow runs, too. `now`: seconds since the epoch."""
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
    """Reads a policy's flow runs at work pools from the server. Raises PrefectUnavailable if the server does not
    answer."""
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
