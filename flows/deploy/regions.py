"""Deploys the flows that are sent to work pools, in each region, together with the work pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema

from flows.reconcile import evaluate_cells
from flows.series import evaluate_checkpoints
from flows.suites import evaluate_suite
from resources.regions.region_table import Regions
from tasks.policies.dispatch import TAG
from tasks.prefect_server.client import prefect_client

SENT: tuple[Flow[..., Any], ...] = (evaluate_cells, evaluate_checkpoints, evaluate_suite)
"""The flows that are sent: by a policy, by `assay evaluate` with benchmarks, and with a suite."""


def deploy_sent_flows(regions: Regions, *, dry_run: bool = False) -> dict[str, list[str]]:
    """Creates or updates the deployments `<flow>/<region>`; idempotent. Returns changed deployments by work pool."""
    with prefect_client() as client:
        return {
            region.work_pool: list(_deployed(client, region.work_pool, name=region.name, dry_run=dry_run))
            for region in regions.regions
            if region.work_pool
        }


def _deployed(client: SyncPrefectClient, work_pool: str, *, name: str, dry_run: bool) -> Iterator[str]:
    for flow in SENT:
        attributes: dict[str, Any] = {
            "entrypoint": f"{flow.fn.__module__}.{flow.fn.__name__}",
            "work_pool_name": work_pool,
            "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        }
        try:
            existing = client.read_deployment_by_name(f"{flow.name}/{name}")
        except ObjectNotFound:
            existing = None
        if existing is not None and all(getattr(existing, key) == value for key, value in attributes.items()):
            continue
        yield f"{flow.name}/{name}"
        if not dry_run:
            client.create_deployment(
                flow_id=client.create_flow_from_name(flow.name),
                name=name,
                description=(flow.description or "").partition("\n")[0],
                pull_steps=[],
                enforce_parameter_schema=True,
                tags=[TAG],
                **attributes,
            )
