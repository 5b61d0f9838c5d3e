"""Deploys flows to work pools: the flows that are sent there, or all of `deployments/prefect.yaml`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.utilities.callables import parameter_schema

from flows.reconcile import evaluate_cells
from flows.series import evaluate_checkpoints
from flows.suites import evaluate_suite
from resources.regions.region_table import Regions
from resources.settings import deployment_data
from resources.storage.yaml_text import load_yaml
from tasks.errors import DeploymentFailed
from tasks.policies.dispatch import TAG
from tasks.prefect_server.client import prefect_client, read_or_none

DEPLOYMENTS = deployment_data("prefect.yaml")
"""Every flow, as deployed to the work pool of this machine."""
SENT: tuple[Flow[..., Any], ...] = (evaluate_cells, evaluate_checkpoints, evaluate_suite)
"""The flows that are sent: by a policy, by `assay evaluate` with benchmarks, and with a suite."""


def deployments_for(work_pool: str, *, name: str) -> dict[str, Any]:
    """Returns `deployments/prefect.yaml` for another work pool, without schedules and triggers."""
    content: dict[str, Any] = load_yaml(DEPLOYMENTS.read_text())
    content["deployments"] = [
        {
            **{key: value for key, value in deployment.items() if key not in ("schedules", "triggers")},
            "name": name,
            "work_pool": {"name": work_pool},
        }
        for deployment in content["deployments"]
    ]
    return content


def deploy_to(work_pool: str, *, name: str) -> None:
    """Deploys every flow to a work pool, and replaces deployments of that name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prefect.yaml"
        file.write_text(yaml.safe_dump(deployments_for(work_pool, name=name), sort_keys=False))
        command = ["-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise DeploymentFailed(
            expected=f"the flows deployed to the work pool {work_pool}",
            found=(ended.stdout + ended.stderr).strip()[-2000:],
            remedy="correct what Prefect complains about, and apply again",
        )


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
        existing = read_or_none(client.read_deployment_by_name, f"{flow.name}/{name}")
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
