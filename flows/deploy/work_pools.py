"""Deploys flows to the work pools of regions: the flows that are sent there, or all of `deployments/prefect.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pkgutil import resolve_name
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.utilities.callables import parameter_schema

from resources.regions.region_table import Regions
from resources.settings import deployment_data
from resources.storage.yaml_text import load_yaml
from tasks.prefect_server.client import prefect_client, read_or_none

DEPLOYMENTS = deployment_data("prefect.yaml")
"""Every flow, as deployed to the work pool of this machine."""
SENT = ("flows.reconcile.evaluate_cells", "flows.series.evaluate_checkpoints", "flows.suites.evaluate_suite")
"""The flows that are sent: by a policy, by `assay evaluate` with benchmarks, and with a suite."""


def deploy_flows(regions: Regions, *, every: bool = False, dry_run: bool = False) -> dict[str, list[str]]:
    """Creates or updates the deployments `<flow>/<region>` of the flows that are sent, or of every flow; idempotent.

    Returns changed deployments by work pool. They have no schedules and triggers.
    """
    content = load_yaml(DEPLOYMENTS.read_text())
    deployments = [_attributes(each) for each in content["deployments"] if every or each["entrypoint"] in SENT]
    with prefect_client() as client:
        return {
            region.work_pool: list(_deployed(client, region.work_pool, deployments, name=region.name, dry_run=dry_run))
            for region in regions.regions
            if region.work_pool
        }


def _attributes(deployment: dict[str, Any]) -> dict[str, Any]:
    schema = parameter_schema(resolve_name(deployment["entrypoint"])).model_dump_for_openapi()
    kept = {key: deployment[key] for key in ("entrypoint", "description", "parameters", "tags")}
    return {**kept, "parameter_openapi_schema": schema, "enforce_parameter_schema": True}


def _deployed(
    client: SyncPrefectClient, work_pool: str, deployments: Sequence[dict[str, Any]], *, name: str, dry_run: bool
) -> Iterator[str]:
    for attributes in ({**each, "work_pool_name": work_pool} for each in deployments):
        flow = resolve_name(attributes["entrypoint"]).name
        existing = read_or_none(client.read_deployment_by_name, f"{flow}/{name}")
        if existing is not None and all(getattr(existing, key) == value for key, value in attributes.items()):
            continue
        yield f"{flow}/{name}"
        if not dry_run:
            identifier = client.create_flow_from_name(flow)
            client.create_deployment(flow_id=identifier, name=name, pull_steps=[], **attributes)
