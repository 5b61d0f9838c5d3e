"""Deploys the flows of `deployments/prefect.yaml` to any work pool."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from resources.settings import deployment_data
from resources.storage.yaml_text import load_yaml
from tasks.errors import DeploymentFailed

DEPLOYMENTS = deployment_data("prefect.yaml")
"""Every flow, as deployed to the work pool of this machine."""


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
