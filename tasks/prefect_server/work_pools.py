"""Work pools on the Prefect server: their specification by the regions file, their state, and the differences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import WorkerStatus, WorkPool
from prefect.runtime import flow_run

from resources.errors import BadInput
from resources.regions.region_table import Region, Regions, WorkPoolType
from resources.regions.work_pools import WorkPoolState
from resources.settings import deployment_data
from tasks.prefect_server.client import prefect_client, read_or_none

LOCAL_WORK_POOL = "assay-local"
"""The work pool of the local machine; its worker runs flows as processes."""
_ABOUT = "Made from Assay's regions file: change it there, and apply it again."

Action = Literal["create", "update", "unchanged"]


@dataclass(frozen=True)
class WorkPoolSpec:
    """The specification of a work pool."""

    name: str
    type: WorkPoolType
    base_job_template: dict[str, Any]


@dataclass(frozen=True)
class WorkPoolChange:
    """The effect of applying a specification."""

    spec: WorkPoolSpec
    action: Action
    differs: tuple[str, ...] = ()
    """Paths in the current template that differ."""


def base_job_template(kind: WorkPoolType, *, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the template of a type, with some variables' defaults replaced."""
    template: dict[str, Any] = json.loads(deployment_data("work-pools", f"{kind}.json").read_text())
    variables: dict[str, Any] = template["variables"]["properties"]
    for name, default in (defaults or {}).items():
        if name not in variables:
            raise BadInput(
                expected=f"a variable of work pools of type {kind}: {', '.join(variables)}",
                found=repr(name),
                remedy="correct work_pool_variables in the regions file",
            )
        variables[name]["default"] = default
    return template


def wanted_work_pools(regions: Regions) -> list[WorkPoolSpec]:
    """Returns the work pool of this machine and those of the regions."""
    local = WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))
    return [local, *(_spec(region) for region in regions.regions if region.work_pool)]


def _spec(region: Region) -> WorkPoolSpec:
    assert region.work_pool is not None
    of_region = {"region": region.name} if region.work_pool_type in ("cloud-run-v2", "vertex-ai") else {}
    defaults = {**of_region, **region.work_pool_variables}
    return WorkPoolSpec(
        region.work_pool, region.work_pool_type, base_job_template(region.work_pool_type, defaults=defaults)
    )


def apply_work_pools(specs: Sequence[WorkPoolSpec], *, dry_run: bool = False) -> list[WorkPoolChange]:
    """Makes the server's work pools match the specifications, except limits and pauses; `dry_run` changes nothing."""
    with prefect_client() as client:
        changes = [_change(spec, read_or_none(client.read_work_pool, spec.name)) for spec in specs]
        for change in changes if not dry_run else ():
            spec = change.spec
            if change.action == "create":
                template = spec.base_job_template
                created = WorkPoolCreate(name=spec.name, type=spec.type, description=_ABOUT, base_job_template=template)
                client.create_work_pool(created)
            elif change.action == "update":
                client.update_work_pool(spec.name, WorkPoolUpdate(base_job_template=spec.base_job_template))
    return changes


def _change(spec: WorkPoolSpec, work_pool: WorkPool | None) -> WorkPoolChange:
    if work_pool is None:
        return WorkPoolChange(spec, "create")
    if work_pool.type != spec.type:
        raise BadInput(
            expected=f"a work pool {spec.name} of type {spec.type}, or none of that name",
            found=f"one of type {work_pool.type}",
            remedy=f"name another work pool in the regions file, or: prefect work-pool delete {spec.name}",
        )
    differs = tuple(_differing(work_pool.base_job_template, spec.base_job_template))
    return WorkPoolChange(spec, "update" if differs else "unchanged", differs)


def _differing(current: Any, specified: Any, path: str = "") -> Iterable[str]:
    if isinstance(current, dict) and isinstance(specified, dict):
        for key in sorted({*current, *specified}):
            yield from _differing(current.get(key), specified.get(key), f"{path}.{key}" if path else key)
    elif current != specified:
        yield path


def work_pool_states(names: Iterable[str]) -> dict[str, WorkPoolState]:
    """Returns the states of work pools by name, from the server."""
    with prefect_client() as client:
        return {name: _state(client, name) for name in names}


def _state(client: SyncPrefectClient, name: str) -> WorkPoolState:
    work_pool = read_or_none(client.read_work_pool, name)
    if work_pool is None:
        return WorkPoolState(exists=False)
    workers = client.read_workers_for_work_pool(name)
    return WorkPoolState(
        paused=work_pool.is_paused,
        live_workers=sum(worker.status is WorkerStatus.ONLINE for worker in workers),
        limit=work_pool.concurrency_limit,
        active=_active(client, name) if work_pool.concurrency_limit is not None else 0,
    )


def _active(client: SyncPrefectClient, name: str) -> int:
    own = {"id": {"not_any_": [flow_run.id]}} if flow_run.id else {}
    due = {"next_scheduled_start_time": {"before_": datetime.now(UTC)}}
    return sum(
        client.count_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": states}}, **more, **own}),
            work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [name]}}),
        )
        for states, more in ((("PENDING", "RUNNING", "CANCELLING"), {}), (("SCHEDULED",), due))
    )
